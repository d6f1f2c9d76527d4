"""What all sessions hold of a chain: read in the node's tables where these say all that there is to say, asked for elsewhere.

Invariant: nothing here waits but `Lookups.wait`; answers are put together on the sessions' threads.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial

from kvtier.requests import Held, Request
from kvtier.vllm.groups import Group
from kvtier.vllm.node import Attached


def hashes_of(hashes: Sequence[bytes], group: Group, first: int, end: int) -> bytes:
    """Packed names of a group's blocks `first` to `end` - 1."""
    step = group.hash_step
    return b"".join(hashes[(first + 1) * step - 1 : end * step : step])


def chains_of(hashes: Sequence[bytes], groups: Sequence[Group], tokens: int) -> dict[int, bytes]:
    """Per group, the packed names of what a token after so many looks at."""
    ends = {group.index: tokens // group.block_tokens for group in groups}
    return {g.index: hashes_of(hashes, g, g.first_needed(0, ends[g.index]), ends[g.index]) for g in groups}


class Lookups:
    """One question to every session. None where one of them surely lacks it, for a prefix is what all of them have; and none where all of
    it lies in the arena: it is leased and checked before it is claimed, so that what was read a block too much comes short there."""

    def __init__(self, attached: Attached, hashes: Sequence[bytes], deadline_s: float) -> None:
        self.attached = attached
        self.deadline_s = deadline_s
        self.asked: list[Request[Held]] = []
        self.hashes = len(hashes)
        #: Per group, the ranges that all its shares hold: put together on the sessions' threads, so that the engine's loop finds it made.
        #: None: somebody has not answered.
        self.held: list[Sequence[tuple[int, int]]] | None = None
        #: Nobody was asked: `held` was read, and may be too much.
        self.spared = False
        self._said: list[Held | None] = [None] * len(attached.shares)
        most = 65_536
        #: Per group, the packed names that were asked about.
        self.chains: dict[int, bytes] = {}
        for share in attached.shares:
            group = share.group
            if group.index not in self.chains:
                self.chains[group.index] = hashes_of(hashes, group, 0, min(len(hashes) // group.hash_step, most))
        self.held = self._read()
        if self.held is not None:
            self.spared = True
            return
        for at, (share, session) in enumerate(zip(attached.shares, attached.sessions)):
            chain = self.chains[share.group.index]
            if chain:
                gaps, heard = bool(share.group.window_tokens), partial(self._hear, at)
                self.asked.append(session.lookup(chain, gaps=gaps, deadline_s=deadline_s, on_answer=heard))

    def _read(self) -> list[Sequence[tuple[int, int]]] | None:
        """None: somebody is to be asked."""
        shares = zip(self.attached.shares, self.attached.sessions)
        pairs = [(share.group, session, self.chains[share.group.index]) for share, session in shares]
        for group, session, chain in pairs:
            if chain and session.lacks(chain, gaps=bool(group.window_tokens)):
                return [()] * (1 + max(self.chains))
        out: dict[int, Sequence[tuple[int, int]]] = {}
        for group, session, chain in pairs:
            ranges = session.in_arena(chain, gaps=bool(group.window_tokens)) if chain else ()
            if ranges is None:
                return None
            out[group.index] = _both(out[group.index], ranges) if group.index in out else ranges
        return [out.get(index, ()) for index in range(max(out) + 1)]

    @property
    def done(self) -> bool:
        for request in self.asked:
            if not request.done:
                return False
        return True

    @property
    def busy(self) -> bool:
        """One of the questions found no place on its link."""
        return any(request.error is not None and request.error.code == "BUSY" for request in self.asked)

    def wait(self, wait_s: float) -> bool:
        until = time.monotonic() + wait_s
        return all(request.wait(max(0.0, until - time.monotonic())) for request in self.asked)

    def estimated_ms(self, tokens: int) -> float:
        """By the node's word, until so many tokens of what is held lie in the arena."""
        longest = 0.0
        for share, request in zip(self.attached.shares, self.asked):
            said = request.value
            if said is not None and said.blocks > 0:
                part = min(1.0, tokens / (said.blocks * share.group.block_tokens))
                longest = max(longest, said.estimated_us * part / 1e3)
        return longest

    def _hear(self, at: int, said: Held) -> None:
        self._said[at] = said
        out: dict[int, Sequence[tuple[int, int]]] = {}
        for share, one in zip(self.attached.shares, self._said):
            if one is None:
                return
            index = share.group.index
            out[index] = _both(out[index], one.ranges) if index in out else one.ranges
        self.held = [out.get(index, ()) for index in range(max(out) + 1)]


def _both(left: Sequence[tuple[int, int]], right: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    out = []
    i = j = 0
    while i < len(left) and j < len(right):
        first, end = max(left[i][0], right[j][0]), min(left[i][1], right[j][1])
        if first < end:
            out.append((first, end))
        if left[i][1] < right[j][1]:
            i += 1
        else:
            j += 1
    return out
