"""``KvtierStorage``: SGLang's third tier in a cache node (docs/sglang.md).

     sglang serve ... --hicache-storage-backend dynamic --hicache-storage-backend-extra-config
       '{"backend_name": "kvtier", "module_path": "kvtier.sglang.storage", "class_name": "KvtierStorage", "interface_v1": 1,
         "kvtier": {"socket": "/run/kvtier/node.sock"}}'

     SGLang's threads        exists ──► get ──► set            tensors of its own (`Tensors`) ──┐
                               │         │       │             pages of its host pools ─────────┴─► `Pages` ─► node, arena
                               └─ lookup └─ load └─ reserve, commit

Invariants: no call raises into SGLang, and none gives back None: either would end a thread of it for good. A page that is said to be
loaded was verified. A call ends at its deadline, and leaves no page in use.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from kvtier.errors import KvError
from kvtier.guard import Troubles
from kvtier.sglang import options as options_of
from kvtier.sglang.bases import HiCacheStorage, PoolTransferResult, server_args, sglang_version, storage_metrics
from kvtier.sglang.gauges import AttachedGauge
from kvtier.sglang.pages import HASH_BYTES, Pages, held, held_each
from kvtier.sglang.shares import Share, Shares
from kvtier.sglang.tensors import Tensors
from kvtier.sglang.transfers import Transfers

T = TypeVar("T")

_TRAILING = "trailing_pages"


def _names(keys: Sequence[str]) -> bytes | None:
    """Packed names; None where one is not a chain hash."""
    try:
        packed = bytes.fromhex("".join(keys))
    except (ValueError, TypeError):
        return None
    return packed if len(packed) == HASH_BYTES * len(keys) and all(len(key) == 2 * HASH_BYTES for key in keys) else None


def _text(name: Any) -> str:
    """Of a pool or a policy: an enumeration of texts, or a text."""
    return str(getattr(name, "value", name))


class KvtierStorage(HiCacheStorage):  # type: ignore[misc]
    """One object in each rank's scheduler process."""

    def __init__(self, storage_config: Any, kwargs: dict[str, Any] | None = None) -> None:
        """@raises BadOptions, which ends SGLang's start: nothing else does"""
        self.options = options_of.parse(getattr(storage_config, "extra_config", None))
        self.troubles = Troubles(logging.getLogger("kvtier.sglang"))
        model = str(getattr(storage_config, "model_name", None) or "")
        self._gauge = AttachedGauge(bool(getattr(storage_config, "enable_storage_metrics", False)), model)
        self.shares = Shares(self.options, storage_config, server_args(), sglang_version(), self.troubles)
        self.pages = Pages(self.shares, self.options.piece_bytes)
        self._tensors = Tensors(self.shares, self.pages)
        self._transfers = Transfers(storage_metrics())
        #: SGLang hands over indices of its host pool, and not tensors.
        self._zero_copy = bool(storage_config.extra_config.get("interface_v1"))

    # ---- pools ------------------------------------------------------------------------------------------------------------

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        super().register_mem_pool_host(mem_pool_host)
        self._guarded("register_mem_pool_host", lambda: self._register(mem_pool_host), None)

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        super().register_mem_host_pool_v2(host_pool, host_pool_name)
        name = _text(host_pool_name)
        if name != "kv":  # it is known already
            self._guarded("register_mem_host_pool_v2", lambda: self.shares.register(name, host_pool), None)

    # ---- pages of the KV pool ---------------------------------------------------------------------------------------------

    def batch_exists(self, keys: list[str], extra_info: Any = None) -> int:
        return self._guarded("batch_exists", lambda: self._held(keys), 0)

    def batch_get_v1(self, keys: list[str], host_indices: Any, extra_info: Any = None) -> list[bool]:
        return self._guarded("batch_get_v1", lambda: self._get("kv", keys, host_indices), [False] * len(keys))

    def batch_set_v1(self, keys: list[str], host_indices: Any, extra_info: Any = None) -> list[bool]:
        prefix = getattr(extra_info, "prefix_keys", None)
        return self._guarded("batch_set_v1", lambda: self._set("kv", keys, host_indices, prefix), [False] * len(keys))

    # ---- several pools ----------------------------------------------------------------------------------------------------

    def batch_exists_v2(self, keys: list[str], pool_transfers: Any = None, extra_info: Any = None) -> PoolTransferResult:
        nothing: tuple[int, dict[Any, int]] = (0, {})
        return PoolTransferResult(*self._guarded("batch_exists_v2", lambda: self._held_v2(keys, pool_transfers), nothing))

    def batch_get_v2(self, transfers: Any, extra_info: Any = None) -> dict[Any, list[bool]]:
        return {one.name: self._moved(one, self._get, "batch_get_v2") for one in transfers}

    def batch_set_v2(self, transfers: Any, extra_info: Any = None) -> dict[Any, list[bool]]:
        return {one.name: self._moved(one, self._set, "batch_set_v2") for one in transfers}

    # ---- pages that callers bring as tensors ------------------------------------------------------------------------------

    def exists(self, key: str) -> bool:
        return self._guarded("exists", lambda: self._tensors.held(key, self._lookup_s), False)

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> Any:
        return self.batch_get([key], [target_location])[0]

    def batch_get(self, keys: list[str], target_locations: Any = None, target_sizes: Any = None) -> list[Any]:
        if not self.options.load:
            return [None] * len(keys)
        return self._guarded("batch_get", lambda: self._tensors.load(keys, target_locations, self._load_s), [None] * len(keys))

    def set(self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None) -> bool:
        return self.batch_set([key], [value])

    def batch_set(self, keys: list[str], values: Any = None, target_locations: Any = None, target_sizes: Any = None) -> bool:
        if not self.options.store:
            return True
        return self._guarded("batch_set", lambda: self._tensors.store(keys, values, self._store_s), False)

    # ---- life -------------------------------------------------------------------------------------------------------------

    def clear(self) -> bool:
        """A new generation: what is in the node ages out of it, and may be others'."""

        def renewed() -> bool:
            self.shares.renew()
            return True

        return self._guarded("clear", renewed, False)

    def close(self) -> None:
        self._guarded("close", self.shares.close, None)
        self._guarded("close", lambda: self._gauge.say(False), None)

    def get_stats(self) -> Any:
        """Pages and GB/s of each batch of KV pages since the last call, for SGLang's histograms; None: there was none."""
        if self._gauge.is_kept:
            self._guarded("get_stats", lambda: self._gauge.say(self.shares.attached), None)
        return self._guarded("get_stats", self._transfers.take, None)

    # ---- inside -----------------------------------------------------------------------------------------------------------

    @property
    def _lookup_s(self) -> float:
        return self.options.lookup_deadline_ms / 1000

    @property
    def _load_s(self) -> float:
        return self.options.load_deadline_ms / 1000

    @property
    def _store_s(self) -> float:
        return self.options.store_deadline_ms / 1000

    def _guarded(self, where: str, work: Callable[[], T], default: T) -> T:
        try:
            return work()
        except KvError as error:  # the world's: the node went, its arena lies elsewhere in this container
            self.shares.complain(f"{where}: {error}")
        except Exception as error:
            self.troubles.note(where, error)
        return default

    def _register(self, pool: Any) -> None:
        self.shares.register("kv", pool)
        if not self._zero_copy:
            self._tensors.expect(pool.get_dummy_flat_data_page())

    def _held(self, keys: list[str]) -> int:
        if not self.options.load or not keys:
            return 0
        if not self._zero_copy:
            return self._tensors.held_run(keys, self._lookup_s)
        share, names = self.shares.share("kv"), _names(keys)
        return held(share, names, self._lookup_s) if share is not None and names is not None else 0

    def _held_v2(self, keys: list[str], pool_transfers: Any) -> tuple[int, dict[Any, int]]:
        names = _names(keys)
        pages = self._held(keys)
        hits: dict[Any, int] = {_kv_name(pool_transfers): pages} if pages else {}
        final = pages
        for transfer in pool_transfers or ():
            if final == 0:
                break
            other = self.shares.share(_text(transfer.name))
            run = 0
            if other is not None and names is not None:
                there = held_each(other, names[: pages * HASH_BYTES], self._lookup_s)
                if _text(transfer.hit_policy) == _TRAILING:
                    run = _longest_with_tail(there, max(1, len(transfer.keys or ())))
                else:
                    run = there.index(False) if False in there else len(there)
            if run:
                hits[transfer.name] = run
            final = min(final, run)
        return final, hits

    def _share_for(self, pool: str, keys: Sequence[str], host_indices: Any) -> tuple[Share, bytes, list[int]] | None:
        share, names = self.shares.share(pool), _names(keys)
        if share is None or share.view is None or names is None or not keys or host_indices is None:
            return None
        blocks = share.view.blocks(host_indices, len(keys))
        return (share, names, blocks) if blocks is not None else None

    def _get(self, pool: str, keys: list[str], host_indices: Any) -> list[bool]:
        loading = self.shares.loading()  # first: from here on the pages may be taken away
        found = self._share_for(pool, keys, host_indices) if self.options.load else None
        if found is None:
            return [False] * len(keys)
        began = time.perf_counter()
        good = self.pages.load(found[0], found[1], found[2], self._load_s, loading)
        if pool == "kv":
            self._transfers.loaded(sum(good), sum(good) * found[0].payload_bytes, time.perf_counter() - began)
        return good

    def _set(self, pool: str, keys: list[str], host_indices: Any, prefix: Any = None) -> list[bool]:
        if not self.options.store:
            return [True] * len(keys)  # SGLang tells every page that could not be stored
        found = self._share_for(pool, keys, host_indices)
        if found is None:
            return [False] * len(keys)
        share, names, blocks = found
        if not share.writes:
            return [True] * len(keys)  # another rank stores the same bytes
        parent = (_names(prefix[-1:]) or b"") if prefix else b""
        began = time.perf_counter()
        there = self.pages.store(share, parent, names, blocks, self._store_s)
        if pool == "kv":
            self._transfers.stored(sum(there), sum(there) * share.payload_bytes, time.perf_counter() - began)
        return there

    def _moved(self, transfer: Any, move: Callable[[str, list[str], Any], list[bool]], where: str) -> list[bool]:
        keys = list(transfer.keys or ())
        return self._guarded(where, lambda: move(_text(transfer.name), keys, transfer.host_indices), [False] * len(keys))


def _kv_name(pool_transfers: Any) -> Any:
    """The KV pool's name as SGLang writes it."""
    kinds = {type(one.name) for one in pool_transfers or ()}
    kind = kinds.pop() if len(kinds) == 1 else str
    try:
        return kind("kv")
    except ValueError:
        return "kv"


def _longest_with_tail(there: Sequence[bool], tail: int) -> int:
    """The longest prefix whose last `tail` pages are all there; 0: none."""
    run = 0
    best = 0
    for i, one in enumerate(there):
        run = run + 1 if one else 0
        if run >= min(tail, i + 1):
            best = i + 1
    return best
