"""What a session's calls give back: to be polled by the caller, filled in by the session's thread.

Invariants: each ends exactly once, at its deadline at the latest. Whoever got a Load or a Reservation settles it once, after the last copy
that uses its slots: a load is released, a reservation's slots are committed or aborted. What comes too late is undone by itself.
"""

from __future__ import annotations

import threading
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Callable, Generic, TypeVar

from .errors import KvError
from .protocol import RESERVED

if TYPE_CHECKING:
    from .attachment import Attachment

T = TypeVar("T")

#: Nobody waits for these answers; they only say that the node is alive.
OWED_DEADLINE_S = 5.0


class Waiting:
    """The end of something, for who may wait."""

    def __init__(self) -> None:
        self.done = False
        self.error: KvError | None = None
        # Locked until it has ended. An Event does the same, and making one costs the engine's loop a hundred instructions of Python.
        self._ended = threading.Lock()
        self._ended.acquire()

    def wait(self, wait_s: float) -> bool:
        """Whether it has ended; waits no longer than told. Not for an engine's loop: that polls ``done``."""
        if self.done:
            return True
        if not self._ended.acquire(timeout=max(0.0, wait_s)):
            return False
        self._unlock()
        return True

    def _end(self, error: KvError | None = None) -> None:
        if self.done:
            return
        self.error = error
        self.done = True
        self._unlock()

    def _unlock(self) -> None:
        try:
            self._ended.release()
        except RuntimeError:
            pass  # ended by two threads at once, or seen by two who wait


class Request(Waiting, Generic[T]):
    """One answer of the kind ``wanted``, read by ``read``."""

    def __init__(self, kind: str, fields: dict[str, Any], deadline_s: float, wanted: str, read: Callable[[Any], T]) -> None:
        super().__init__()
        self.kind = kind
        self.fields = fields
        self.deadline_s = deadline_s
        self.value: T | None = None
        self._wanted = wanted
        self._read = read

    def result(self) -> T:
        """Its value once it is done; raises its KvError."""
        if self.error is not None:
            raise self.error
        if not self.done:
            raise KvError("BUSY", f"{self.kind}: has not ended", retry=True)
        return self.value  # type: ignore[return-value]

    def on_answer(self, kind: str, body: Any) -> bool:
        if kind != self._wanted:
            raise KvError("PROTOCOL", f"the cache node answered {self.kind} with {kind}")
        self.value = self._read(body)
        self._end()
        return True

    def on_failure(self, error: KvError) -> None:
        self._end(error)

    def on_late(self, kind: str, body: Any) -> None:
        pass


def done_count(body: Any) -> int:
    return int(body.count)


def ranges_of(spans: Iterable[tuple[str, int]], blocks: int) -> tuple[tuple[int, int], ...]:
    """What of the first `blocks` is held, as [first, end): none of them empty, and none beginning where another one ends."""
    out: list[tuple[int, int]] = []
    at = 0
    for tier, count in spans:
        end = min(at + count, blocks)
        if tier != "" and end > at:
            if out and out[-1][1] == at:
                out[-1] = (out[-1][0], end)
            else:
                out.append((at, end))
        at = end
    return tuple(out)


@dataclass(frozen=True)
class Held:
    """How much of a chain is held."""

    blocks: int
    #: In chain order; "" is a gap.
    spans: tuple[tuple[str, int], ...]
    #: To bring all of it into the arena.
    estimated_us: int
    #: Of the blocks that were asked about, what is held as [first, end).
    ranges: tuple[tuple[int, int], ...] = ()

    @staticmethod
    def read(asked: int, on_answer: Callable[[Held], None] | None, body: Any) -> Held:
        spans = tuple((span.tier, span.count) for span in body.spans)
        held = Held(body.held, spans, body.estimated_us, ranges_of(spans, asked))
        if on_answer is not None:
            on_answer(held)
        return held


@dataclass(frozen=True)
class TierState:
    blocks: int
    bytes: int
    capacity_bytes: int
    in_service: bool

    @staticmethod
    def read(body: Any) -> dict[str, TierState]:
        return {one.tier: TierState(one.blocks, one.bytes, one.capacity_bytes, one.in_service) for one in body.tiers}


@dataclass(frozen=True)
class ReadyRange:
    first: int
    offsets: array[int]
    checksums: array[int]
    tier: str


@dataclass
class Slots:
    """Of consecutive blocks: where their payloads lie, and what their checksums are to be."""

    offsets: array[int] = field(default_factory=lambda: array("Q"))
    checksums: array[int] = field(default_factory=lambda: array("Q"))


