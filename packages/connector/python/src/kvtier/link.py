"""One connection to a cache node: frames out, answers in, a deadline on each request. Runs on its session's thread.

Invariants: each exchange ends exactly once, with its last answer, at its deadline or when the link ends; at most ``MAX_OUTSTANDING``
wait. A node that lets one deadline pass in silence is left alone: nothing is asked but one probe, and any frame lifts that. One whose
pulse beats meanwhile is slow: it is asked for a sign of life, and left alone when it lets a deadline pass ``SILENT_AFTER_S`` later
without one. While something waits, a node that says nothing is asked for a sign, too; without one it is left alone, and all that waits
ends as at its deadline. One that breaks the protocol is disconnected; what only a newer one knows to say is skipped and counted. An
exchange whose deadline passed stays known until the node answers, because a late answer may have to be undone.
"""

from __future__ import annotations

import heapq
import select
import socket
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

from .errors import KvError
from .protocol import FrameReader, encode
from .pulse import Pulse
from .waking import unwake, wake

MAX_OUTSTANDING = 256
MAX_UNSENT_BYTES = 32 << 20
READ_BYTES = 1 << 18
#: A suspended link whose probe is not answered by then is dropped: it may be the connection that is stuck.
PROBE_DEADLINE_S = 15.0
#: Without a frame while something waits: a sign of life is asked for, and when it has not come by then the node stands still. A load of
#: what another engine computes is silent for long, and its node answers at once. Where the node's pulse beats, its silence is what the
#: present turn of its event loop has taken of its own: a busy machine makes turns long, and a node that is slow is waited for.
ASK_AFTER_S = 0.5
SILENT_AFTER_S = 1.2
#: A pulse beats every 50 ms: where it has not, so long after a request, the node stands still.
BEATEN_AFTER_S = 0.15
#: Counts for no more, however long it took: on a machine so busy that this thread does not get its turn, the node does not get its own.
LONGEST_TURN_S = 0.1


class Exchange(Protocol):
    """A request under way; called on the session's thread."""

    kind: str
    fields: dict[str, Any]
    deadline_s: float

    def on_answer(self, kind: str, body: Any) -> bool:
        """True: it was the last one. KvError PROTOCOL ends the link."""

    def on_failure(self, error: KvError) -> None:
        """Refused by the node, deadline, link ended."""

    def on_late(self, kind: str, body: Any) -> None:
        """The last answer came after the deadline."""


class Probe:
    """Asks a silent node for a sign of life."""

    kind = "stats"
    fields: dict[str, Any] = {}
    deadline_s = PROBE_DEADLINE_S

    def __init__(self, ended: Callable[[KvError | None], None]) -> None:
        self._ended = ended

    def on_answer(self, kind: str, body: Any) -> bool:
        self._ended(None)
        return True

    def on_failure(self, error: KvError) -> None:
        self._ended(error)

    def on_late(self, kind: str, body: Any) -> None:
        pass


class _Pending:
    __slots__ = ("exchange", "sent_at", "expired")

    def __init__(self, exchange: Exchange, sent_at: float) -> None:
        self.exchange = exchange
        self.sent_at = sent_at
        self.expired = False


