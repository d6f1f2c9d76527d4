"""vLLM's native offloading, played: the modules that `kvtier.vllm.offloading` imports, with the calls that vLLM makes of a manager and a
worker in their order. Not vLLM's code: an implementation of the interface's rules for tests without vLLM (docs/vllm.md).

What is as there: a block is looked up by itself, and only a HIT is loaded; a job is reported once by every rank, and a load or store that
fails ends the engine; blocks of a store are held by nobody, and whoever gives them away has the worker wait for the job first.
"""

from __future__ import annotations

import abc
import enum
import importlib
import math
import sys
import types
from dataclasses import dataclass, field
from typing import Any

from kvtier.vllm.bases import KVConnectorBase_V1, KVConnectorMetadata, KVConnectorRole, KVConnectorStats, KVConnectorWorkerMetadata, SupportsHMA


OffloadKey = bytes


class LookupResult(enum.Enum):
    MISS = 1
    HIT = 2
    HIT_PENDING = 3
    RETRY = 4


def make_offload_key(block_hash: bytes, group_idx: int) -> bytes:
    return block_hash + group_idx.to_bytes(4, "big")


def get_offload_block_hash(key: bytes) -> bytes:
    return key[:-4]


def get_offload_group_idx(key: bytes) -> int:
    return int.from_bytes(key[-4:], "big")


class LoadStoreSpec:
    pass


@dataclass
class BlocksSpec(LoadStoreSpec):
    block_ids: list[int]


@dataclass
class ReqContext:
    req_id: str
    kv_transfer_params: dict[str, Any] | None = None


@dataclass
class RequestOffloadingContext:
    policy: str = "block_level"


@dataclass
class PrepareStoreOutput:
    keys_to_store: list[bytes]
    store_spec: LoadStoreSpec
    evicted_keys: list[bytes]


@dataclass
class TransferResult:
    job_id: int
    success: bool
    transfer_size: int | None = None
    transfer_time: float | None = None


class OffloadingManager(abc.ABC):
    @abc.abstractmethod
    def lookup(self, key: bytes, req_context: ReqContext) -> LookupResult: ...

    @abc.abstractmethod
    def prepare_load(self, keys: Any, req_context: ReqContext) -> LoadStoreSpec: ...

    @abc.abstractmethod
    def prepare_store(self, keys: Any, req_context: ReqContext) -> PrepareStoreOutput | None: ...

    @abc.abstractmethod
    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext: ...

    def complete_load(self, keys: Any, req_context: ReqContext) -> None:
        pass

    def complete_store(self, keys: Any, req_context: ReqContext, success: bool = True) -> None:
        pass

    def on_request_finished(self, req_context: ReqContext) -> None:
        pass

    def has_pending_work(self) -> bool:
        return False


class OffloadingWorker(abc.ABC):
    @abc.abstractmethod
    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool: ...

    @abc.abstractmethod
    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool: ...

    @abc.abstractmethod
    def get_finished(self) -> list[TransferResult]: ...

    @abc.abstractmethod
    def wait(self, job_ids: set[int]) -> None: ...

    def shutdown(self) -> None:
        pass


@dataclass(frozen=True)
class OffloadingCounterMetadata:
    documentation: str


@dataclass(frozen=True)
class OffloadingGaugeMetadata:
    documentation: str
    labelnames: tuple[str, ...] = ()


class OffloadingConnectorStats(KVConnectorStats):
    """Sums of an interval: `data` is {"types": {name: kind}, "data": {name: {label values: count}}}."""

    def __init__(self) -> None:
        super().__init__({"types": {}, "data": {}})

    def increase_counter(self, name: str, count: int, labelvalues: tuple[str, ...] = ()) -> None:
        self.data["types"][name] = "counter"
        of = self.data["data"].setdefault(name, {})
        of[labelvalues] = of.get(labelvalues, 0) + count

    def set_gauge(self, name: str, value: int, labelvalues: tuple[str, ...] = ()) -> None:
        self.data["types"][name] = "gauge"
        self.data["data"].setdefault(name, {})[labelvalues] = value


class OffloadPromMetrics:
    """What is observed must have been declared by the spec of the configuration."""

    def __init__(self, vllm_config: Any) -> None:
        extra = vllm_config.kv_transfer_config.kv_connector_extra_config
        kind = getattr(importlib.import_module(extra["spec_module_path"]), extra["spec_name"])
        self.declared = kind.build_metric_definitions(extra)
        self.told: dict[str, int] = {}
        self.gauges: dict[tuple[str, tuple[str, ...]], int] = {}

    def observe(self, data: dict[str, Any], engine_idx: int = 0) -> None:
        for name, of in data["data"].items():
            assert name in self.declared, f"{name} was not declared"
            if data["types"][name] == "gauge":
                assert all(len(labels) == len(self.declared[name].labelnames) for labels in of)
                self.gauges.update(((name, labels), value) for labels, value in of.items())
            else:
                self.told[name] = self.told.get(name, 0) + sum(of.values())


