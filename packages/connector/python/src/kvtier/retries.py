"""Pauses between attempts at what the system refused: a file system that is away comes back, and is not to be asked all the time until then."""

from __future__ import annotations

FIRST_S = 1.0
LONGEST_S = 30.0


class Pauses:
    def __init__(self) -> None:
        self._next_s = FIRST_S

    def take(self) -> float:
        """How long to wait before the next attempt."""
        pause_s = self._next_s
        self._next_s = min(2 * pause_s, LONGEST_S)
        return pause_s

    def reset(self) -> None:
        """It went well."""
        self._next_s = FIRST_S
