"""Blocks that are to be pinned as soon as they are committed: until another pod has loaded them and shows the ticket, or as a hint says.

Commits are confirmed by nobody, so it is tried until all of them are pinned, no longer than `_LIMIT_S`.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvtier.vllm.node import Attached

MAX_PINS = 1024
_LIMIT_S = 5.0


@dataclass
class _Pin:
    attached: Attached
    #: By group.
    chains: dict[int, bytes]
    ttl_s: float
    ticket: bytes
    until: float
    asked: list[Any] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)


class Pinning:
    """`add` is of the engine's loop, `keep` of the thread that keeps the node."""

    def __init__(self) -> None:
        self._pins: list[_Pin] = []

    def __len__(self) -> int:
        """Still to be pinned."""
        return len(self._pins)

    def add(self, attached: Attached, chains: dict[int, bytes], ttl_s: float, ticket: bytes) -> bool:
        """``ticket``: for somebody else to end it by; may be empty. False: too many wait."""
        if len(self._pins) >= MAX_PINS:
            return False
        self._pins.append(_Pin(attached, chains, ttl_s, ticket, time.monotonic() + _LIMIT_S))
        return True

    def keep(self, attached: Attached | None) -> None:
        """One more try of each, as soon as the last one is answered. ``attached``: what is attached now."""
        for pin in list(self._pins):
            if pin.asked and not all(request.done for request in pin.asked):
                continue
            missing = any(request.error or request.value < pin.counts[i] for i, request in enumerate(pin.asked))
            if (pin.asked and not missing) or time.monotonic() > pin.until or attached is not pin.attached:
                self._pins.remove(pin)
                continue
            pin.asked, pin.counts = [], []
            for share, session in zip(pin.attached.shares, pin.attached.sessions):
                chain = pin.chains.get(share.group.index, b"")
                if chain:
                    pin.asked.append(session.pin(chain, ttl_s=pin.ttl_s, ticket=pin.ticket))
                    pin.counts.append(len(chain) // session.hash_bytes)
