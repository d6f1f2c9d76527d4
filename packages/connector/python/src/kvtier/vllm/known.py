"""What the scheduler's half knows of a request, and of a load that is on its way."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from kvtier.vllm import promises
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


@dataclass
class Loading:
    request: str
    stage: Stage
    through: set[Rank] = field(default_factory=set)
    bad: dict[int, set[int]] = field(default_factory=dict)
