"""vLLM's base classes where it is installed, and stand-ins of the same names where it is not.

Looked up when this module is imported, so that the contract test runs on a machine without vLLM. Only offload_bases.py and
naming.py do so, too: vLLM imports the connector in every process, the API server's too. Invariant: stand-ins never take the
places of an installed vLLM's own classes: one that lacks any of them is refused, but for what only newer ones have and ask for.
"""

from __future__ import annotations

import dataclasses
import enum
from typing import Any

from kvtier import engines
from kvtier.vllm.versions import KNOWN

__all__ = [
    "HAS_VLLM",
    "KVConnectorBase_V1",
    "KVConnectorHandshakeMetadata",
    "KVConnectorMetadata",
    "KVConnectorPromMetrics",
    "KVConnectorRole",
    "KVConnectorStats",
    "KVConnectorTransferResults",
    "KVConnectorWorkerMetadata",
    "SupportsHMA",
    "lacking",
    "takes_failed_requests",
    "vllm_version",
]

HAS_VLLM = engines.is_installed("vllm", "KVTIER_WITHOUT_VLLM")


def lacking(error: ImportError) -> ImportError:
    return engines.lacking("vLLM", "vllm", ", ".join(row.minor for row in KNOWN), error)


if HAS_VLLM:
    try:
        from vllm.distributed.kv_transfer.kv_connector.v1.base import (  # type: ignore[import-not-found]
            KVConnectorBase_V1,
            KVConnectorHandshakeMetadata,
            KVConnectorMetadata,
            KVConnectorRole,
            KVConnectorWorkerMetadata,
            SupportsHMA,
        )
        from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (  # type: ignore[import-not-found]
            KVConnectorPromMetrics,
            KVConnectorStats,
        )
    except ImportError as error:
        raise lacking(error) from error
    try:
        from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults
    except ImportError:  # below 0.30
        KVConnectorTransferResults = None
else:

    class KVConnectorRole(enum.Enum):  # type: ignore[no-redef]
        SCHEDULER = 0
        WORKER = 1

    class KVConnectorMetadata:  # type: ignore[no-redef]
        pass

    class KVConnectorWorkerMetadata:  # type: ignore[no-redef]
        pass

    class KVConnectorHandshakeMetadata:  # type: ignore[no-redef]
        pass

    class SupportsHMA:  # type: ignore[no-redef]
        pass

    class KVConnectorBase_V1:  # type: ignore[no-redef]
        """What of the real one this package leans on."""

        def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
            self._connector_metadata: Any = None
            self._vllm_config = vllm_config
            self._kv_transfer_config = vllm_config.kv_transfer_config
            self._kv_cache_config = kv_cache_config
            self._role = role

        def bind_connector_metadata(self, connector_metadata: Any) -> None:
            self._connector_metadata = connector_metadata

        def clear_connector_metadata(self) -> None:
            self._connector_metadata = None

        def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
            sent, received = self.get_finished(finished_req_ids)
            return KVConnectorTransferResults(set(sent or ()), set(received or ()))

        def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
            return None, None

        def has_pending_block_frees(self) -> bool:
            return False

    @dataclasses.dataclass
    class KVConnectorTransferResults:  # type: ignore[no-redef]
        finished_sending: set[str] = dataclasses.field(default_factory=set)
        finished_recving: set[str] = dataclasses.field(default_factory=set)
        failed_recving: set[str] = dataclasses.field(default_factory=set)

    @dataclasses.dataclass
    class KVConnectorStats:  # type: ignore[no-redef]
        data: dict[str, Any] = dataclasses.field(default_factory=dict)

    class KVConnectorPromMetrics:  # type: ignore[no-redef]
        def __init__(self, vllm_config: Any, metric_types: Any, labelnames: Any, per_engine_labelvalues: Any) -> None:
            self._labelnames = labelnames
            self.per_engine_labelvalues = per_engine_labelvalues


def takes_failed_requests() -> bool:
    """This vLLM asks for failed loads by request: where a model has several groups, blocks that failed would end it."""
    return "failed_recving" in getattr(KVConnectorTransferResults, "__dataclass_fields__", ())


def vllm_version() -> str | None:
    """None where there is none."""
    if not HAS_VLLM:
        return None
    import vllm  # type: ignore[import-not-found]

    return str(getattr(vllm, "__version__", "unknown"))
