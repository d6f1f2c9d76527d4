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
#: What computing a token is taken for while nothing was computed yet.
FIRST_US_PER_TOKEN = 200.0
#: Of what computing a prompt takes, what the answer about it may take: it is waited for before anything is loaded.
ASKING = 0.25
#: The same while nothing was computed yet: an engine and a node that have just begun are slow on a busy machine.
FIRST_MS = 500.0


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

    def limit_ms(self, tokens: int, most_ms: float) -> float:
        """What a load of so many tokens may take: where the machine is busy and steps are slow, longer."""
        us = FIRST_US_PER_TOKEN if self.us_per_token is None else PATIENCE * self.us_per_token
        return min(most_ms, BASE_MS + tokens * us / 1e3)

    def answer_ms(self, tokens: int, least_ms: float, most_ms: float) -> float:
        """What the node may take to say what it holds of a prompt of so many tokens."""
        computing_ms = FIRST_MS / ASKING if self.us_per_token is None else tokens * self.us_per_token / 1e3
        return max(least_ms, min(most_ms, ASKING * computing_ms))
