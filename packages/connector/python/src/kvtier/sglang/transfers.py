"""Batches of KV pages that were moved, kept until SGLang asks for them: its own histograms of pages and bandwidth.

Invariant: bounded; where nobody asks, the oldest go.
"""

from __future__ import annotations

from collections import deque
from typing import Any

MOST = 1024


class Transfers:
    """`loaded` and `stored` for any thread; `take` for SGLang's scheduler, in each turn of its loop."""

    def __init__(self, made: Any) -> None:
        """`made`: SGLang's class (`bases.storage_metrics`); None: it takes no figures."""
        self._made = made
        #: Pages, and bytes in a second.
        self._loaded: deque[tuple[int, float]] = deque(maxlen=MOST)
        self._stored: deque[tuple[int, float]] = deque(maxlen=MOST)

    def loaded(self, pages: int, size: int, took_s: float) -> None:
        if pages:
            self._loaded.append((pages, size / max(took_s, 1e-9)))

    def stored(self, pages: int, size: int, took_s: float) -> None:
        if pages:
            self._stored.append((pages, size / max(took_s, 1e-9)))

    def take(self) -> Any:
        """What was moved since the last call; None: nothing."""
        if self._made is None or not (self._loaded or self._stored):
            return None
        out = self._made()
        for waiting, pages, bandwidth in (
            (self._loaded, out.prefetch_pgs, out.prefetch_bandwidth),
            (self._stored, out.backup_pgs, out.backup_bandwidth),
        ):
            for _ in range(len(waiting)):  # what comes meanwhile is the next call's
                count, rate = waiting.popleft()
                pages.append(count)
                bandwidth.append(rate / 1e9)
        return out