class Link:
    """``post`` from any thread; everything else on the session's."""

    def __init__(self, connection: socket.socket, wake_fd: int, on_unknown: Callable[[], None] = lambda: None) -> None:
        """``on_unknown``: a newer node said what is not known here."""
        self.end_reason: KvError | None = None
        self.suspended = False
        #: None: its frames alone tell that the node lives.
        self.pulse: Pulse | None = None
        self.epoch: int | None = None
        self._on_unknown = on_unknown
        self._socket = connection
        self._wake_fd = wake_fd
        self._outbox: deque[tuple[int, Exchange]] = deque()
        self._pending: dict[int, _Pending] = {}
        self._deadlines: list[tuple[float, int]] = []
        self._unsent = bytearray()
        self._reader = FrameReader()
        # Kept: a megabyte that is asked for and given back at each answer is mapped and unmapped each time, on a core that computes.
        self._buffer = memoryview(bytearray(READ_BYTES))
        self._heard_at = time.monotonic()
        self._next_probe = -1
        self._probing = False
        self._probed_at = self._heard_at
        #: When a beat was seen last, of a node whose event loop goes round.
        self._beat_at = float("-inf")
        #: What was read of the pulse since it was watched last.
        self._still_s: float | None = None
        #: When something was sent that ended in silence; whether the node stands still is not known yet.
        self._doubted_at: float | None = None
        #: How long something has waited and nothing came; None: the node was found silent, and has said nothing since.
        self._silence_s: float | None = 0.0
        self._turned_at = self._heard_at
        self._poll = select.poll()
        self._poll.register(wake_fd, select.POLLIN)
        self._poll.register(connection, select.POLLIN)
        self._writing = False
        #: It waits for something to do, or is about to: who posts must wake it.
        self._sleeps = True

    @property
    def alive(self) -> bool:
        return self.end_reason is None

    @property
    def outstanding(self) -> int:
        return len(self._pending) + len(self._outbox)

    @property
    def quiet(self) -> bool:
        """The node has all that was posted, and has answered it, as far as it answers at all."""
        if self._outbox or self._unsent:
            return False
        return self.suspended or all(pending.expired for pending in self._pending.values())

    def post(self, request_id: int, exchange: Exchange) -> None:
        self._outbox.append((request_id, exchange))
        if self._sleeps:  # waking costs an engine's loop as much as a hundred instructions of Python, or a few hundred
            self._sleeps = False
            wake(self._wake_fd)

    def forget(self, request_id: int) -> None:
        """Its answer does not matter any more, and the node knows."""
        self._pending.pop(request_id, None)

    def end(self, reason: KvError) -> None:
        if self.end_reason is not None:
            return
        self.end_reason = reason
        self._socket.close()
        waiting = [(pending.exchange, pending.expired) for pending in self._pending.values()]
        waiting += [(exchange, False) for _, exchange in self._outbox]
        self._pending.clear()
        self._outbox.clear()
        for exchange, expired in waiting:
            if not expired:
                exchange.on_failure(reason.again())

    def turn(self, longest_s: float) -> None:
        """Waits for something to do, no longer than told, and does it."""
        now = time.monotonic()
        wait_s = longest_s
        if self._deadlines:
            wait_s = max(0.0, min(wait_s, self._deadlines[0][0] - now))
        if self._pending:
            wait_s = min(wait_s, LONGEST_TURN_S)
        if self._doubted_at is not None:
            wait_s = max(0.0, min(wait_s, self._doubted_at + BEATEN_AFTER_S - now))
        try:
            self._sleeps = True
            # In this order: what is posted from now on wakes it.
            events = dict(self._poll.poll(0 if self._outbox else int(wait_s * 1000) + 1))
            self._sleeps = False
            if self._wake_fd in events:
                unwake(self._wake_fd)
            if events.get(self._socket.fileno(), 0) & (select.POLLIN | select.POLLHUP | select.POLLERR):
                self._read()
            self._send_posted()
            self._write()
            if self._deadlines and self._deadlines[0][0] <= time.monotonic():
                self._read()  # where this thread was kept waiting, the answer may lie here: that is not the node's silence
        except KvError as error:
            self.end(error)
        except OSError as error:
            self.end(KvError("DISCONNECTED", f"the cache node's connection ended ({error})", retry=True))
        now = time.monotonic()
        if self.alive:
            self._expire(now)
        if self.alive:
            self._watch(min(LONGEST_TURN_S, now - self._turned_at))
        self._turned_at = now

    def _send_posted(self) -> None:
        while self._outbox:
            request_id, exchange = self._outbox.popleft()
            self._feel()  # beats until now say nothing of what comes
            now = time.monotonic()
            try:
                frame = encode(request_id, exchange.kind, exchange.fields)
            except (KvError, ValueError, TypeError) as error:
                exchange.on_failure(error if isinstance(error, KvError) else KvError("REQUEST", f"{exchange.kind}: {error}"))
                continue
            self._pending[request_id] = _Pending(exchange, now)
            heapq.heappush(self._deadlines, (now + exchange.deadline_s, request_id))
            self._unsent += frame
            if len(self._unsent) > MAX_UNSENT_BYTES:
                raise KvError("DISCONNECTED", "the cache node does not read", retry=True)

    def _write(self) -> None:
        while self._unsent:
            try:
                sent = self._socket.send(self._unsent)
            except (BlockingIOError, InterruptedError):
                break
            del self._unsent[:sent]
        wanted = bool(self._unsent)
        if wanted != self._writing:
            self._writing = wanted
            self._poll.modify(self._socket, select.POLLIN | (select.POLLOUT if wanted else 0))

    def _read(self) -> None:
        try:
            size = self._socket.recv_into(self._buffer)
        except (BlockingIOError, InterruptedError):
            return
        if not size:
            raise KvError("DISCONNECTED", "the cache node closed the session", retry=True)
        for frame in self._reader.push(self._buffer[:size]):
            self._receive(frame)

    def _receive(self, frame: Any) -> None:
        kind = frame.WhichOneof("body")
        if self.epoch is None:
            self.epoch = frame.boot_epoch
        if frame.boot_epoch != self.epoch:
            raise KvError("PROTOCOL", "the cache node changed its boot epoch")
        self._heard_at = time.monotonic()
        self._silence_s = 0.0
        self.suspended = False
        if kind is None:
            # A newer node's. Whatever it says, more of it may follow: the deadline ends the request.
            self._on_unknown()
            return
        pending = self._pending.get(frame.id)
        if pending is None:
            return
        body = getattr(frame, kind)
        if kind == "failure":
            self.forget(frame.id)
            if not pending.expired:
                pending.exchange.on_failure(KvError(body.code, body.message, retry=body.retry, tier=body.tier))
        elif not pending.expired:
            if pending.exchange.on_answer(kind, body):
                self.forget(frame.id)
        elif kind != "ready":
            self.forget(frame.id)
            pending.exchange.on_late(kind, body)

    def _expire(self, now: float) -> None:
        while self._deadlines and self._deadlines[0][0] <= now:
            _, request_id = heapq.heappop(self._deadlines)
            pending = self._pending.get(request_id)
            if pending is None or pending.expired:
                continue
            if not isinstance(pending.exchange, Probe):
                self._doubt(pending.sent_at, now)
            self._give_up(pending)
        doubted_at, self._doubted_at = self._doubted_at, None
        if doubted_at is not None:
            self._doubt(doubted_at, now)

    def _doubt(self, sent_at: float, now: float) -> None:
        """Something that was sent then has ended, and not by an answer."""
        if self.suspended or self._heard_at >= sent_at:
            return
        self._feel()
        if self._beat_at > sent_at:
            # One that beats and says nothing when it is asked costs no more deadlines, either.
            if self._probing and now - max(self._probed_at, self._heard_at) >= SILENT_AFTER_S:
                self._suspend()
            else:
                self._ask_for_life()
        elif self.pulse is not None and now < sent_at + BEATEN_AFTER_S:
            self._doubted_at = sent_at if self._doubted_at is None else min(sent_at, self._doubted_at)
        else:
            self._suspend()

    def _feel(self) -> None:
        """Reads the pulse, which tells each beat once."""
        still_s = self.pulse.still_s() if self.pulse is not None else None
        if still_s is not None:
            self._still_s = still_s
            if still_s < ASK_AFTER_S:
                self._beat_at = time.monotonic()

    def _give_up(self, pending: _Pending) -> None:
        if not pending.expired:
            pending.expired = True
            pending.exchange.on_failure(KvError("DEADLINE", "the cache node did not answer in time", retry=True))

    def _watch(self, took_s: float) -> None:
        if self._silence_s is None or self.epoch is None:  # before its first answer a node may take its time
            return
        before, self._silence_s = self._silence_s, self._silence_s + took_s
        if self._pending:
            self._feel()
            if self._still_s is not None:
                self._silence_s = min(self._silence_s, self._still_s)
        self._still_s = None
        if self._silence_s < ASK_AFTER_S:
            if not self._pending:
                self._silence_s = 0.0
            return
        waiting = [one for one in self._pending.values() if not one.expired and not isinstance(one.exchange, Probe)]
        if not waiting:
            self._silence_s = 0.0
        elif self._silence_s >= SILENT_AFTER_S:
            self._silence_s = None
            if not self.suspended:
                self._suspend()
            for one in waiting:
                self._give_up(one)
        elif before < ASK_AFTER_S:
            self._ask_for_life()

    def _suspend(self) -> None:
        self.suspended = True
        self._ask_for_life()

    def _ask_for_life(self) -> None:
        """Once at a time."""
        if self._probing:
            return
        self._probing = True
        self._probed_at = time.monotonic()
        self._next_probe -= 1  # ids of the session's requests are above 0; on the wire these are unsigned
        self.post(self._next_probe & 0xFFFF_FFFF_FFFF_FFFF, Probe(self._probed))

    def _probed(self, error: KvError | None) -> None:
        self._probing = False
        if error is not None and self.suspended:  # a refusal is a sign of life
            self.end(error)
