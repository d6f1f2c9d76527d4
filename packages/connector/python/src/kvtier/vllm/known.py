"""What the scheduler's half knows of a request, and of a load that is on its way."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from kvtier.vllm import promises
from kvtier.vllm.groups import Group
from kvtier.vllm.messages import Rank
from kvtier.vllm.staging import Lookups, Stage


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
    #: How often.
    asked: int = 0
    #: Per group, what the node was found to hold.
    held: list[list[tuple[int, int]]] | None = None
    stage: Stage | None = None
    stages: int = 0
    #: Of another pod, which computes its prompt.
    promise: promises.Promise | None = None
    #: Why nothing more is loaded for it.
    denied: str = ""
    #: Per group, ids of its blocks from the first on that may be offered.
    tables: list[list[int]] = field(default_factory=list)
    #: Per group, that first block.
    bases: list[int] = field(default_factory=list)
    #: Per group, blocks before this one were offered, or are held.
    offered: list[int] = field(default_factory=list)
    #: Tokens at which the next block is whole.
    next_tokens: int = 0

    def table_of(self, block_ids: Sequence[Sequence[int]]) -> None:
        """All blocks that it has. Those in front of what was offered are not even looked at: of a long prompt there are many."""
        self.bases = [min(offered, len(ids)) for offered, ids in zip(self.offered, block_ids)]
        self.tables = [list(ids[base:]) for ids, base in zip(block_ids, self.bases)]

    def hear(self, groups: Sequence[Group]) -> bool:
        """Whether the node has said what it holds; that need not be stored."""
        lookups = self.lookups
        if self.held is None and lookups is not None and lookups.done:
            self.held = lookups.held(groups)
            for group, ranges in zip(groups, self.held or ()):
                if ranges and not group.window_tokens and ranges[0][0] == 0:
                    self.offered[group.index] = max(self.offered[group.index], ranges[0][1])
        return self.held is not None


@dataclass
class Loading:
    request: str
    stage: Stage
    through: set[Rank] = field(default_factory=set)
    bad: dict[int, set[int]] = field(default_factory=dict)
