"""Who waits for room: leases of others fill the arena, or the session has as many loads as the node or the link takes.

     no room ──► waits ──► a lease has ended: one who waits tries ──► has room: one more may try
                  │                                              └─ has none: waits for the next
                  └─ nothing is leased: one tries, in each step

Invariants: those who wait try no oftener than leases end and tries succeed, for where a lease has ended there may be room for several;
while nothing is leased, once a step.
"""

from __future__ import annotations

from kvtier.vllm.known import Known

#: Why a load comes short while others hold what it needs: of the arena, or of the loads that are taken at a time.
NO_ROOM = frozenset({"capacity", "busy"})


class Room:
    def __init__(self) -> None:
        #: Stages that may have leases: who begins one counts it.
        self.leased = 0
        #: Leases that ended, and tries that had room: that many tries there have been, or may be.
        self._chances = 0
        self._taken = 0
        #: The last step in which one tried because nothing was leased.
        self._tried_in = -1

    def ended(self) -> None:
        """Of a stage: what it leased is given back."""
        self.leased -= 1
        self._chances += 1

    def waits(self, known: Known, until: float) -> None:
        """It had no room, and has given back what there was of it: less than it needs, and no chance for others who need as much."""
        self.leased -= 1
        known.room_until = until
        known.room_at = self._chances

    def has(self, known: Known) -> None:
        """Of one that waited: its lease is whole. There may be room for more."""
        known.room_until = 0.0
        self._chances += 1

    def may_try(self, known: Known, now: float, step: int) -> bool:
        """Of one that waits: then it tries now. A chance that was there before it began to wait is none."""
        if now >= known.room_until:
            return True
        before = max(self._taken, known.room_at)
        if before < self._chances:
            self._taken = before + 1
            return True
        if self.leased or self._tried_in == step:
            return False
        self._tried_in = step
        return True
