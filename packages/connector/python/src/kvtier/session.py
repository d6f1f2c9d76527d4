"""The session with the cache node, kept up for ever on a thread of its own: connect, attach; when it ends, wait until what was leased
and reserved in it is settled, and start again after a jittered pause.

     ┌──────────► connecting ──► attaching ──► attached ──┬──► closed: parting ──► end
     │                │              │                    │ connection ended
     └──── pause ◄────┴──────────────┴──── draining ◄─────┘

Parting: the connection stays until what was leased and reserved is given back over it. The node would keep it aside for as long as this
process lives, and nobody names the session of one that is closed.

Invariants: no method waits but ``close``; a request that cannot be sent has failed when it is given back. A former session is named at the
next Attach only when all of its loads and reservations were settled: the node gives their slots away from then on.
"""

from __future__ import annotations

import logging
import os
import random
import threading
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from .attachment import ATTACH_DEADLINE_S, ATTACH_LIMIT_S, DRAIN_LIMIT_S, NONE, Attachment, attachment_of
from .connecting import connect, group_id
from .copies import ArenaRef
from .errors import KvError
from .leases import Load, Reservation
from .link import LONGEST_TURN_S, Link
from .protocol import MAX_HASHES, PROTOCOL
from .requests import Held, Request, TierState, done_count
from .threads import start
from .waking import wake

log = logging.getLogger("kvtier")

FIRST_PAUSE_S = 0.02
LONGEST_PAUSE_S = 1.0
#: A session that lived this long was a good one: the next pause is short again.
GOOD_SESSION_S = 1.0
#: The node ends a load at its deadline by itself; this much later we do.
GRACE_S = 0.025
#: Engine and node start at the same time, and nothing is wrong when the node is the slower one by so much.
START_S = 10.0
_TURN_S = 1.0
#: The same while it parts: what was settled is seen so soon.
_PARTING_TURN_S = 0.05