class OffloadingSpec(abc.ABC):
    @classmethod
    def build_metric_definitions(cls, extra_config: dict[str, Any]) -> dict[str, Any]:
        return {}

    def __init__(self, config: Any) -> None:
        self.config = config

    @abc.abstractmethod
    def get_manager(self) -> OffloadingManager: ...

    @abc.abstractmethod
    def get_worker(self, kv_caches: Any) -> OffloadingWorker: ...


@dataclass
class TransferJob:
    req_id: str
    src_spec: LoadStoreSpec
    dst_spec: LoadStoreSpec


@dataclass
class OffloadingConnectorMetadata(KVConnectorMetadata):
    load_jobs: dict[int, TransferJob]
    store_jobs: dict[int, TransferJob]
    jobs_to_flush: set[int] | None = None


@dataclass
class OffloadingWorkerMetadata(KVConnectorWorkerMetadata):
    completed_jobs: dict[int, int] = field(default_factory=dict)
    transfer_stats: Any = None

    def aggregate(self, other: Any) -> OffloadingWorkerMetadata:
        both = dict(self.completed_jobs)
        for job, count in other.completed_jobs.items():
            both[job] = both.get(job, 0) + count
        return OffloadingWorkerMetadata(both, self.transfer_stats)


@dataclass
class _Job:
    name: str
    keys: list[bytes]
    blocks: list[int]
    is_store: bool
    waiting: int


@dataclass
class _Known:
    request: Any
    context: ReqContext
    local: int = 0
    tables: list[list[int]] = field(default_factory=list)
    stored: list[int] = field(default_factory=list)


