"""Batches of pages between memory and the arena, on the caller's thread: SGLang has threads for it.

     load:   Load ──► ready ranges ──► copied and verified ──► released        at most two pieces at a time
               └─ SGLang's pool is cleared: no more is copied, nothing was loaded
     store:  Reserve ──► copied ──► Commit                                      piece by piece
                └─ held or being written: there already; refused: not stored

Invariants: when a call returns, nothing of it touches a page any more, so that SGLang may give the page to others; every wait for the
node has an end; each load is released and each slot committed or aborted once.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvtier.copies import Copied, Job
from kvtier.leases import Load
from kvtier.protocol import BUSY, HELD, MAX_HASHES, REFUSED, RESERVED
from kvtier.sglang.flushes import Loading, wait_ended
from kvtier.sglang.shares import Share, Shares

#: A load is looked at so often for pages that came.
_TURN_S = 0.002

HASH_BYTES = 32


def _ended(job: Job) -> Copied:
    wait_ended(job)
    return job.take()


def held(share: Share, names: bytes, deadline_s: float) -> int:
    """Of a chain, how many pages are held from the first on."""
    chain = names[: MAX_HASHES * HASH_BYTES]
    if share.session.lacks(chain):
        return 0
    asked = share.session.lookup(chain, deadline_s=deadline_s)
    asked.wait(deadline_s + 0.1)
    return asked.value.blocks if asked.error is None and asked.value is not None else 0


def held_each(share: Share, names: bytes, deadline_s: float) -> list[bool]:
    """Of each page whether it is held, also behind gaps."""
    count = len(names) // HASH_BYTES
    chain = names[: MAX_HASHES * HASH_BYTES]
    if share.session.lacks(chain, gaps=True):
        return [False] * count
    asked = share.session.lookup(chain, gaps=True, deadline_s=deadline_s)
    asked.wait(deadline_s + 0.1)
    found: list[bool] = []
    if asked.error is None and asked.value is not None:
        for tier, run in asked.value.spans:
            found += [tier != ""] * min(run, count - len(found))
    return found + [False] * (count - len(found))


@dataclass
class _Piece:
    first: int
    load: Load
    blocks: Sequence[int]
    #: The first page of each job, and the job.
    jobs: list[tuple[int, Job]] = field(default_factory=list)
    begun: int = 0
    #: Of a pool that may be cleared meanwhile.
    loading: Loading | None = None

    @property
    def over(self) -> bool:
        return self.loading is not None and self.loading.over

    def copy(self, first: int, end: int, begin: Callable[[], Job]) -> bool:
        """False: its pages are somebody else's by now."""
        job = begin() if self.loading is None else self.loading.copy(begin)
        if job is not None:
            self.jobs.append((first, job))
            self.begun = end
        return job is not None


