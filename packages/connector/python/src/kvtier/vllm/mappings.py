"""The arenas that the scheduler's half has mapped, and which of them the workers have.

     a session is attached ──► mapped, announced ──► all workers have it: may be used
     its connection ends   ──► not announced, its byte let go, unmapped: workers that take no step see the byte, and unmap, too
                               what of it is claimed, and not copied yet, is copied before

Invariant: an arena whose session has ended is mapped no longer than its copies take: the next node may have no room for its own beside it.
A node that is only silent keeps it.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Sequence, Set

from kvtier.copies import Arena, ArenaRef, Copies
from kvtier.hold import hold, session_byte
from kvtier.session import Session
from kvtier.vllm.messages import ArenaPlace, Rank

#: Where another generation begins, the sessions that are closed and those that are not attached yet have one arena: it stays so long, and
#: so does one at most that is claimed.
_LINGER_S = 10.0
#: An idle engine is kept stepping for so long at most, so that its workers map a new arena before the next request comes.
MAPPING_STEPS_S = 2.0


class Mappings:
    """`follow` and `close` are of the node's thread; all else is of the engine's loop."""

    def __init__(self, copies: Copies) -> None:
        self.places: list[ArenaPlace] = []
        #: Arenas that something is to be copied from of which the engine believes that it will come.
        self.claimed: Callable[[], Set[int]] = frozenset
        self._copies = copies
        self._arenas: dict[int, Arena] = {}
        self._announced: dict[int, ArenaPlace] = {}
        #: That hold the session's byte, by arena.
        self._fds: dict[int, int] = {}
        self._gone_at: dict[int, float] = {}
        self._seen_at: dict[int, float] = {}
        self._by_workers: dict[int, set[Rank]] = {}
        self._lives = itertools.count(1)

    def __contains__(self, number: int) -> bool:
        return number in self._arenas

    def of_all(self, number: int, ranks: Set[Rank]) -> Arena | None:
        """Where this process and all workers have mapped it."""
        arena = self._arenas.get(number)
        return arena if arena is not None and self._by_workers.get(number) == ranks else None

    def mapped(self, told: dict[int, set[Rank]]) -> None:
        for number, ranks in told.items():
            self._by_workers.setdefault(number, set()).update(ranks)

    def wants_steps(self, ranks: Set[Rank]) -> bool:
        """Workers have not said that they mapped an arena that is new."""
        now = time.monotonic()
        return any(
            self._by_workers.get(place.id) != ranks and now - self._seen_at.get(place.id, now) < MAPPING_STEPS_S
            for place in self.places
        )

    def follow(self, sessions: Sequence[Session]) -> None:
        """@raises KvError where one cannot be mapped"""
        arenas = [session.arena for session in sessions]
        wanted = {arena.id: arena for arena in arenas if arena is not None}
        ended = bool(wanted) or any(session.failing for session in sessions)
        claimed = self.claimed()
        for number in list(self._arenas):
            if number in wanted:
                self._gone_at.pop(number, None)
            elif self._has_lingered(number) or (ended and number not in claimed):
                self._let_go(number)
        try:
            for number, ref in wanted.items():
                if number not in self._arenas:
                    self._map(number, ref)
        finally:
            self.places = list(self._announced.values())

    def close(self) -> None:
        for fd in self._fds.values():
            os.close(fd)
        self._fds = {}

    def _has_lingered(self, number: int) -> bool:
        now = time.monotonic()
        return now - self._gone_at.setdefault(number, now) > _LINGER_S

    def _map(self, number: int, ref: ArenaRef) -> None:
        self._by_workers.pop(number, None)
        arena = self._copies.map(ref)
        byte = session_byte(ref.lock_byte) if ref.lock_byte else 0
        fd = hold(ref.lock_path, byte) if byte else None
        if fd is None:
            byte = 0
        else:
            self._fds[number] = fd
        self._announced[number] = ArenaPlace(ref.path, ref.bytes, ref.id, ref.lock_byte, byte, next(self._lives))
        self._seen_at[number] = time.monotonic()
        self._arenas[number] = arena

    def _let_go(self, number: int) -> None:
        arena = self._arenas.pop(number)
        del self._announced[number]
        self.places = list(self._announced.values())
        for of in (self._gone_at, self._seen_at, self._by_workers):
            of.pop(number, None)
        fd = self._fds.pop(number, None)
        if fd is not None:
            os.close(fd)
        arena.close()