class Session:
    """Requests of one namespace. All methods are for any thread; ``close`` alone waits."""

    def __init__(
        self,
        socket_path: str,
        *,
        namespace: bytes,
        payload_bytes: int,
        block_tokens: int,
        hash_bytes: int = 32,
        tenant: str = "",
        ttl_seconds: int = 0,
        client: str = "kvtier for Python",
        arena_folder: str | None = None,
        group: int | str | None = None,
        on_down: Callable[[], None] | None = None,
    ) -> None:
        """``arena_folder``: where this process sees the folder of the node's arena. ``group``: the node may be of another user, if its
        socket's folder is of this group, by name or number. ``on_down``: called on the session's thread when what was attached has ended, and
        at every attempt that came to nothing; it raises nothing. @raises KvError; OSError where the system has no descriptor or no thread
        now"""
        if len(namespace) != 32 or hash_bytes not in (16, 32) or payload_bytes < 1 or block_tokens < 1:
            raise KvError("CONFIG", "a session has a namespace of 32 bytes, hashes of 16 or 32, and blocks of tokens and bytes")
        self.socket_path = socket_path
        self.payload_bytes = payload_bytes
        self.hash_bytes = hash_bytes
        self._most_bytes = MAX_HASHES * hash_bytes
        self._attach = {
            "protocol": PROTOCOL,
            "namespace": namespace,
            "payload_bytes": payload_bytes,
            "block_tokens": block_tokens,
            "hash_bytes": hash_bytes,
            "client": f"{client} pid {os.getpid()}",
            "tenant": tenant,
            "ttl_seconds": ttl_seconds,
        }
        #: How often it was attached.
        self.sessions = 0
        #: Frames of a newer node, of a kind that is not known here; skipped.
        self.unknown_answers = 0
        #: The last attempt to attach came to nothing, or what was attached has ended.
        self.failing = False
        self._arena_folder = arena_folder
        self._group = group_id(group)
        self._on_down = on_down
        self._held_fd: int | None = None
        self._attachment: Attachment | None = None
        self._closing = threading.Event()
        self._complaint = ""
        self._started_at = time.monotonic()
        self._pid = os.getpid()
        self._wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._wake_lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="kvtier-session", daemon=True)
        try:
            start(self._thread)
        except OSError:
            os.close(self._wake_fd)
            raise

    @property
    def attachment(self) -> Attachment | None:
        """The present one, when there is one and the node answers. Another object after each reconnection."""
        attachment = self._attachment
        return attachment if attachment is not None and attachment.usable and self._pid == os.getpid() else None

    @property
    def arena(self) -> ArenaRef | None:
        """Of what is attached, also while the node is silent. None: its connection has ended."""
        attachment = self._attachment
        return attachment.arena if attachment is not None and attachment.alive else None

    @property
    def suspended(self) -> bool:
        """Attached, but left alone until the node answers again."""
        attachment = self._attachment
        return attachment is not None and attachment.suspended

    def lookup(
        self, hashes: bytes, *, gaps: bool = False, deadline_s: float = 0.05, on_answer: Callable[[Held], None] | None = None
    ) -> Request[Held]:
        """How much of a chain is held, packed hashes from its first on; with ``gaps`` also behind what is missing. ``on_answer``: called
        on the session's thread before the request is done; it is short and raises nothing."""
        fields: dict[str, Any] = {"hashes": self._packed(hashes), "gaps": gaps}
        read = partial(Held.read, len(hashes) // self.hash_bytes, on_answer)
        return self._ask(Request("lookup", fields, deadline_s, "lookup", read))

    def lacks(self, hashes: bytes, *, gaps: bool = False) -> bool:
        """Surely a lookup of this chain would find nothing: read beside the arena, in a microsecond. False: the node is to be asked."""
        attachment = self._present()
        table = attachment.held
        return table is not None and attachment.usable and table.lacks(hashes, self.hash_bytes, gaps)

    def in_arena(self, hashes: bytes, *, gaps: bool = False) -> tuple[tuple[int, int], ...] | None:
        """As a lookup, where all that is held of this chain lies in the arena: its ranges, read beside the arena. They may be too much, and
        a load of them come short; never too little. None: the node is to be asked."""
        attachment = self._present()
        table = attachment.held
        return table.in_arena(hashes, self.hash_bytes, gaps) if table is not None and attachment.usable else None

    def load(
        self,
        hashes: bytes,
        *,
        deadline_s: float,
        await_s: float = 0.0,
        await_from: int | None = None,
        on_ready: Callable[[Load], None] | None = None,
    ) -> Load:
        """Brings a chain into the arena and leases it. ``await_s``: blocks that nobody holds yet are waited for, unless they are to come
        from a node (``await_from``: its boot epoch) from which none can. ``on_ready``: called on the session's thread whenever more of it is
        ready; it is short and raises nothing."""
        deadline_ms = max(1, int(deadline_s * 1000))
        fields: dict[str, Any] = {"hashes": self._packed(hashes), "deadline_ms": deadline_ms}
        if await_s > 0:
            fields["await_ms"] = max(1, int(await_s * 1000))
            if await_from is not None:
                fields["await_from"] = await_from
        attachment = self._present()
        load = Load(attachment, attachment.next_id(), len(hashes) // self.hash_bytes, fields, deadline_s + GRACE_S, on_ready)
        attachment.begun()
        attachment.send(load, request_id=load.id)
        return load

    def reserve(
        self, parent: bytes, hashes: bytes, *, token_ids: bytes | None = None, deadline_s: float = 1.0
    ) -> Reservation:
        """Slots for a contiguous piece of a chain; ``parent`` is empty at the root."""
        fields: dict[str, Any] = {"parent": parent, "hashes": self._packed(hashes)}
        if token_ids is not None:
            fields["token_ids"] = token_ids
        attachment = self._present()
        reservation = Reservation(attachment, len(hashes) // self.hash_bytes, fields, deadline_s)
        attachment.begun()
        attachment.send(reservation)
        return reservation

    def pin(self, hashes: bytes, *, ttl_s: float, ticket: bytes = b"", deadline_s: float = 1.0) -> Request[int]:
        """Keeps blocks from eviction. The value: how many are pinned. ``ticket``: 16 random bytes, for somebody else to end it by."""
        fields = {"hashes": self._packed(hashes), "ttl_ms": max(1, int(ttl_s * 1000))}
        if ticket:
            fields["ticket"] = ticket
        return self._ask(Request("pin", fields, deadline_s, "done", done_count))

    def unpin(self, hashes: bytes, *, deadline_s: float = 1.0) -> Request[int]:
        return self._ask(Request("unpin", {"hashes": self._packed(hashes)}, deadline_s, "done", done_count))

    def end_pin(self, ticket: bytes, block: bytes = b"", *, deadline_s: float = 1.0) -> Request[int]:
        """Ends what another session pinned with this ticket. ``block``: the name of one of its blocks, by which another host's node is
        found. The value: how many blocks were let go here; 0 is no error."""
        request = Request("end_pin", {"ticket": ticket, "hash": block}, deadline_s, "done", done_count)
        attachment = self._present()
        if attachment.ends_pins:
            attachment.send(request)
        else:
            request.on_failure(KvError("DISCONNECTED", "no cache node is attached that knows tickets"))
        return request

    def prefetch(self, hashes: bytes, *, deadline_s: float = 1.0) -> Request[str]:
        """Brings what lower tiers hold into the arena behind all loads. The value: why not; "" when it was accepted."""

        def read(body: Any) -> str:
            return "" if body.accepted else str(body.reason or "refused")

        return self._ask(Request("prefetch", {"hashes": self._packed(hashes)}, deadline_s, "prefetching", read))

    def stats(self, *, deadline_s: float = 1.0) -> Request[dict[str, int]]:
        """The node's counters."""
        return self._ask(Request("stats", {}, deadline_s, "stats", lambda body: dict(body.counters)))

    def tiers(self, *, deadline_s: float = 1.0) -> Request[dict[str, TierState]]:
        """What the node's tiers hold, by their names."""
        return self._ask(Request("stats", {}, deadline_s, "stats", TierState.read))

    def close(self, wait_s: float = 2.0) -> bool:
        """Ends the session; whether its thread has ended in that time. Idempotent. Nothing can be asked from now on; what was leased and
        reserved can still be given back, for ``DRAIN_LIMIT_S``; the thread ends when all of it was, or is given up."""
        self._closing.set()
        attachment, self._attachment = self._attachment, None
        if attachment is not None:
            attachment.part()
        self._wake()
        if self._pid != os.getpid():
            return True  # the thread is the parent's
        self._thread.join(wait_s)
        return not self._thread.is_alive()

    def _packed(self, hashes: bytes) -> bytes:
        if not 0 < len(hashes) <= self._most_bytes or len(hashes) % self.hash_bytes:
            raise KvError("CONFIG", f"{len(hashes)} bytes are not 1 to {MAX_HASHES} hashes of {self.hash_bytes} bytes")
        return hashes

    def _present(self) -> Attachment:
        """The one to send to; where there is none, one that has ended."""
        attachment = self._attachment
        if attachment is None or self._pid != os.getpid():
            return NONE
        return attachment

    def _ask(self, request: Request[Any]) -> Request[Any]:
        self._present().send(request)
        return request

    def _wake(self) -> None:
        with self._wake_lock:
            if self._wake_fd >= 0:
                wake(self._wake_fd)

    def _run(self) -> None:
        pause_s = FIRST_PAUSE_S
        previous = b""
        while not self._closing.is_set():
            began = time.monotonic()
            attachment: Attachment | None = None
            until: float | None = None
            try:
                link = Link(connect(self.socket_path, self._group), self._wake_fd, self._unknown)
                try:
                    attachment = self._attached(link, previous)
                    until = self._serve(link, attachment)
                finally:
                    link.end(KvError("DISCONNECTED", "the session ends"))
                    self._attachment = None
            except KvError as error:
                self.failing = True
                self._complain(error)
            except Exception:  # a defect of ours ends this life of the session, and not the engine's cache
                log.exception("kvtier: a session failed")
            if self._on_down is not None and not self._closing.is_set():
                self._on_down()
            if attachment is not None:
                wait_s = DRAIN_LIMIT_S if until is None else max(0.0, until - time.monotonic())  # it parted, and waited then
                previous = attachment.session if attachment.drained(wait_s) else b""
            self._let_go(attachment is None or previous != b"")
            if time.monotonic() - began > GOOD_SESSION_S:
                pause_s = FIRST_PAUSE_S
            self._closing.wait(pause_s * (0.5 + random.random()))
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
        with self._wake_lock:
            os.close(self._wake_fd)
            self._wake_fd = -1

    def _attached(self, link: Link, previous: bytes) -> Attachment:
        request = Request("attach", {**self._attach, "previous_session": previous}, ATTACH_LIMIT_S, "attached", lambda body: body)
        link.post(1, request)
        waited_s, now = 0.0, time.monotonic()
        while not request.done and link.alive and not self._closing.is_set():
            link.turn(_TURN_S)
            before, now = now, time.monotonic()
            waited_s += min(LONGEST_TURN_S, now - before)
            if waited_s >= ATTACH_DEADLINE_S and not request.done:
                raise KvError("DEADLINE", "the cache node did not answer in time", retry=True)
        if self._closing.is_set() and not request.done:
            raise KvError("CANCELLED", "the session is closed")
        attached = request.result()
        attachment, self._held_fd = attachment_of(link, attached, self.payload_bytes, self._arena_folder)
        return attachment

    def _unknown(self) -> None:
        self.unknown_answers += 1

    def _let_go(self, settled: bool) -> None:
        """After the last copy: the node may give away what is left of the session. Otherwise the byte is held until the process ends."""
        if self._held_fd is not None and settled:
            os.close(self._held_fd)
        self._held_fd = None

    def _serve(self, link: Link, attachment: Attachment) -> float:
        """Until when it is waited for what is not settled."""
        self.sessions += 1
        self.failing = False
        self._complaint = ""
        self._attachment = attachment
        log.info("kvtier: attached to the cache node at %s", self.socket_path)
        while link.alive and not self._closing.is_set():
            link.turn(_TURN_S)
        if link.end_reason is not None:
            raise link.end_reason
        return self._part(link, attachment)

    def _part(self, link: Link, attachment: Attachment) -> float:
        self._attachment = None
        attachment.part()
        until = time.monotonic() + DRAIN_LIMIT_S
        while link.alive and time.monotonic() < until and not (attachment.drained(0.0) and link.quiet):
            link.turn(_PARTING_TURN_S)
        return until

    def _complain(self, error: KvError) -> None:
        """The same trouble is told once, not at every attempt."""
        if self._closing.is_set() or str(error) == self._complaint:
            return
        if error.code == "DISCONNECTED" and self.sessions == 0 and time.monotonic() - self._started_at < START_S:
            return
        self._complaint = str(error)
        log.warning("kvtier: no session with the cache node: %s", error)


def close_all(sessions: Iterable[Session], wait_s: float) -> None:
    """Closes them; waits no longer for all of them than for one, as they end at the same time."""
    closing = list(sessions)
    for session in closing:
        session.close(0.0)
    until = time.monotonic() + wait_s
    for session in closing:
        session.close(max(0.0, until - time.monotonic()))
