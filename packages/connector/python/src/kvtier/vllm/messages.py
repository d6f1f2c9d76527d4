"""What travels between the halves: the scheduler's plans to the workers, the workers' results back. Plain data: it is pickled.

Ranks are (pipeline stage, tensor rank). A share is one session of the scheduler's half: the blocks of one group that one or
several ranks hold alike. Packed: arrays of u64 as bytes, little-endian.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field

from kvtier.vllm.bases import KVConnectorHandshakeMetadata, KVConnectorMetadata, KVConnectorWorkerMetadata

Rank = tuple[int, int]


def packed(numbers: Iterable[int]) -> bytes:
    return array("Q", numbers).tobytes()


def unpacked(data: bytes) -> array[int]:
    out = array("Q")
    out.frombytes(data)
    return out


@dataclass(frozen=True)
class ArenaPlace:
    """What a worker maps; `id` says that both mean the same file."""

    path: str
    bytes: int
    id: int
    #: Of the lock file beside it: who maps it holds this byte, and the node sees the end of the last copy.
    lock_byte: int
    #: Held there by the scheduler's process until its session has ended. 0: by nobody, that is told by steps alone.
    session_byte: int = 0
    #: How often the scheduler's half has mapped one: of another number than before, it must be told anew who has it.
    life: int = 0


@dataclass
class Part:
    """One share's blocks of a load or a store."""

    share: int
    group: int
    #: A load: all that hold it. A store: the one that writes it.
    ranks: tuple[Rank, ...]
    arena: int
    blocks: bytes
    offsets: bytes
    #: Of a load.
    sums: bytes = b""


@dataclass
class LoadPlan:
    number: int
    request_id: str
    parts: list[Part]
    #: Blocks that were allocated for it and that nothing will be copied to: a plan that went wrong still ends.
    failed: list[int] = field(default_factory=list)


@dataclass
class StorePlan:
    number: int
    parts: list[Part]


@dataclass
class KvtierMetadata(KVConnectorMetadata):  # type: ignore[misc]
    arenas: list[ArenaPlace] = field(default_factory=list)
    loads: list[LoadPlan] = field(default_factory=list)
    stores: list[StorePlan] = field(default_factory=list)
    #: Nothing is computed, in this step or by one before it: a worker may stand so long for the loads that are on their way.
    idle_s: float = 0.0
    #: Workers are to tell what a handshake would: none of theirs was given to the scheduler's half.
    asks: bool = False


@dataclass
class KvtierWorkerMetadata(KVConnectorWorkerMetadata):  # type: ignore[misc]
    """Of one step. What several ranks say is put together by `aggregate`."""

    #: Arena id -> ranks that have it mapped.
    mapped: dict[int, set[Rank]] = field(default_factory=dict)
    #: Load -> ranks that are through with it.
    loaded: dict[int, set[Rank]] = field(default_factory=dict)
    #: Load -> share -> indexes into the part of blocks that did not match.
    bad: dict[int, dict[int, set[int]]] = field(default_factory=dict)
    #: (store, share) -> packed checksums; b"": not copied.
    stored: dict[tuple[int, int], bytes] = field(default_factory=dict)
    #: Blocks of the engine that a load of ours did not fill.
    failed: set[int] = field(default_factory=set)
    #: Where they were asked for.
    handshakes: dict[Rank, KvtierHandshake] = field(default_factory=dict)
    #: Loads of which blocks were not copied, and nothing is known of their bytes.
    missed: set[int] = field(default_factory=set)

    def is_empty(self) -> bool:
        return not (self.mapped or self.loaded or self.stored or self.failed or self.handshakes)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        if not isinstance(other, KvtierWorkerMetadata):
            return self
        for arena, ranks in other.mapped.items():
            self.mapped.setdefault(arena, set()).update(ranks)
        for load, ranks in other.loaded.items():
            self.loaded.setdefault(load, set()).update(ranks)
        for load, shares in other.bad.items():
            mine = self.bad.setdefault(load, {})
            for share, indexes in shares.items():
                mine.setdefault(share, set()).update(indexes)
        self.missed |= other.missed
        self.stored.update(other.stored)
        self.failed |= other.failed
        self.handshakes.update(other.handshakes)
        return self


@dataclass
class KvtierHandshake(KVConnectorHandshakeMetadata):  # type: ignore[misc]
    """What the scheduler's half cannot know of a worker: how its tensors really lie."""

    rank: Rank = (0, 0)
    #: "": it can be used; else the one line that says why not.
    refusal: str = ""
    #: Per group: bytes of a block, and the digest of everything that gives them their meaning.
    payload_bytes: tuple[int, ...] = ()
    fingerprints: tuple[bytes, ...] = ()
    #: By which a scheduler's half of the same process finds it (`resets.py`).
    place: str = ""
