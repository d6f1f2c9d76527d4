"""What of the arena is an engine's for a while: a chain that is leased for reading, and slots to write to.

Invariants: whoever got a Load or a Reservation settles it once, after the last copy that uses its slots: a load is released, a
reservation's slots are committed or aborted. What comes too late is undone by itself.
"""

from __future__ import annotations

import threading
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Callable

from .errors import KvError
from .protocol import RESERVED
from .requests import OWED_DEADLINE_S, Request, Waiting, done_count

if TYPE_CHECKING:
    from .attachment import Attachment


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
        # What the node has to say yet changes nothing, and may be long in coming.
        if self.ready == self.count:
            self._end()
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
        """Makes blocks visible whose bytes are written. The value: how many the node took. After its session was closed they are aborted:
        what was copied from may have been given to others since, where an engine flushed its cache."""
        if len(indexes) != len(checksums) or not self._open.issuperset(indexes):
            raise KvError("CONFIG", "commit: one checksum for each of the blocks that are open")
        fields = {"offsets": [self.offsets[i] for i in indexes], "checksums": list(checksums)}
        request = Request("commit", fields, OWED_DEADLINE_S, "done", done_count)
        if self.attachment.parted:
            request.on_failure(KvError("DISCONNECTED", "the session is closed", retry=True))
            self.abort(indexes)
            return request
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
