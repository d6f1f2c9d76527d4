"""SGLang's classes where it is installed, and stand-ins of the same names where it is not, for the contract test. No other module here
imports SGLang at import. Invariant: a stand-in never takes the place of an installed SGLang's `HiCacheStorage`: one that lacks it is
refused.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from kvtier import engines

__all__ = [
    "HAS_SGLANG",
    "HiCacheStorage",
    "KNOWN_VERSIONS",
    "PoolTransferResult",
    "agreed",
    "page_indices",
    "server_args",
    "sglang_version",
    "storage_metrics",
]

#: Minor versions that were looked at (docs/sglang.md).
KNOWN_VERSIONS = ("0.5",)

HAS_SGLANG = engines.is_installed("sglang", "KVTIER_WITHOUT_SGLANG")

if HAS_SGLANG:
    try:
        from sglang.srt.mem_cache.hicache_storage import HiCacheStorage  # type: ignore[import-not-found]
    except ImportError as error:
        raise engines.lacking("SGLang", "sglang", ", ".join(KNOWN_VERSIONS), error) from error
else:

    class HiCacheStorage:  # type: ignore[no-redef]
        """What of the real one this package leans on."""

        def register_mem_pool_host(self, mem_pool_host: Any) -> None:
            self.mem_pool_host = mem_pool_host

        def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
            if not hasattr(self, "registered_pools"):
                self.registered_pools: dict[Any, Any] = {}
            self.registered_pools[host_pool_name] = host_pool


try:
    if not HAS_SGLANG:
        raise ImportError("no SGLang")
    from sglang.srt.mem_cache.hicache_storage import PoolTransferResult
except ImportError:  # also a version without pools beside the KV

    @dataclass
    class PoolTransferResult:  # type: ignore[no-redef]
        kv_hit_pages: int
        extra_pool_hit_pages: dict[Any, int] = field(default_factory=dict)


@dataclass
class _StorageMetrics:
    prefetch_pgs: list[int] = field(default_factory=list)
    backup_pgs: list[int] = field(default_factory=list)
    prefetch_bandwidth: list[float] = field(default_factory=list)
    backup_bandwidth: list[float] = field(default_factory=list)


def storage_metrics() -> Any:
    """The class whose lists SGLang's histograms take; None where it has none, and takes nothing."""
    if not HAS_SGLANG:
        return _StorageMetrics
    for module in ("sglang.srt.observability.metrics_collector", "sglang.srt.metrics.collector"):
        try:
            return __import__(module, fromlist=["StorageMetrics"]).StorageMetrics
        except (ImportError, AttributeError):
            continue
    return None


def sglang_version() -> str | None:
    """None where there is none."""
    if not HAS_SGLANG:
        return None
    from sglang.version import __version__  # type: ignore[import-not-found]

    return str(__version__)


def server_args() -> Any:
    """What this process's scheduler was started with; None where that cannot be asked."""
    if not HAS_SGLANG:
        return None
    for module, name in (("sglang.srt.runtime_context", "get_server_args"), ("sglang.srt.server_args", "get_global_server_args")):
        try:
            found = getattr(__import__(module, fromlist=[name]), name)()
        except Exception:
            continue
        if found is not None:
            return found
    return None


#: A rank waits so long for the word of another.
_AGREE_S = 2.0
_AGREED = "kvtier/flushed-together"


def agreed(own: str) -> str | None:
    """What the ranks of this engine's process group have agreed on: `own` of the one that asks first. None: there is no such group, or
    its store does not answer.
    """
    said: list[str] = []
    thread = threading.Thread(target=lambda: _agree(own, said.append), name="kvtier-agree", daemon=True)
    thread.start()
    thread.join(_AGREE_S)
    return said[0] if said else None


def _agree(own: str, tell: Callable[[str], None]) -> None:
    try:
        from torch.distributed import distributed_c10d  # type: ignore[import-not-found]

        # Empty: as long as nobody has said anything.
        found = distributed_c10d._get_default_store().compare_set(_AGREED, "", own)
        tell(found.decode() if isinstance(found, bytes) else str(found))
    except Exception:
        return


def page_indices(page: int, page_tokens: int) -> Any:
    """Indices of one page of a host pool, as its own methods take them."""
    numbers = range(page * page_tokens, (page + 1) * page_tokens)
    try:
        import torch  # type: ignore[import-not-found]
    except ImportError:
        from array import array

        return array("q", numbers)
    return torch.tensor(numbers, dtype=torch.int64)
