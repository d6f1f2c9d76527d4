"""What stands between an engine and a plug-in: no callback raises into it, whatever goes wrong inside.

A trouble is told once with its traceback and counted from then on; a plug-in in which too many callbacks failed leaves the engine
alone for good: misses, and what is on its way still ends.
"""

from __future__ import annotations

import functools
import logging
from typing import Any, Callable, TypeVar

#: Callbacks that failed before the plug-in that they belong to stops taking on anything new.
TROUBLES_TO_STOP = 32

F = TypeVar("F", bound=Callable[..., Any])


class Troubles:
    """Of one part of a plug-in that works by itself."""

    def __init__(self, log: logging.Logger | None = None) -> None:
        self.count = 0
        self._told: set[str] = set()
        self._log = log or logging.getLogger("kvtier")

    @property
    def stopped(self) -> bool:
        return self.count >= TROUBLES_TO_STOP

    def stop(self) -> None:
        """Nothing new is taken on from now on."""
        self.count = max(self.count, TROUBLES_TO_STOP)

    def note(self, where: str, error: BaseException) -> None:
        self.count += 1
        kind = f"{where}: {type(error).__name__}"
        if kind not in self._told and len(self._told) < 64:
            self._told.add(kind)
            self._log.error("kvtier: %s failed (%s); the request is computed instead", where, error, exc_info=error)
        if self.count == TROUBLES_TO_STOP:
            self._log.error("kvtier: %d callbacks failed; this engine is left alone until it is restarted", self.count)


def harmless(default: Callable[[], Any], instead: Callable[..., Any] | None = None) -> Callable[[F], F]:
    """Wraps a method of something with `troubles`: what it raises is noted, and `default()` answered instead.

    `instead`: what must happen all the same, with the method's own arguments; it gives the answer.
    """

    def wrap(method: F) -> F:
        @functools.wraps(method)
        def guarded(self: Any, *args: Any, **kwargs: Any) -> Any:
            try:
                return method(self, *args, **kwargs)
            except Exception as error:
                try:
                    self.troubles.note(method.__name__, error)
                    if instead is not None:
                        return instead(self, *args, **kwargs)
                except Exception:
                    pass
                return default()

        guarded.is_harmless = True  # type: ignore[attr-defined]
        return guarded  # type: ignore[return-value]

    return wrap
