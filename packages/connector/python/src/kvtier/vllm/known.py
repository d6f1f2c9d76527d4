"""What the scheduler's half knows of a request, and of a load that is on its way."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from kvtier.vllm import promises
from kvtier.vllm.groups import Group
from kvtier.vllm.lookups import Lookups
from kvtier.vllm.messages import Rank
from kvtier.vllm.staging import Stage

#: Why a request is computed although something might have been held, as metrics tell it; what else a node says is "other".
DENIALS = frozenset(
    ("lookup", "not_attached", "detached", "disconnected", "slow", "deadline", "awaited", "missing", "corrupt", "tier", "capacity", "busy")
    + ("session_limit", "too_often", "other")
)


def denial(why: str) -> str:
    name = why.replace(" ", "_")
    return name if name in DENIALS else "other"


@dataclass
class Known:
    name: str
    hashes: Any
    loads: bool
    stores: bool
    #: Its names depend on its tokens alone.
    tokens: Any | None
    lookups: Lookups | None = None
    asked_at: float = 0.0
    #: How often, since it was staged last or admitted.
    asked: int = 0
    #: The link took no more questions: it asks again, and no longer than until then; 0: it has asked.
    ask_until: float = 0.0
    #: When the engine came to it last, and in which step.
    came_at: float = 0.0
    came_in: int = 1 << 62
    #: How often what it waited for ended while the engine did not come.
    anew: int = 0
    #: Per group, what the node was found to hold.
    held: list[Sequence[tuple[int, int]]] | None = None
    #: Of what nothing could be claimed: what was held, the local hit, the request's tokens. The engine asks again at each step.
    fruitless: tuple[Any, int, int] = (None, 0, 0)
    stage: Stage | None = None
    stages: int = 0
    #: Leases of others fill what the node gives: it waits for room (`Room`), and no longer than this; 0: it does not wait.
    room_until: float = 0.0
    room_at: int = -1
    #: Of another pod, which computes its prompt.
    promise: promises.Promise | None = None
    #: The same, until what is pinned for it is let go.
    pinned: promises.Promise | None = None
    #: Of the engine's own cache, when it was last asked what may be loaded.
    local_tokens: int = 0
    #: Why nothing more is loaded for it.
    denied: str = ""
    #: Per group, ids of its blocks from the first on that may be offered.
    tables: list[list[int]] = field(default_factory=list)
    #: A step was not followed to its end: what it added to them is not known until all of its blocks are told again.
    lost: bool = False
    #: Per group, that first block.
    bases: list[int] = field(default_factory=list)
    #: Per group, blocks before this one were offered, or are held.
    offered: list[int] = field(default_factory=list)
    #: Per group with a window, the unbroken run of blocks [first, end) that was offered last.
    runs: dict[int, tuple[int, int]] = field(default_factory=dict)
    #: Tokens that steps were scheduled for since it was admitted: beyond them its blocks may be empty still, whatever the engine counts.
    followed: int = 0
    #: Tokens at which the next block is whole, or enough of them are.
    next_tokens: int = 0
    #: In whole blocks, of its prompt as it came.
    prompt_tokens: int = 0

    def table_of(self, block_ids: Sequence[Sequence[int]]) -> None:
        """All blocks that it has. Those in front of what was offered are not even looked at: of a long prompt there are many."""
        self.lost = False
        bases, tables = self.bases, self.tables = [], []
        for offered, ids in zip(self.offered, block_ids):
            base = offered if offered < len(ids) else len(ids)
            bases.append(base)
            tables.append(list(ids[base:]))

    def behind_local(self, block_ids: Sequence[Sequence[int]], groups: Sequence[Group]) -> list[Sequence[int]]:
        """Of all blocks that it has, those that a load was to fill: what is in front of them is the engine's, and others' too."""
        return [ids[self.local_tokens // group.block_tokens :] for group, ids in zip(groups, block_ids)]

    def hear(self, groups: Sequence[Group]) -> bool:
        """Whether the node has said what it holds; that need not be stored."""
        if self.held is not None:
            return True
        lookups = self.lookups
        if lookups is None or not lookups.done:
            return False
        held = self.held = lookups.held
        if held is None:
            return False
        offered = self.offered
        for group, ranges in zip(groups, held):
            if ranges and not group.window_tokens:
                first, end = ranges[0]
                if lookups.spared:
                    # What was read may be a block too much. Chains shrink from their tail: where the node has the last one, it has all.
                    end -= 1
                if first == 0 and end > offered[group.index]:
                    offered[group.index] = end
        return True


@dataclass
class Loading:
    request: str
    stage: Stage
    known: Known
    through: set[Rank] = field(default_factory=set)
    bad: dict[int, set[int]] = field(default_factory=dict)
