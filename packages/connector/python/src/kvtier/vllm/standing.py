"""How long the engine's loop stands for an answer: its patience, and where it has one request and no more, a little longer.

Invariant: over one step no more than `STEP_PATIENCES` for all requests that are asked about together, and the spare time once. What was
not waited for costs nothing but a step: the next one finds it.
"""

from __future__ import annotations

import time
from typing import Protocol

#: A request may wait for what the node holds and for what it leases, each for a patience. Where many come at once, that is for all of them.
STEP_PATIENCES = 2
#: For the only request of an engine it stands so many times its patience longer in a step: vLLM would sleep, step through nothing and
#: ask again.
SPARE_PATIENCES = 2
#: And in so many patiences from its beginning.
SOON_PATIENCES = 10


class Awaited(Protocol):
    def wait(self, wait_s: float) -> bool:
        """Whether it has ended; waits no longer than told."""


class Staged(Awaited, Protocol):
    began_at: float
    asked_at: float


class Standing:
    def __init__(self, patience_s: float) -> None:
        #: The engine has one request and no more.
        self.alone = False
        self._patience_s = patience_s
        #: What is left of the time that this step may stand.
        self._left_s = STEP_PATIENCES * patience_s
        #: What is left of the time that this step may stand longer then.
        self._spare_s = SPARE_PATIENCES * patience_s

    def step(self) -> None:
        """Another one begins."""
        self._left_s = STEP_PATIENCES * self._patience_s
        self._spare_s = SPARE_PATIENCES * self._patience_s

    def wait(self, what: Awaited) -> bool:
        """Whether it came in the time that the engine's loop has."""
        return self._wait(what, self._patience_s)

    def wait_soon(self, stage: Staged) -> bool:
        """As `wait`, in spare time alone, and not of what comes from a disk or another host: meanwhile the engine's loop is there for who
        comes next."""
        began_lately = stage.asked_at - stage.began_at < SOON_PATIENCES * self._patience_s
        return self.alone and self._spare_s > 0 and began_lately and self._wait(stage, 0.0)

    def _wait(self, what: Awaited, patience_s: float) -> bool:
        patience_s = max(0.0, min(patience_s, self._left_s))
        began = time.monotonic()
        came = what.wait(patience_s + (self._spare_s if self.alone else 0.0))
        took_s = time.monotonic() - began
        self._left_s -= min(took_s, patience_s)
        if self.alone:
            self._spare_s -= max(0.0, took_s - patience_s)
        return came
