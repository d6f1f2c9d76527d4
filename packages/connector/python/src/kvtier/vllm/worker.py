"""The worker's half: maps the arena, copies what the scheduler's half planned, and says how it went. It needs no socket.

     metadata ──► start_load_kv ──► jobs of libkvtier (threads of their own)
                                        │ polled in get_finished
                                        ▼
     finished_recving, failed loads, checksums of stores ──► worker metadata ──► scheduler's half

Invariants: a load that was planned is reported by this rank exactly once, whatever became of it; that it failed is told in the same
pass, the engine by its blocks or by its request and not by both. Only a step that computes nothing waits, for what it has begun to
load, and no longer than it is told.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from kvtier.copies import Arena, Copies, Job, Layout, Mark
from kvtier.native import BAD, GOOD, MISSED
from kvtier.vllm import identity
from kvtier.vllm.arenas import ArenaGone, Arenas
from kvtier.vllm.device import Device
from kvtier.vllm.groups import Unsupported
from kvtier.vllm.guard import Troubles
from kvtier.vllm.messages import KvtierHandshake, KvtierMetadata, KvtierWorkerMetadata, LoadPlan, Part, Rank, StorePlan, unpacked
from kvtier.vllm.options import Options
from kvtier.vllm.registration import registered
from kvtier.vllm.resets import place_of
from kvtier.vllm.store_jobs import StoreJobs


class _Load:
    """A plan as this rank sees it."""

    def __init__(self, plan: LoadPlan) -> None:
        self.plan = plan
        self.jobs: list[tuple[Part, Job]] = []
        #: share -> indexes of blocks whose bytes are not what they should be.
        self.bad: dict[int, set[int]] = {}
        #: Blocks that nothing was copied to.
        self.missed: list[int] = []
        #: That had another reason than an arena that has gone: the next one may well be loaded from.
        self.failed = False

    def fail(self, blocks: Sequence[int]) -> None:
        """These could not be copied: of their bytes in the arena that says nothing."""
        self.missed.extend(blocks)
        self.failed = True


class WorkerHalf:
    def __init__(self, options: Options, vllm_config: Any, kv_cache_config: Any, troubles: Troubles) -> None:
        self.rank: Rank = identity.rank_of(vllm_config)
        self._options = options
        self._vllm_config = vllm_config
        self._kv_cache_config = kv_cache_config
        self._troubles = troubles
        self._copies: Copies | None = None
        self._device = Device()
        #: Behind what the engine has enqueued up to this step; made when a copy needs it.
        self._mark: Mark | None = None
        self._layouts: Sequence[Layout] = ()
        self._arenas = Arenas(self._live, options.arena_dir or None)
        self._loads: dict[int, _Load] = {}
        self._stores = StoreJobs(self.rank, self._begin_store, lambda part: self._layouts[part.group].payload_bytes, troubles)
        #: Of loads that have ended, the blocks that were not filled, until it is told that they have.
        self._unfilled: dict[str, set[int]] = {}
        #: What the engine is to be told of them.
        self._failed_blocks: set[int] = set()
        #: The engine takes failures of models with so many groups by request: see `tell`.
        self._several_groups = len(getattr(kv_cache_config, "kv_cache_groups", ())) > 1
        #: Requests whose loads have ended, until that is told.
        self._through: set[str] = set()
        #: How long this step may stand for loads.
        self._idle_s = 0.0
        self._report = KvtierWorkerMetadata()
        self._handshake = KvtierHandshake(rank=self.rank, refusal="no KV cache was registered")
        self._place = place_of(self)
        self.loaded_bytes = 0

    # ---- start ------------------------------------------------------------------------------------------------------

    def register(self, tensors: Mapping[str, Any]) -> None:
        threads = self._options.copy_threads
        try:
            copies = self._copies = Copies(load_threads=threads, store_threads=threads)
            found = registered(copies, self._vllm_config, self._kv_cache_config, self.rank, tensors)
            self._device, self._layouts, self._handshake = found.device, found.layouts, found.handshake
        except Unsupported as error:
            self._handshake = KvtierHandshake(rank=self.rank, refusal=str(error))
            self._end_copies()
        except Exception as error:
            self._troubles.note("register_kv_caches", error)
            self._handshake = KvtierHandshake(rank=self.rank, refusal=f"its KV cache cannot be used ({error})")
            self._end_copies()

    def handshake(self) -> KvtierHandshake:
        return replace(self._handshake, place=self._place)

    # ---- each step ----------------------------------------------------------------------------------------------------

    def start(self, metadata: KvtierMetadata) -> None:
        """Begins what is planned. Copies order themselves: blocks of stores are held, blocks of loads are the request's alone."""
        self._idle_s = metadata.idle_s
        if metadata.asks:
            self._report.handshakes[self.rank] = self.handshake()
        try:
            self._adopt()
            self._arenas.follow(metadata.arenas)
        except Exception as error:
            self._troubles.note("mapping the arena", error)
        try:
            for plan in metadata.loads:
                self._start_load(plan)
            for store in metadata.stores:
                self._stores.start(store)
        finally:
            mark, self._mark = self._mark, None
            if mark is not None:
                mark.close()

    def give_up(self, metadata: Any) -> None:
        """Of a step that could not be begun: what of it is not under way ends, as a load that failed or a store that was not copied."""
        if not isinstance(metadata, KvtierMetadata):
            return
        for plan in metadata.loads:
            if plan.number not in self._loads:
                load = self._loads[plan.number] = _Load(plan)
                for part in plan.parts:
                    if self.rank in part.ranks:
                        load.fail(unpacked(part.blocks))
        for store in metadata.stores:
            self._stores.give_up(store)

    def _behind(self) -> Mark | None:
        """Blocks may still be written, zeroed or read by what the engine has enqueued."""
        if self._mark is None:
            self._mark = self._device.mark(self._live())
        return self._mark

    def _start_load(self, plan: LoadPlan) -> None:
        load = _Load(plan)
        self._loads[plan.number] = load
        for part in plan.parts:
            if self.rank not in part.ranks:
                continue
            try:
                load.jobs.append((part, self._arenas.begin(part.arena, functools.partial(self._load, part))))
            except ArenaGone:
                load.missed.extend(unpacked(part.blocks))
            except Exception as error:
                self._troubles.note("a load", error)
                load.fail(unpacked(part.blocks))

    def _load(self, part: Part, arena: Arena) -> Job:
        blocks, offsets, sums = unpacked(part.blocks), unpacked(part.offsets), unpacked(part.sums)
        return self._live().load(arena, self._layouts[part.group], blocks, offsets, sums, self._behind())

    def _begin_store(self, part: Part) -> Job:
        blocks, offsets, layout = unpacked(part.blocks), unpacked(part.offsets), self._layouts[part.group]
        return self._arenas.begin(part.arena, lambda arena: self._live().store(arena, layout, blocks, offsets, self._behind()))

    def _live(self) -> Copies:
        if self._copies is None:
            raise RuntimeError("no KV cache is registered")
        return self._copies

    def finished(self) -> set[str]:
        """Requests whose load this rank is through with; what became of them is to be told (`tell`)."""
        self._adopt()
        if self._loads and self._idle_s > 0:
            self._stand()
        for number, load in list(self._loads.items()):
            if any(not job.ended() for _, job in load.jobs):
                continue
            try:
                self._settle(load)
            except Exception as error:
                self._troubles.note("a load", error)
                self._fail_all(load)
            del self._loads[number]
            self._through.add(load.plan.request_id)
        self._stores.poll()
        through, self._through = self._through, set()
        return through

    def _stand(self) -> None:
        """The engine has nothing else to do, and would sleep: until the first of the loads has come, it stands here."""
        until = time.monotonic() + self._idle_s
        self._idle_s = 0.0
        load = next(iter(self._loads.values()))
        for _, job in load.jobs:
            if not job.ended(max(0.0, until - time.monotonic())):
                return

    def _settle(self, load: _Load) -> None:
        for part, job in load.jobs:
            try:
                good = job.take_good()
            except Exception as error:
                self._troubles.note("a load", error)
                good = bytearray([MISSED]) * job.count
            copied = good.count(GOOD)
            self.loaded_bytes += copied * self._layouts[part.group].payload_bytes
            if copied < job.count:
                bad = {i for i, flag in enumerate(good) if flag == BAD}
                if bad:
                    load.bad[part.share] = bad
                if copied + len(bad) < job.count:
                    load.fail([block for block, flag in zip(unpacked(part.blocks), good) if flag == MISSED])
        self.fail(load.plan.request_id, [*load.plan.failed, *load.missed])
        by_share = {part.share: part for part in load.plan.parts}
        for share, indexes in load.bad.items():
            blocks = unpacked(by_share[share].blocks)
            self.fail(load.plan.request_id, [blocks[i] for i in indexes])
        self._report.loaded.setdefault(load.plan.number, set()).add(self.rank)
        if load.bad:
            self._report.bad[load.plan.number] = load.bad
        if load.failed:
            self._report.missed.add(load.plan.number)

    def end_all(self) -> set[str]:
        """Where `finished` fails for good: the loads that nothing copies for any more end as failed, and are computed."""
        through, self._through = self._through, set()
        for number, load in list(self._loads.items()):
            if any(not job.ended() for _, job in load.jobs):
                continue
            for _, job in load.jobs:
                job.abandon()
            self._fail_all(load)
            del self._loads[number]
            through.add(load.plan.request_id)
        return through

    def loading(self, number: int) -> bool:
        return number in self._loads

    def _fail_all(self, load: _Load) -> None:
        self.fail(load.plan.request_id, load.plan.failed)
        for part in load.plan.parts:
            self.fail(load.plan.request_id, unpacked(part.blocks))
        self._report.loaded.setdefault(load.plan.number, set()).add(self.rank)
        self._report.missed.add(load.plan.number)

    def fail(self, name: str, blocks: Sequence[int]) -> None:
        """Of the load of this name, these were not filled."""
        if blocks:
            self._unfilled.setdefault(name, set()).update(blocks)

    def tell(self, names: Iterable[str], by_request: bool) -> set[str]:
        """The engine is told that these loads have ended: which of them are to be said to have failed. `by_request`: it takes that, and of
        several groups nothing else; there its requests are computed from their beginning. Else it is told their blocks.

        Of one group by blocks always: what is in front of the first one that failed is kept.
        """
        failed = set()
        for name in names:
            blocks = self._unfilled.pop(name, None)
            if blocks is None:
                continue
            if by_request and self._several_groups:
                failed.add(name)
                self._report.failed |= blocks
            else:
                self._failed_blocks |= blocks
        return failed

    def failed_blocks(self) -> set[int]:
        failed, self._failed_blocks = self._failed_blocks, set()
        self._report.failed |= failed
        return failed

    def report(self) -> KvtierWorkerMetadata | None:
        self._report.stored.update(self._stores.take())
        if self._report.is_empty():
            return None
        report, self._report = self._report, KvtierWorkerMetadata()
        return report

    # ---- for who plans otherwise ------------------------------------------------------------------------------------

    @property
    def block_bytes(self) -> int:
        return max((layout.payload_bytes for layout in self._layouts), default=0)

    @property
    def stored_bytes(self) -> int:
        return self._stores.stored_bytes

    def storing(self, number: int) -> bool:
        return self._stores.under_way(number)

    def has_copied(self, number: int, share: int, until: float) -> bool:
        """Of a store's part, whether its blocks are not read any more; waits until then at the most."""
        return self._stores.has_ended((number, share), until)

    def refuse(self, plan: StorePlan) -> None:
        self._stores.refuse(plan)

    def flush(self, number: int, until: float) -> None:
        self._stores.flush(number, until)

    def spoil(self, number: int) -> None:
        self._stores.spoil(number)

    # ---- the rest -----------------------------------------------------------------------------------------------------

    def _adopt(self) -> None:
        for number in self._arenas.adopt(self._device.ordinal):
            self._report.mapped.setdefault(number, set()).add(self.rank)

    def device_counters(self) -> dict[str, int]:
        """What a GPU's copies have besides; what is not a sum is not here."""
        if self._device.ordinal is None or self._copies is None:
            return {}
        counts = self._copies.counts()
        return {"bounced_bytes": counts.bounced_bytes, "late_blocks": counts.late_blocks, "pins_refused": counts.pins_refused}

    def shutdown(self) -> None:
        self._arenas.close()
        self._end_copies()

    def _end_copies(self) -> None:
        """Threads have a moment to end. What copies that still run use stays for ever; what a GPU holds back, until it lets go of it."""
        copies, self._copies = self._copies, None
        if copies is not None:
            copies.close(1.0)