class OffloadingConnector(KVConnectorBase_V1, SupportsHMA):
    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        extra = vllm_config.kv_transfer_config.kv_connector_extra_config
        kind = getattr(importlib.import_module(extra["spec_module_path"]), extra["spec_name"])
        self.spec = kind(types.SimpleNamespace(extra_config=extra))
        self.groups = [(int(g.kv_cache_spec.block_size), g.kv_cache_spec.sliding_window or 0) for g in kv_cache_config.kv_cache_groups]
        self.hash_tokens = min(size for size, _ in self.groups)
        self.align = math.lcm(*(size for size, _ in self.groups))
        self.ranks = vllm_config.parallel_config.tensor_parallel_size * vllm_config.parallel_config.pipeline_parallel_size
        self.manager = self.spec.get_manager() if role == KVConnectorRole.SCHEDULER else None
        self.native: OffloadingWorker | None = None
        self._known: dict[str, _Known] = {}
        self._jobs: dict[int, _Job] = {}
        self._next = 0
        self._loads: dict[int, TransferJob] = {}
        self._unsubmitted: dict[int, TransferJob] = {}
        self._loading: dict[int, str] = {}
        self._completed: dict[int, int] = {}

    # ---- scheduler ----

    def on_new_request(self, request: Any) -> None:
        context = ReqContext(request.request_id, request.kv_transfer_params)
        self.manager.on_new_request(context)
        self._known[request.request_id] = _Known(request, context, stored=[0] * len(self.groups))

    def _key(self, known: _Known, group: int, block: int) -> bytes:
        step = self.groups[group][0] // self.hash_tokens
        return make_offload_key(known.request.block_hashes[(block + 1) * step - 1], group)

    def _hit(self, known: _Known, group: int, first: int, end: int) -> bool:
        return all(self.manager.lookup(self._key(known, group, i), known.context) is LookupResult.HIT for i in range(first, end))

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        known = self._known[request.request_id]
        known.tables = []
        if any(job.name == request.request_id for job in self._jobs.values()):
            return None, False
        known.local = num_computed_tokens
        if request.skip_reading_prefix_cache:
            return 0, False
        windows = any(window for _, window in self.groups)
        end = (request.num_tokens - windows) // self.align * self.align
        while end > num_computed_tokens:
            for group, (size, window) in enumerate(self.groups):
                first = num_computed_tokens // size
                if window:
                    first = max(first, end // size - math.ceil(window / size))
                if not self._hit(known, group, first, end // size):
                    break
            else:
                return end - num_computed_tokens, True
            end -= self.align
        return 0, False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if num_external_tokens == 0:
            return
        known = self._known[request.request_id]
        end = known.local + num_external_tokens
        keys, ids = [], []
        for group, (size, _) in enumerate(self.groups):
            table = blocks.get_block_ids()[group]
            for i in range(known.local // size, end // size):
                if table[i]:
                    keys.append(self._key(known, group, i))
                    ids.append(table[i])
            known.stored[group] = end // size
        self._loads[self._begin(known, keys, ids, False)] = TransferJob(
            known.context.req_id, self.manager.prepare_load(keys, known.context), BlocksSpec(ids)
        )

    def _begin(self, known: _Known, keys: list[bytes], ids: list[int], is_store: bool) -> int:
        number, self._next = self._next, self._next + 1
        self._jobs[number] = _Job(known.context.req_id, keys, ids, is_store, self.ranks)
        return number

    def build_connector_meta(self, output: Any) -> OffloadingConnectorMetadata:
        for new in output.scheduled_new_reqs:
            self._known[new.req_id].tables = [list(ids) for ids in new.block_ids]
        cached = output.scheduled_cached_reqs
        for i, name in enumerate(cached.req_ids):
            known, added = self._known[name], cached.new_block_ids[i]
            if name in cached.resumed_req_ids:
                known.tables = [list(ids) for ids in added]
            elif added is not None:
                for table, ids in zip(known.tables, added):
                    table.extend(ids)
        stores: dict[int, TransferJob] = {}
        fresh = set(output.new_blocks)
        computed = {item.name: (item.computed, item.end) for item in output.work}
        for name in [*output.num_scheduled_tokens, *output.finished_req_ids]:
            known = self._known.get(name)
            if known is None or not known.tables:
                continue
            before, after = computed.get(name, (known.request.num_computed_tokens,) * 2)
            keys, ids, ends = [], [], list(known.stored)
            for group, (size, window) in enumerate(self.groups):
                end = min(after, known.request.num_tokens) // size
                first = max(known.stored[group], (before - window + 1) // size if window else 0)
                for block in range(first, min(end, len(known.tables[group]))):
                    if known.tables[group][block] and (name in computed or known.tables[group][block] not in fresh):
                        keys.append(self._key(known, group, block))
                        ids.append(known.tables[group][block])
                ends[group] = max(known.stored[group], end)
            told = self.manager.prepare_store(keys, known.context) if keys else PrepareStoreOutput([], LoadStoreSpec(), [])
            if told is not None:  # else at the next step
                known.stored = ends
            if told is not None and told.keys_to_store:
                taken = [ids[keys.index(key)] for key in told.keys_to_store]
                number = self._begin(known, told.keys_to_store, taken, True)
                stores[number] = TransferJob(name, BlocksSpec(taken), told.store_spec)
        flush = {n for n, job in self._jobs.items() if job.is_store and n not in stores and fresh.intersection(job.blocks)}
        flush |= {n for n, job in self._jobs.items() if job.is_store and job.name in output.preempted_req_ids}
        for name in output.finished_req_ids:
            known = self._known.pop(name, None)
            if known is not None:
                self.manager.on_request_finished(known.context)
        loads, self._loads = self._loads, {}
        return OffloadingConnectorMetadata(loads, stores, flush)

    def update_connector_output(self, output: Any) -> None:
        told = output.kv_connector_worker_meta
        for number, count in (told.completed_jobs if told is not None else {}).items():
            job = self._jobs[number]
            job.waiting -= count
            if job.waiting == 0:
                del self._jobs[number]
                end = self.manager.complete_store if job.is_store else self.manager.complete_load
                end(job.keys, ReqContext(job.name))

    def has_pending_push_work(self) -> bool:
        return bool(self._jobs) or self.manager.has_pending_work()

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> tuple[bool, None]:
        return False, None

    def bind_gpu_block_pool(self, pool: Any) -> None:
        pass

    def get_kv_connector_stats(self) -> Any:
        return None

    @classmethod
    def build_kv_connector_stats(cls, data: Any = None) -> OffloadingConnectorStats:
        return OffloadingConnectorStats()

    @classmethod
    def build_prom_metrics(cls, vllm_config: Any, metric_types: Any, labelnames: Any, per_engine_labelvalues: Any) -> Any:
        return OffloadPromMetrics(vllm_config)

    def reset_cache(self) -> bool | None:
        return True

    # ---- worker ----

    def register_kv_caches(self, kv_caches: Any) -> None:
        self.native = self.spec.get_worker(kv_caches)

    def handle_preemptions(self, metadata: OffloadingConnectorMetadata) -> None:
        flush = metadata.jobs_to_flush or set()
        if flush:
            self._submit_stores()
            self.native.wait(flush)

    def _submit_stores(self) -> None:
        for number, job in self._unsubmitted.items():
            assert self.native.submit_store(number, job.src_spec, job.dst_spec)
        self._unsubmitted = {}

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        self._submit_stores()
        for number, job in self._connector_metadata.load_jobs.items():
            self._loading[number] = job.req_id
            assert self.native.submit_load(number, job.src_spec, job.dst_spec)

    def wait_for_save(self) -> None:
        pass

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str], set[str]]:
        self._unsubmitted.update(self._connector_metadata.store_jobs)
        received = set()
        for result in self.native.get_finished():
            assert result.success
            assert result.job_id not in self._completed, "a job was reported twice"
            self._completed[result.job_id] = 1
            name = self._loading.pop(result.job_id, None)
            if name is not None:
                received.add(name)
        return set(), received

    def build_connector_worker_meta(self) -> OffloadingWorkerMetadata | None:
        done, self._completed = self._completed, {}
        return OffloadingWorkerMetadata(done) if done else None

    def shutdown(self) -> None:
        if self.native is not None:
            self.native.shutdown()


def install() -> None:
    """As if vLLM were there, as far as `kvtier.vllm.offloading` looks."""
    this = sys.modules[__name__]
    below = "vllm.distributed.kv_transfer.kv_connector.v1"
    for name in ("vllm.v1.kv_offload.base", f"{below}.offloading.common", f"{below}.offloading_connector"):
        sys.modules[name] = this
