"""What the connector over vLLM's native offloading is made of, of vLLM's own; one that lacks any of it is refused in one line."""

from kvtier.vllm.bases import lacking

try:
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import (  # type: ignore[import-not-found]
        OffloadingConnectorMetadata,
        OffloadingWorkerMetadata,
    )
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector  # type: ignore[import-not-found]
    from vllm.v1.kv_offload.base import (  # type: ignore[import-not-found]
        LoadStoreSpec,
        LookupResult,
        OffloadingCounterMetadata,
        OffloadingGaugeMetadata,
        OffloadingManager,
        OffloadingSpec,
        OffloadingWorker,
        OffloadKey,
        PrepareStoreOutput,
        ReqContext,
        RequestOffloadingContext,
        TransferResult,
        get_offload_block_hash,
        get_offload_group_idx,
        make_offload_key,
    )
except ImportError as error:
    raise lacking(error) from error

__all__ = [
    "LoadStoreSpec",
    "LookupResult",
    "OffloadKey",
    "OffloadingConnector",
    "OffloadingConnectorMetadata",
    "OffloadingCounterMetadata",
    "OffloadingGaugeMetadata",
    "OffloadingManager",
    "OffloadingSpec",
    "OffloadingWorker",
    "OffloadingWorkerMetadata",
    "PrepareStoreOutput",
    "ReqContext",
    "RequestOffloadingContext",
    "TransferResult",
    "get_offload_block_hash",
    "get_offload_group_idx",
    "make_offload_key",
]
