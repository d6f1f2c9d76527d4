"""How fast this engine computes prompts, by its own steps: what a load has to beat. Pure: time is an argument."""

from __future__ import annotations

#: Steps of fewer tokens say how long a step takes, and not how long tokens do.
LEAST_TOKENS = 64
#: A step that took longer was a pause of something else.
MOST_S = 10.0
#: A load may be slower than computing by this much: both are only estimated.
PATIENCE = 1.25
#: Whatever it saves, a hiccup of the machine is no reason to give up.
BASE_MS = 50.0


class Pace:
    def __init__(self) -> None:
        #: None: not known yet.
        self.us_per_token: float | None = None
        self._tokens = 0
        self._at = 0.0

    def step(self, tokens: int, goes_on: bool, now: float) -> None:
        """A step of so many tokens begins. `goes_on`: some of its requests ran before, so that the engine was not idle in between."""
        took = now - self._at
        if goes_on and self._tokens >= LEAST_TOKENS and 0 < took < MOST_S:
            sample = took * 1e6 / self._tokens
            self.us_per_token = sample if self.us_per_token is None else 0.75 * self.us_per_token + 0.25 * sample
        self._tokens, self._at = tokens, now

    def limit_ms(self, tokens: int, most_us_per_token: float, most_ms: float) -> float:
        """What a load of so many tokens may take."""
        us = most_us_per_token
        if self.us_per_token is not None:
            us = min(us, PATIENCE * self.us_per_token)
        return min(most_ms, BASE_MS + tokens * us / 1e3)