class Load(Waiting):
    """A chain on its way into the arena, leased for reading until ``release``."""

    kind = "load"

    def __init__(
        self,
        attachment: Attachment,
        request_id: int,
        count: int,
        fields: dict[str, Any],
        deadline_s: float,
        on_ready: Callable[[Load], None] | None = None,
    ) -> None:
        super().__init__()
        self.attachment = attachment
        self._on_ready = on_ready
        self.id = request_id
        self.count = count
        self.fields = fields
        self.deadline_s = deadline_s
        #: Blocks that lie in the arena, from the first on; grows until it is done.
        self.ready = 0
        self.ranges: list[ReadyRange] = []
        #: Why it came short; "" when it did not.
        self.reason = ""
        self._released = False

    @property
    def alive(self) -> bool:
        """The lease exists. Without it what lies in the mapped arena may be another block's, and its checksum tells."""
        return self.attachment.alive and not self._released

    def slots(self, first: int = 0, end: int | None = None) -> Slots:
        """Of the blocks ``first`` to ``end`` - 1, all of them ready."""
        stop = self.ready if end is None else end
        found = Slots()
        for part in self.ranges:
            a, b = max(first, part.first) - part.first, min(stop, part.first + len(part.offsets)) - part.first
            if a < b:
                found.offsets += part.offsets[a:b]
                found.checksums += part.checksums[a:b]
        return found

    def tiers(self) -> list[tuple[str, int]]:
        """Where the ready blocks came from, in chain order."""
        return [(part.tier, len(part.offsets)) for part in self.ranges]

    def end(self, reason: str = "cancelled") -> None:
        """No more is waited for; what is ready stays leased. Idempotent."""
        if self.done:
            return
        self.attachment.owe("end_load", {"load_id": self.id})
        self.reason = self.reason or reason
        self._end()

    def release(self, corrupt: Iterable[int] = ()) -> None:
        """Gives the lease back; ``corrupt``: indexes of blocks whose bytes were not those of their checksum. Idempotent."""
        if self._released:
            return
        self._released = True
        self.end()
        self.attachment.owe("release", {"load_id": self.id, "corrupt": sorted(corrupt)}, forget=self.id)
        self.attachment.settled()

    def on_answer(self, kind: str, body: Any) -> bool:
        if kind == "load_done":
            if not self.done:
                self.reason = body.reason
                self._end()
            return True
        if kind != "ready":
            raise KvError("PROTOCOL", f"the cache node answered load with {kind}")
        if self.done:
            return False
        count = len(body.offsets)
        if body.first != self.ready or count != len(body.checksums) or self.ready + count > self.count:
            raise KvError("PROTOCOL", f"the cache node announced blocks {body.first} + {count} out of order")
        offsets = self.attachment.checked(body.offsets)
        self.ranges.append(ReadyRange(self.ready, offsets, array("Q", body.checksums), body.tier))
        self.ready += count
        if self._on_ready is not None:
            self._on_ready(self)
        return False

    def on_failure(self, error: KvError) -> None:
        if not self.done:
            self.reason = error.code.lower()
        self._end(error)

    def on_late(self, kind: str, body: Any) -> None:
        pass


class Reservation(Waiting):
    """Slots to write new blocks into. Each is committed after its copy has ended, or aborted."""

    kind = "reserve"

    def __init__(self, attachment: Attachment, count: int, fields: dict[str, Any], deadline_s: float) -> None:
        super().__init__()
        self.attachment = attachment
        self.count = count
        self.fields = fields
        self.deadline_s = deadline_s
        #: Of each block: RESERVED, HELD, BUSY or REFUSED of ``kvtier.protocol``.
        self.status: list[int] = []
        #: Of each block, 0 where it got no slot.
        self.offsets: array[int] = array("Q")
        #: Why blocks were refused.
        self.reason = ""
        self._open: set[int] = set()
        self._unwanted = False
        self._settled = False
        self._lock = threading.Lock()

    @property
    def open(self) -> list[int]:
        """Indexes of the blocks whose slots are neither committed nor aborted."""
        return sorted(self._open)

    def commit(self, indexes: Sequence[int], checksums: Sequence[int]) -> Request[int]:
        """Makes blocks visible whose bytes are written. The value: how many the node took."""
        if len(indexes) != len(checksums) or not self._open.issuperset(indexes):
            raise KvError("CONFIG", "commit: one checksum for each of the blocks that are open")
        fields = {"offsets": [self.offsets[i] for i in indexes], "checksums": list(checksums)}
        request = Request("commit", fields, OWED_DEADLINE_S, "done", done_count)
        self.attachment.send(request, owed=True)
        self._close(indexes)
        return request

    def abort(self, indexes: Sequence[int] | None = None) -> None:
        """Gives slots back; all that are open, and those that are still to come, when none are named. Idempotent."""
        with self._lock:
            self._unwanted |= indexes is None
            gone = [i for i in (self._open if indexes is None else indexes) if i in self._open]
        if gone:
            self.attachment.owe("abort", {"offsets": [self.offsets[i] for i in gone]})
        self._close(gone)

    def _close(self, indexes: Iterable[int]) -> None:
        with self._lock:
            self._open.difference_update(indexes)
            settled = self.done and not self._open and not self._settled
            self._settled |= settled
        if settled:
            self.attachment.settled()

    def on_answer(self, kind: str, body: Any) -> bool:
        self._check(kind, body)
        with self._lock:
            self.status = list(body.status)
            self.offsets = array("Q", body.offsets)
            self.reason = body.reason
            self._open = {i for i, status in enumerate(self.status) if status == RESERVED}
            unwanted = self._unwanted
        self._end()
        if unwanted:
            self.abort()
        else:
            self._close(())
        return True

    def on_failure(self, error: KvError) -> None:
        self._end(error)
        self._close(())

    def on_late(self, kind: str, body: Any) -> None:
        self._check(kind, body)
        late = [offset for offset, status in zip(body.offsets, body.status) if status == RESERVED]
        if late:
            self.attachment.owe("abort", {"offsets": late})

    def _check(self, kind: str, body: Any) -> None:
        if kind != "reserved" or len(body.status) != self.count or len(body.offsets) != self.count:
            raise KvError("PROTOCOL", f"the cache node answered a reserve of {self.count} blocks with {kind} of another number")
        self.attachment.checked([offset for offset, status in zip(body.offsets, body.status) if status == RESERVED])
