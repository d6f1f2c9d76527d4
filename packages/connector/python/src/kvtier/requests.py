"""What a session's calls give back: to be polled by the caller, filled in by the session's thread.

Invariant: each ends exactly once, at its deadline at the latest.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Any, Callable, Generic, TypeVar

from .errors import KvError

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
        if body.held > asked:
            raise KvError("PROTOCOL", f"the cache node said that it holds {body.held} of {asked} blocks")
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
    #: Blocks of lookups that it held, and that it did not; blocks that left to make room; objects whose bytes did not match.
    hits: int = 0
    misses: int = 0
    evictions: int = 0
    corrupt: int = 0

    @staticmethod
    def read(body: Any) -> dict[str, TierState]:
        return {one.tier: TierState(**{of.name: getattr(one, of.name) for of in fields(TierState)}) for one in body.tiers}
