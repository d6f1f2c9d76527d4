"""The worker's half under vLLM's native offloading: vLLM's jobs wait for the plans of the same numbers, and end with their copies.

Invariant: every job that vLLM submits is reported, and as a success: it has no word for another end, and would end the engine. What
was not loaded is among the failed blocks, or the failed requests, of the same step; what was not stored is not committed.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from kvtier.vllm.guard import Troubles, harmless
from kvtier.vllm.messages import KvtierMetadata, LoadPlan, Part, StorePlan, packed, unpacked
from kvtier.vllm.offload_bases import OffloadingWorker, TransferResult
from kvtier.vllm.offload_messages import Numbered, OffloadMetadata
from kvtier.vllm.worker import WorkerHalf

#: vLLM gives blocks away that a store still reads: so long is waited for its copy.
FLUSH_LIMIT_S = 2.0


@dataclass
class _Job:
    number: int
    blocks: list[int]
    began: float
    planned: bool = False


class OffloadWorker(OffloadingWorker):  # type: ignore[misc]
    def __init__(self, half: WorkerHalf | None, troubles: Troubles) -> None:
        self.troubles = troubles
        #: Of the step that comes: vLLM gives blocks away before it says what the step is to copy.
        self.coming: KvtierMetadata | None = None
        self._half = half
        #: Stores of that step that were begun before it.
        self._early: set[int] = set()
        self._loads: dict[int, _Job] = {}
        self._stores: dict[int, _Job] = {}
        #: Names of loads that the half is through with, until their jobs have ended.
        self._through: set[str] = set()
        self._done: list[TransferResult] = []
        #: Of loads that are done, the names that the half knows them by.
        self._names: dict[int, str] = {}
        #: Whose load a job is, until it has ended.
        self._requests: dict[int, str] = {}
        #: While the engine is told what has ended: it takes failures by request, and these are they.
        self._failed: set[str] | None = None

    def _not_begun(self, job_id: int, source: Any, target: Any) -> bool:
        """Nothing is copied for it: it ends, a load with its blocks failed."""
        loading = isinstance(source, Numbered)
        self._loads.pop(job_id, None)
        self._stores.pop(job_id, None)
        if loading:
            self._fail(job_id, 0, [int(block) for block in target.block_ids])
        self._done.append(TransferResult(job_id, True, 0, 0.0))
        return True

    def _fail(self, job_id: int, number: int, blocks: list[int]) -> None:
        """`number`: of its plan, or 0."""
        name = self._names[job_id] = str(number) if number else f"job {job_id}"
        if self._half is not None:
            self._half.fail(name, blocks)

    def come(self, jobs: Mapping[int, Any]) -> None:
        """Loads of a step, before they are submitted: of which requests they are."""
        for job_id, job in jobs.items():
            self._requests[job_id] = job.req_id

    @contextlib.contextmanager
    def by_request(self) -> Iterator[set[str]]:
        """The engine asks for what has ended: the requests whose loads have failed. Of their blocks it hears nothing then."""
        failed: set[str] = set()
        self._failed = failed
        try:
            yield failed
        finally:
            self._failed = None

    @harmless(lambda: True, _not_begun)
    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        self._begin(self._stores, job_id, dst_spec, src_spec)
        return True

    @harmless(lambda: True, _not_begun)
    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        self._begin(self._loads, job_id, src_spec, dst_spec)
        return True

    def _begin(self, jobs: dict[int, _Job], job_id: int, plan: Any, places: Any) -> None:
        number = plan.number if isinstance(plan, Numbered) else 0
        jobs[job_id] = _Job(number, [int(block) for block in places.block_ids], time.monotonic())

    def start(self, metadata: OffloadMetadata) -> None:
        """After vLLM's own jobs of this step were submitted."""
        half, told = self._half, metadata.kvtier
        self.coming, early, self._early = None, self._early, set()
        if half is None:
            return
        loads = {job.number: job for job in self._loads.values() if not job.planned}
        stores = {job.number: job for job in self._stores.values() if not job.planned}
        planned = KvtierMetadata(told.arenas, idle_s=told.idle_s, asks=told.asks)
        for load in told.loads:
            job = loads.get(load.number)
            if job is None:  # it has ended without its plan: the lease ends, too
                planned.loads.append(LoadPlan(load.number, load.request_id, []))
            else:
                job.planned = True
                failed = [job.blocks[place] for place in load.failed if place < len(job.blocks)]
                planned.loads.append(LoadPlan(load.number, load.request_id, [_placed(p, job) for p in load.parts], failed))
        for store in told.stores:
            if store.number in early:
                continue
            owner = stores.get(store.number)
            if owner is not None:
                owner.planned = True
                planned.stores.append(StorePlan(store.number, [_placed(p, owner) for p in store.parts]))
            else:  # its blocks were given away meanwhile
                half.refuse(store)
        half.start(planned)
        for number in metadata.ended:
            if number in stores:
                stores[number].planned = True

    def give_up(self, metadata: OffloadMetadata) -> None:
        """Of a step that could not be begun: what of it is not under way ends."""
        self.coming, self._early = None, set()
        for owner in self._stores.values():
            owner.planned = True
        if self._half is None:
            return
        loads = {job.number: job for job in self._loads.values()}
        told = metadata.kvtier
        all_failed = []
        for load in told.loads:
            job = loads.get(load.number)
            if job is not None:
                job.planned = True
            parts = [_placed(part, job) for part in load.parts] if job is not None else []
            all_failed.append(LoadPlan(load.number, load.request_id, parts, list(job.blocks) if job is not None else []))
        self._half.give_up(KvtierMetadata(told.arenas, all_failed, told.stores))

    def get_finished(self) -> list[TransferResult]:
        self._collect_all()
        done, self._done = self._done, []
        for result in done:
            name, request = self._names.pop(result.job_id, None), self._requests.pop(result.job_id, None)
            if name is None or self._half is None:
                continue
            if self._failed is None or request is None:
                self._half.tell((name,), by_request=False)
            elif self._half.tell((name,), by_request=True):
                self._failed.add(request)
        return done

    def _end_all(self) -> None:
        """Where it fails for good: what nothing copies for any more ends, loads with their blocks failed."""
        half = self._half
        if not self.troubles.stopped or half is None:
            return
        half.end_all()
        for jobs in (self._loads, self._stores):
            for job_id, job in list(jobs.items()):
                if half.loading(job.number) if jobs is self._loads else half.storing(job.number):
                    continue
                if jobs is self._loads:
                    self._fail(job_id, job.number, job.blocks)
                del jobs[job_id]
                self._done.append(TransferResult(job_id, True, 0, time.monotonic() - job.began))

    @harmless(lambda: None, _end_all)
    def _collect_all(self) -> None:
        self._collect()

    def _collect(self) -> None:
        half = self._half
        if half is not None:
            self._through |= half.finished()
        for job_id, job in list(self._loads.items()):
            name = str(job.number)
            if name in self._through or not job.planned:
                self._names[job_id] = name
                if not job.planned:
                    self._fail(job_id, job.number, job.blocks)  # a load without a plan ends, and its blocks are computed
                self._end(self._loads, job_id)
                self._through.discard(name)
        if not self._loads:
            self._through.clear()  # ended by themselves
        for job_id, job in list(self._stores.items()):
            if half is None or job.number == 0 or (job.planned and not half.storing(job.number)):
                self._end(self._stores, job_id)

    def _end(self, jobs: dict[int, _Job], job_id: int) -> None:
        job = jobs[job_id]
        size = len(job.blocks) * self._half.block_bytes if self._half is not None else 0
        self._done.append(TransferResult(job_id, True, size, time.monotonic() - job.began))
        del jobs[job_id]

    def _not_waited(self, job_ids: set[int]) -> None:
        """What was not waited for may be half somebody else's: it is not stored."""
        for job_id in job_ids:
            job = self._stores.pop(job_id, None)
            if job is not None:
                if self._half is not None:
                    self._half.spoil(job.number)
                self._done.append(TransferResult(job_id, True, 0, time.monotonic() - job.began))

    @harmless(lambda: None, _not_waited)
    def wait(self, job_ids: set[int]) -> None:
        """Blocks that these jobs use are somebody else's after it."""
        until = time.monotonic() + FLUSH_LIMIT_S
        self._begin_early(job_ids)
        for job_id in job_ids:
            job = self._stores.get(job_id)
            if job is None:
                continue
            if self._half is not None:
                self._half.flush(job.number, until)
            self._end(self._stores, job_id)

    def _begin_early(self, job_ids: set[int]) -> None:
        """What a window has left is given away in the step after it was stored, which brings its plan: the whole job would be lost."""
        half, coming = self._half, self.coming
        if half is None or coming is None:
            return
        owners = {job.number: job for job_id, job in self._stores.items() if job_id in job_ids and not job.planned}
        plans = []
        for store in coming.stores:
            owner = owners.get(store.number)
            if owner is not None:
                owner.planned = True
                self._early.add(store.number)
                plans.append(StorePlan(store.number, [_placed(part, owner) for part in store.parts]))
        if plans:
            half.start(KvtierMetadata(coming.arenas, stores=plans))

    @harmless(lambda: None)
    def shutdown(self) -> None:
        if self._half is not None:
            self._half.shutdown()


def _placed(part: Part, job: _Job) -> Part:
    return replace(part, blocks=packed(job.blocks[place] for place in unpacked(part.blocks)))
