"""The worker's half: maps the arena, copies what the scheduler's half planned, and says how it went. It needs no socket.

     metadata ──► start_load_kv ──► jobs of libkvtier (threads of their own)
                                        │ polled in get_finished
                                        ▼
     finished_recving, failed blocks, checksums of stores ──► worker metadata ──► scheduler's half

Invariants: a load that was planned is reported by this rank exactly once, whatever became of it; its failed blocks are reported in
the same pass. Only a step that computes nothing waits, for what it has begun to load, and no longer than it is told.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping
from functools import partial
from typing import Any

from kvtier.copies import Arena, ArenaRef, Copies, Job, Layout, Mark, Part
from kvtier.errors import KvError
from kvtier.vllm import identity, layouts
from kvtier.vllm.bases import vllm_version
from kvtier.vllm.device import Device, device_of
from kvtier.vllm.groups import Unsupported, groups_of
from kvtier.vllm.guard import Troubles
from kvtier.vllm.messages import ArenaPlace, KvtierHandshake, KvtierMetadata, KvtierWorkerMetadata, LoadPlan, Rank, StorePlan
from kvtier.vllm.messages import Part as PlannedPart
from kvtier.vllm.messages import packed, unpacked
from kvtier.vllm.options import Options

log = logging.getLogger("kvtier.vllm")

#: A mapping that failed is tried again after this, at the next step.
_RETRY_S = 0.5


class _Load:
    """A plan as this rank sees it."""

    def __init__(self, plan: LoadPlan) -> None:
        self.plan = plan
        self.jobs: list[tuple[PlannedPart, Job]] = []
        #: share -> indexes of blocks that are not what they should be.
        self.bad: dict[int, set[int]] = {}


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
        #: Arenas of which it was not told yet whether they are pinned.
        self._untold: set[int] = set()
        self._layouts: list[Layout] = []
        self._arenas: dict[int, Arena] = {}
        #: Arenas whose mapping is under way or has failed, by id.
        self._mapping: dict[int, threading.Thread] = {}
        self._lock = threading.Lock()
        self._complaint = ""
        self._new_arenas: dict[int, Arena] = {}
        self._loads: dict[int, _Load] = {}
        self._stores: dict[tuple[int, int], tuple[PlannedPart, Job]] = {}
        #: Stores whose blocks were given away before their copy ended: told when nothing writes to their slots any more.
        self._spoilt: list[tuple[tuple[int, int], Job]] = []
        self._failed_blocks: set[int] = set()
        #: Requests whose loads have ended, until that is told.
        self._through: set[str] = set()
        #: How long this step may stand for loads.
        self._idle_s = 0.0
        self._report = KvtierWorkerMetadata()
        self._handshake = KvtierHandshake(rank=self.rank, refusal="no KV cache was registered")
        self.loaded_bytes = 0
        self.stored_bytes = 0

    # ---- start ------------------------------------------------------------------------------------------------------

    def register(self, tensors: Mapping[str, Any]) -> None:
        try:
            self._handshake = self._use(tensors)
        except Unsupported as error:
            self._handshake = KvtierHandshake(rank=self.rank, refusal=str(error))
        except Exception as error:
            self._troubles.note("register_kv_caches", error)
            self._handshake = KvtierHandshake(rank=self.rank, refusal=f"its KV cache cannot be used ({error})")

    def _use(self, tensors: Mapping[str, Any]) -> KvtierHandshake:
        identity.check_supported(self._vllm_config)
        config = self._kv_cache_config
        _, hashed = identity.block_sizes(self._vllm_config, config)
        groups = groups_of(config, hashed, identity.uses_eagle(self._vllm_config))
        blocks = int(config.num_blocks)
        views = layouts.views_of(groups, tensors, blocks)
        device = self._device = device_of([tensors[view.layer] for group in views for view in group])
        threads = self._options.copy_threads
        copies = self._copies = Copies(load_threads=threads, store_threads=threads)
        try:
            for group in views:
                parts = [Part(base=base, stride=stride, row_bytes=size) for base, stride, size in layouts.pieces_of(group)]
                self._layouts.append(copies.layout(parts, blocks, device.ordinal))
        except KvError as error:
            raise Unsupported(str(error)) from error
        read, write = partial(device.read, copies), partial(device.write, copies)
        for group in views:
            for view in group:
                layouts.check_canary(tensors[view.layer], view, blocks, read, write, device.settle)
        version = vllm_version()
        prints = [
            identity.group_layout(self._vllm_config, group, of, device.kind, version, self.rank[0]).fingerprint()
            for group, of in zip(groups, views)
        ]
        payloads = tuple(layout.payload_bytes for layout in self._layouts)
        return KvtierHandshake(rank=self.rank, payload_bytes=payloads, fingerprints=tuple(prints))

    def handshake(self) -> KvtierHandshake:
        return self._handshake

    # ---- each step ----------------------------------------------------------------------------------------------------

    def start(self, metadata: KvtierMetadata) -> None:
        """Begins what is planned. Copies order themselves: blocks of stores are held, blocks of loads are the request's alone."""
        self._idle_s = metadata.idle_s
        try:
            self._map(metadata.arenas)
        except Exception as error:
            self._troubles.note("mapping the arena", error)
        try:
            for plan in metadata.loads:
                self._start_load(plan)
            for plan in metadata.stores:
                self._start_store(plan)
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
                        load.bad[part.share] = set(range(len(part.blocks) // 8))
        for store in metadata.stores:
            for part in store.parts:
                key = (store.number, part.share)
                under_way = key in self._stores or any(key == spoilt for spoilt, _ in self._spoilt)
                if not under_way and part.ranks and part.ranks[0] == self.rank:
                    self._report.stored[key] = b""

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
                arena = self._arenas[part.arena]
                job = self._live().load(
                    arena,
                    self._layouts[part.group],
                    unpacked(part.blocks),
                    unpacked(part.offsets),
                    unpacked(part.sums),
                    self._behind(),
                )
                load.jobs.append((part, job))
            except Exception as error:
                self._troubles.note("a load", error)
                load.bad[part.share] = set(range(len(part.blocks) // 8))

    def _start_store(self, plan: StorePlan) -> None:
        for part in plan.parts:
            if not part.ranks or part.ranks[0] != self.rank:
                continue
            key = (plan.number, part.share)
            try:
                job = self._live().store(
                    self._arenas[part.arena],
                    self._layouts[part.group],
                    unpacked(part.blocks),
                    unpacked(part.offsets),
                    self._behind(),
                )
                self._stores[key] = part, job
            except Exception as error:
                self._troubles.note("a store", error)
                self._report.stored[key] = b""

    def _live(self) -> Copies:
        if self._copies is None:
            raise RuntimeError("no KV cache is registered")
        return self._copies

    def finished(self) -> set[str]:
        """Requests whose load this rank is through with."""
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
        for key, job in [one for one in self._spoilt if one[1].ended()]:
            self._spoilt.remove((key, job))
            self._report.stored[key] = b""
        for key, (part, job) in list(self._stores.items()):
            if not job.ended():
                continue
            del self._stores[key]
            try:
                copied = job.take()
                self._report.stored[key] = b"" if copied.bad else packed(copied.checksums)
                self.stored_bytes += (job.count - len(copied.bad)) * self._layouts[part.group].payload_bytes
            except Exception as error:
                self._troubles.note("a store", error)
                self._report.stored[key] = b""
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
                bad = job.take_bad()
            except Exception as error:
                self._troubles.note("a load", error)
                bad = list(range(job.count))
            self.loaded_bytes += (job.count - len(bad)) * self._layouts[part.group].payload_bytes
            if bad:
                load.bad[part.share] = set(bad)
        self._failed_blocks.update(load.plan.failed)
        by_share = {part.share: part for part in load.plan.parts}
        for share, indexes in load.bad.items():
            blocks = unpacked(by_share[share].blocks)
            self._failed_blocks.update(blocks[i] for i in indexes)
        self._report.loaded.setdefault(load.plan.number, set()).add(self.rank)
        if load.bad:
            self._report.bad[load.plan.number] = load.bad

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
        self._failed_blocks.update(load.plan.failed)
        for part in load.plan.parts:
            self._failed_blocks.update(unpacked(part.blocks))
        self._report.loaded.setdefault(load.plan.number, set()).add(self.rank)

    def failed_blocks(self) -> set[int]:
        failed, self._failed_blocks = self._failed_blocks, set()
        return failed

    def report(self) -> KvtierWorkerMetadata | None:
        if self._report.is_empty():
            return None
        report, self._report = self._report, KvtierWorkerMetadata()
        return report

    # ---- for who plans otherwise ------------------------------------------------------------------------------------

    @property
    def block_bytes(self) -> int:
        return max((layout.payload_bytes for layout in self._layouts), default=0)

    def storing(self, number: int) -> bool:
        return any(store == number for store, _ in self._stores)

    def refuse(self, plan: StorePlan) -> None:
        """Nothing is copied for it."""
        for part in plan.parts:
            if part.ranks and part.ranks[0] == self.rank:
                self._report.stored[plan.number, part.share] = b""

    def fail(self, blocks: list[int]) -> None:
        self._failed_blocks.update(blocks)

    def flush(self, number: int, until: float) -> None:
        """The blocks of a store are given away: what is not copied by then is not stored."""
        for key in [key for key in self._stores if key[0] == number]:
            if not self._stores[key][1].ended(max(0.0, until - time.monotonic())):
                self._spoil(key)

    def spoil(self, number: int) -> None:
        """What a store has copied so far may be somebody else's: it is not stored."""
        for key in [key for key in self._stores if key[0] == number]:
            self._spoil(key)

    def _spoil(self, key: tuple[int, int]) -> None:
        _, job = self._stores.pop(key)
        job.abandon()
        self._spoilt.append((key, job))

    # ---- arenas -------------------------------------------------------------------------------------------------------

    def _map(self, wanted: list[ArenaPlace]) -> None:
        """On a thread: populating a large mapping takes its time. What is not wanted any more goes when its last copy ends."""
        self._adopt()
        ids = {place.id for place in wanted}
        for gone in [known for known in self._arenas if known not in ids]:
            self._arenas.pop(gone).close()
        for place in wanted:
            if place.id in self._arenas or place.id in self._mapping:
                continue
            thread = threading.Thread(target=self._map_one, args=(place,), name="kvtier-map", daemon=True)
            self._mapping[place.id] = thread
            thread.start()

    def _map_one(self, place: ArenaPlace) -> None:
        try:
            arena = self._live().map(ArenaRef(place.path, place.bytes, place.id, place.lock_byte), self._options.arena_dir or None)
            with self._lock:
                self._new_arenas[place.id] = arena
        except Exception as error:
            if str(error) != self._complaint:
                self._complaint = str(error)
                log.warning("kvtier: a worker cannot map the arena (%s); it is tried again", error)
            time.sleep(_RETRY_S)
            self._mapping.pop(place.id, None)

    def _adopt(self) -> None:
        with self._lock:
            new, self._new_arenas = self._new_arenas, {}
        for number, arena in new.items():
            self._arenas[number] = arena
            if self._device.ordinal is not None:
                self._untold.add(number)
            self._mapping.pop(number, None)
            self._report.mapped.setdefault(number, set()).add(self.rank)

        if self._untold:
            self._tell_pinning()

    def _tell_pinning(self) -> None:
        device = self._device.ordinal
        assert device is not None
        for number in list(self._untold):
            arena = self._arenas.get(number)
            refusal = arena.refusal(device) if arena is not None else ""
            if refusal is None:
                continue
            self._untold.remove(number)
            if refusal:
                log.warning("kvtier: the arena cannot be pinned for GPU %d (%s); copies go over a buffer, slower", device, refusal)
            elif arena is not None:
                log.info("kvtier: %d MiB of the arena are pinned for GPU %d", arena.ref.bytes >> 20, device)

    def device_counters(self) -> dict[str, int]:
        """What a GPU's copies have besides; what is not a sum is not here."""
        if self._device.ordinal is None or self._copies is None:
            return {}
        counts = self._copies.counts()
        return {"bounced_bytes": counts.bounced_bytes, "late_blocks": counts.late_blocks, "pins_refused": counts.pins_refused}

    def shutdown(self) -> None:
        for thread in list(self._mapping.values()):
            thread.join(0.2)
        if self._copies is not None:
            self._copies.close(1.0)
            self._copies = None
