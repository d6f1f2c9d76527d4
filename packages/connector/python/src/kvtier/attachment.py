"""One life of a session: what it is attached to, what is on its way there, and what of it is not settled yet.

Invariants: nothing waits here but ``drained``; a request that cannot be sent has failed when ``send`` comes back. One that was parted
from takes back what it gave, and nothing else.
"""

from __future__ import annotations

import itertools
import threading
import time
from array import array
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from .copies import ArenaRef
from .errors import KvError
from .held import HeldTable
from .hold import hold, own_byte
from .link import MAX_OUTSTANDING, Exchange, Link
from .requests import OWED_DEADLINE_S, Request, done_count

ATTACH_DEADLINE_S = 5.0
#: The same by the clock on the wall: where neither side ran for a while, sessions would give up in the moment in which the node answers.
ATTACH_LIMIT_S = 15.0
#: Copies take milliseconds. After this what is not settled stays in the node's quarantine: the next session does not name the former, and
#: one that is closed ends.
DRAIN_LIMIT_S = 30.0


class Attachment:
    """One life of the session: a live link, and the arena that offsets are of."""

    #: Its session is closed.
    parted = False

    def __init__(self, link: Link, attached: Any, epoch: int, payload_bytes: int, arena: ArenaRef) -> None:
        self.session: bytes = attached.session
        self.boot_epoch = epoch
        #: As this process sees it.
        self.arena = arena
        #: The node's KV events carry token ids: a reserve is to say them.
        self.wants_token_ids = bool(attached.wants_token_ids)
        #: It knows tickets of pins.
        self.ends_pins = bool(attached.ends_pins)
        #: What the node holds, to be read without asking; None: it is asked.
        self.held: HeldTable | None = None
        self._link = link
        self._least = 4096 + attached.header_bytes
        self._last = attached.arena_bytes - payload_bytes
        self._ids = itertools.count(3)
        self._unsettled = 0
        self._lock = threading.Lock()
        #: There while somebody waits for the last of them to be settled.
        self._idle: threading.Event | None = None

    @property
    def alive(self) -> bool:
        return self._link.alive and not self.parted

    @property
    def usable(self) -> bool:
        """The node is there and answers: it may be asked."""
        link = self._link
        return link.end_reason is None and not link.suspended and not self.parted

    @property
    def suspended(self) -> bool:
        return self._link.alive and self._link.suspended

    def part(self) -> None:
        """For whoever has it this is its end, but what they give back still reaches the node."""
        self.parted = True

    def next_id(self) -> int:
        return next(self._ids)

    def send(self, exchange: Exchange, *, owed: bool = False, request_id: int | None = None) -> None:
        """``owed``: gives something back, and passes the bounds; each follows one that did not."""
        link = self._link
        if link.end_reason is not None:
            exchange.on_failure(link.end_reason.again())
        elif not owed and self.parted:
            exchange.on_failure(KvError("DISCONNECTED", "the session is closed", retry=True))
        elif not owed and link.suspended:
            exchange.on_failure(KvError("DEADLINE", "the cache node does not answer", retry=True))
        elif not owed and link.outstanding >= MAX_OUTSTANDING:
            exchange.on_failure(KvError("BUSY", "too many requests wait for the cache node", retry=True))
        else:
            link.post(self.next_id() if request_id is None else request_id, exchange)
            if link.end_reason is not None:  # it ended meanwhile, perhaps before it saw this
                exchange.on_failure(link.end_reason.again())

    def owe(self, kind: str, fields: dict[str, Any], forget: int | None = None) -> None:
        """A request that nobody waits for. ``forget``: the request that it ends."""

        def ended(_body: Any) -> int:
            if forget is not None:
                self._link.forget(forget)
            return 0

        self.send(Request(kind, fields, OWED_DEADLINE_S, "done", ended), owed=True)

    def checked(self, offsets: Iterable[int]) -> array[int]:
        """Offsets as the node says them. KvError PROTOCOL, which ends the link, for a place outside of its arena."""
        found = array("Q", offsets)
        if found and (min(found) < self._least or max(found) > self._last):
            raise KvError("PROTOCOL", "the cache node named an offset outside of its arena")
        return found

    def begun(self) -> None:
        with self._lock:
            self._unsettled += 1

    def settled(self) -> None:
        with self._lock:
            self._unsettled -= 1
            idle = self._idle if self._unsettled == 0 else None
        if idle is not None:
            idle.set()

    def drained(self, wait_s: float) -> bool:
        """Whether all that was leased and reserved is settled; waits for that no longer than told."""
        with self._lock:
            if self._unsettled == 0:
                return True
            idle = self._idle = threading.Event()
        return wait_s > 0 and idle.wait(wait_s)


def attachment_of(link: Link, attached: Any, payload_bytes: int, arena_folder: str | None) -> tuple[Attachment, int | None]:
    """Of the node's answer, and the descriptor that holds this process' byte beside the arena. KvError PROTOCOL for what cannot be."""
    if len(attached.session) != 16 or not 4096 <= attached.header_bytes + 4096 < attached.arena_bytes < 1 << 53:
        raise KvError("PROTOCOL", "the cache node described an arena that cannot be")
    arena = ArenaRef(attached.arena_path, attached.arena_bytes, attached.arena_id).within(arena_folder)
    # The byte that this process holds from now on, and with it every process that maps the arena.
    byte = own_byte()
    held_fd = hold(arena.lock_path, byte) if attached.has_lock_file else None
    if held_fd is None:  # the node looks at the process instead
        return Attachment(link, attached, link.epoch or 0, payload_bytes, arena), None
    attachment = Attachment(link, attached, link.epoch or 0, payload_bytes, replace(arena, lock_byte=byte))
    table = HeldTable.open(arena.lock_path, held_fd, attached.held_tag) if attached.HasField("held_tag") else None

    def confirmed(body: Any) -> int:
        if body.count == 1:  # it finds our lock there: the file is the one that it writes
            attachment.held = table
            link.pulse = table.pulse if table is not None else None
        return done_count(body)

    # Nobody waits for the answer: it is told before anything that needs slots is asked for.
    link.post(2, Request("hold", {"byte": byte}, ATTACH_DEADLINE_S, "done", confirmed))
    return attachment, held_fd


class _NoLink:
    """Stands for the link where there is none."""

    end_reason = KvError("DISCONNECTED", "no cache node is attached", retry=True)
    alive = False
    suspended = False


class _NoAttachment(Attachment):
    """Whatever is sent there has failed."""

    def __init__(self) -> None:
        self.held = None
        self.ends_pins = False
        self._link = _NoLink()  # type: ignore[assignment]
        self._ids = itertools.count(2)

    def begun(self) -> None:
        pass

    def settled(self) -> None:
        pass


NONE = _NoAttachment()