class Pages:
    """Loads and stores of shares; for any number of threads."""

    def __init__(self, shares: Shares, piece_bytes: int) -> None:
        self._shares = shares
        self._piece_bytes = piece_bytes
        self.counts = {name: 0 for name in ("loaded", "missed", "corrupt", "stored", "held", "refused")}

    def _piece_pages(self, share: Share) -> int:
        return max(1, min(self._piece_bytes // share.payload_bytes, MAX_HASHES))

    def load(
        self, share: Share, names: bytes, blocks: Sequence[int], deadline_s: float, loading: Loading | None = None
    ) -> list[bool]:
        """Of each page whether it lies in its block now, whole and verified. `loading`: the blocks are of a pool that may be cleared."""
        until = time.monotonic() + deadline_s
        good = [False] * len(blocks)
        size = self._piece_pages(share)
        waiting = deque(range(0, len(blocks), size))
        under_way: deque[_Piece] = deque()
        try:
            while waiting or under_way:
                while waiting and len(under_way) < 2:
                    first = waiting.popleft()
                    end = min(first + size, len(blocks))
                    left = max(0.001, until - time.monotonic())
                    load = share.session.load(names[first * HASH_BYTES : end * HASH_BYTES], deadline_s=left)
                    under_way.append(_Piece(first, load, blocks[first:end], loading=loading))
                piece = under_way[0]
                whole = self._finish(share, piece, good, until)
                under_way.popleft()
                if not whole:
                    waiting.clear()  # what follows a miss is of no use to SGLang
                    break
        finally:
            for piece in under_way:
                self._let_go(piece, good)
        if loading is not None and loading.over:
            good = [False] * len(blocks)
        self.counts["loaded"] += sum(good)
        self.counts["missed"] += len(good) - sum(good)
        return good

    def _finish(self, share: Share, piece: _Piece, good: list[bool], until: float) -> bool:
        """Copies what comes until it is all there, late or ended; whether all came. Whatever happens it is let go once."""
        load = piece.load
        try:
            while True:
                done = load.done  # before what is ready: it grows until then
                if piece.begun < load.ready and load.attachment.alive:
                    first, end = piece.begun, load.ready
                    slots = load.slots(first, end)
                    arena = self._shares.arena(load.attachment)
                    blocks = piece.blocks[first:end]
                    if not piece.copy(
                        first, end, lambda: self._shares.copies.load(arena, share.layout, blocks, slots.offsets, slots.checksums)
                    ):
                        load.end("flushed")
                        break
                if done:
                    break
                if piece.over:
                    load.end("flushed")
                    break
                if time.monotonic() > until or not load.attachment.usable:
                    load.end("deadline")
                    break
                load.wait(_TURN_S)
        finally:
            whole = self._let_go(piece, good)
        return whole

    def _let_go(self, piece: _Piece, good: list[bool]) -> bool:
        corrupt: list[int] = []
        whole = piece.begun == len(piece.blocks)
        while piece.jobs:
            first, job = piece.jobs.pop(0)
            wanted = True
            try:
                wait_ended(job)
            finally:
                if piece.loading is not None:
                    wanted = piece.loading.copied(job)
            if not wanted:
                whole = False
                continue
            copied = job.take()
            bad = set(copied.bad)
            whole = whole and not bad
            corrupt += [first + one for one in copied.corrupt]
            for i in range(job.count):
                good[piece.first + first + i] = i not in bad
        self.counts["corrupt"] += len(corrupt)
        piece.load.release(corrupt=corrupt)
        return whole

    def store(self, share: Share, parent: bytes, names: bytes, blocks: Sequence[int], deadline_s: float) -> list[bool]:
        """Of each page whether the node has it now, or gets it from another."""
        until = time.monotonic() + deadline_s
        there: list[bool] = []
        size = self._piece_pages(share)
        for first in range(0, len(blocks), size):
            end = min(first + size, len(blocks))
            before = names[(first - 1) * HASH_BYTES : first * HASH_BYTES] if first else parent
            found = self._store_piece(share, before, names[first * HASH_BYTES : end * HASH_BYTES], blocks[first:end], until)
            there += found
            if not all(found):
                break
        return there + [False] * (len(blocks) - len(there))

    def _store_piece(self, share: Share, parent: bytes, names: bytes, blocks: Sequence[int], until: float) -> list[bool]:
        left = until - time.monotonic()
        if left <= 0:
            return [False] * len(blocks)
        reservation = share.session.reserve(parent, names, deadline_s=left)
        committed = None
        try:
            if not reservation.wait(left + 0.1) or reservation.error is not None:
                return [False] * len(blocks)
            if parent and reservation.reason == "no_parent":
                # Evicted meanwhile. SGLang asks for the rest of a chain by itself, so that it is found without what precedes it.
                return self._store_piece(share, b"", names, blocks, until)
            wanted = reservation.open
            if wanted and not reservation.attachment.alive:
                return [False] * len(blocks)
            if wanted:
                arena = self._shares.arena(reservation.attachment)
                offsets = [reservation.offsets[i] for i in wanted]
                job = self._shares.copies.store(arena, share.layout, [blocks[i] for i in wanted], offsets)
                copied = _ended(job)
                committed = reservation.commit(wanted, copied.checksums)
                committed.wait(max(0.001, until - time.monotonic()))
        finally:
            reservation.abort()
        taken = committed is None or (committed.done and committed.error is None and committed.value == len(wanted))
        there = [one in (HELD, BUSY) or (one == RESERVED and taken) for one in reservation.status]
        self.counts["stored"] += len(wanted) if taken else 0
        self.counts["held"] += sum(one in (HELD, BUSY) for one in reservation.status)
        self.counts["refused"] += sum(one == REFUSED for one in reservation.status)
        return there


