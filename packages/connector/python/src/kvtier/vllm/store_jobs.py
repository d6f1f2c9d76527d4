"""A worker's copies from the engine's blocks to the arena, each of one part of a plan, until it is told how they went.

     plan ──► job ──► ended: checksums          nothing of it where a block was bad, the copy failed, or nothing was begun
               └─ its blocks are given away ──► spoilt, until nothing writes to its slots any more

Invariant: of each part that is this rank's to copy something is told, once.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from kvtier.copies import Job
from kvtier.vllm.arenas import ArenaGone
from kvtier.vllm.guard import Troubles
from kvtier.vllm.messages import Part, Rank, StorePlan, packed

#: Number of the plan and share.
Key = tuple[int, int]
#: So many parts that ended are remembered: more than a scheduler's half has planned at a time.
_REMEMBERED = 4096


class StoreJobs:
    def __init__(self, rank: Rank, begin: Callable[[Part], Job], payload_bytes: Callable[[Part], int], troubles: Troubles) -> None:
        self.stored_bytes = 0
        self._rank = rank
        self._begin = begin
        self._payload_bytes = payload_bytes
        self._troubles = troubles
        self._jobs: dict[Key, tuple[Part, Job]] = {}
        #: Of which blocks were given away before their copy ended: told when nothing writes to their slots any more.
        self._spoilt: list[tuple[Key, Job]] = []
        self._told: dict[Key, bytes] = {}
        #: What was told, in order: the step that it was told with may not have come to the scheduler's half.
        self._ended: dict[Key, None] = {}

    def start(self, plan: StorePlan) -> None:
        for key, part in self._mine(plan):
            try:
                self._jobs[key] = part, self._begin(part)
            except ArenaGone:
                self._told[key] = b""
            except Exception as error:
                self._troubles.note("a store", error)
                self._told[key] = b""

    def refuse(self, plan: StorePlan) -> None:
        """Nothing is copied for it."""
        self._told.update((key, b"") for key, _ in self._mine(plan))

    def give_up(self, plan: StorePlan) -> None:
        """Nothing of it is begun any more."""
        for key, _ in self._mine(plan):
            if key not in self._jobs and all(key != spoilt for spoilt, _ in self._spoilt):
                self._told[key] = b""

    def under_way(self, number: int) -> bool:
        return any(store == number for store, _ in self._jobs)

    def poll(self) -> None:
        """What has ended by now is told."""
        for key, job in [one for one in self._spoilt if one[1].ended()]:
            self._spoilt.remove((key, job))
            self._told[key] = b""
        for key, (part, job) in list(self._jobs.items()):
            if not job.ended():
                continue
            del self._jobs[key]
            try:
                copied = job.take()
                self._told[key] = b"" if copied.bad else packed(copied.checksums)
                self.stored_bytes += (job.count - len(copied.bad)) * self._payload_bytes(part)
            except Exception as error:
                self._troubles.note("a store", error)
                self._told[key] = b""

    def has_ended(self, key: Key, until: float) -> bool:
        """Whether nothing of it is under way any more, though that may not be heard yet; of what was not begun it is not known."""
        known = self._jobs.get(key)
        if known is None:
            return key in self._told or key in self._ended
        return known[1].ended(max(0.0, until - time.monotonic()))

    def take(self) -> dict[Key, bytes]:
        """What is to be told: checksums of each part; empty: it is not stored."""
        told, self._told = self._told, {}
        self._ended.update(dict.fromkeys(told))
        while len(self._ended) > _REMEMBERED:
            del self._ended[next(iter(self._ended))]
        return told

    def flush(self, number: int, until: float) -> None:
        """The blocks of a store are given away: what is not copied by then is not stored."""
        for key in [key for key in self._jobs if key[0] == number]:
            if not self._jobs[key][1].ended(max(0.0, until - time.monotonic())):
                self._spoil(key)

    def spoil(self, number: int) -> None:
        """What a store has copied so far may be somebody else's: it is not stored."""
        for key in [key for key in self._jobs if key[0] == number]:
            self._spoil(key)

    def _spoil(self, key: Key) -> None:
        _, job = self._jobs.pop(key)
        job.abandon()
        self._spoilt.append((key, job))

    def _mine(self, plan: StorePlan) -> Iterator[tuple[Key, Part]]:
        for part in plan.parts:
            if part.ranks and part.ranks[0] == self._rank:
                yield (plan.number, part.share), part
