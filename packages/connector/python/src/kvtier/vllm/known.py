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
    tables: list[list[int]] = field(default_factory=list)
    #: Per group, blocks before this one were offered, or are held.
    offered: list[int] = field(default_factory=list)
    #: Tokens at which the next block is whole.
    next_tokens: int = 0

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
