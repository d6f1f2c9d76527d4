"""How often an engine has flushed its cache: counted at the flush itself, so that all ranks count alike, whoever of them moves pages.

A flush clears the host pool. The count lies at the pool, which is made once in a process and outlives a storage backend that is
detached and attached again: what happened meanwhile is counted, too.

Invariants: a pool that was cleared without being counted is told (`seen`). Once a pool is cleared, no copy begins to pages that were given
out before, and none is under way: SGLang does not wait for its thread that loads, and gives the pages to others.
"""

from __future__ import annotations

import logging
import sys
import threading
import uuid
from collections.abc import Callable
from typing import Any

from kvtier.copies import Job
from kvtier.errors import KvError

log = logging.getLogger("kvtier.sglang")

_PLACE = "_kvtier_flushes"
#: SGLang's caches begin anew by these.
_RESETS = ("reset", "_reset_full")
#: Copies move memory and wait for nobody; one that takes longer is told.
_LONG_COPY_S = 5.0


def wait_ended(job: Job) -> None:
    """There is no deadline: until the copy has ended its pages are not SGLang's, and it only moves memory."""
    if not job.ended(_LONG_COPY_S):
        log.warning("kvtier: a copy takes longer than %d s; its pages are held until it has ended", _LONG_COPY_S)
        while not job.ended(_LONG_COPY_S):
            pass


class Flushes:
    def __init__(self, pool: Any, before: int) -> None:
        """`before`: flushes that may have been."""
        #: Of this pool and no other.
        self.name = uuid.uuid4().hex
        self._lock = threading.Lock()
        #: Times that the pool was cleared, flush or not.
        self._cleared = 0
        #: Copies to its pages that are under way.
        self._jobs: list[Job] = []
        self._pool = pool
        self._flushes = before
        self._clears = 0
        clear = pool.clear

        def counted(*args: Any, **kwargs: Any) -> Any:
            with self._lock:
                # Before it is cleared: nobody is to find the new pool in the old generation.
                self._flushes += not _being_made()
                self._cleared += 1
                self._end_copies()
                try:
                    return clear(*args, **kwargs)
                finally:
                    self._mark = _mark(pool)

        try:
            pool.clear = counted
            self._mark = _mark(pool)
        except AttributeError:
            self._mark = None

    def _end_copies(self) -> None:
        """What of them is not begun is dropped: a job may be of many pages, and what a thread moves at once is small."""
        jobs, self._jobs = self._jobs, []
        try:
            running = [job for job in jobs if not job.abandon()]
            for job in running:
                wait_ended(job)
        except KvError as error:  # the backend was closed meanwhile, which lets what runs end
            log.debug("kvtier: copies of a pool that is cleared: %s", error)

    @property
    def visible(self) -> bool:
        """Whether it can be told that this pool is cleared."""
        return self._mark is not None

    def count(self, kept: bool) -> int:
        """Of generations that have ended. `kept`: flushes end none."""
        return self._clears if kept else self._flushes + self._clears

    def seen(self) -> bool:
        """Whether each time that the pool was cleared was counted."""
        with self._lock:
            return _mark(self._pool) is self._mark

    def add(self) -> None:
        """The operator has cleared the backend."""
        with self._lock:
            self._clears += 1


class Loading:
    """Pages of the pool that SGLang gave out to be loaded: others' as soon as the pool is cleared. For one thread."""

    def __init__(self, flushes: Flushes) -> None:
        self._flushes = flushes
        self._began = flushes._cleared

    @property
    def over(self) -> bool:
        return self._flushes._cleared != self._began

    def copy(self, begin: Callable[[], Job]) -> Job | None:
        """Begins one, whose end is to be told (`copied`). None: it is over."""
        with self._flushes._lock:
            if self.over:
                return None
            begun = begin()
            self._flushes._jobs.append(begun)
            return begun

    def copied(self, job: Job) -> bool:
        """It has ended, or was given up. False: the pool was cleared, and with it nobody wants its result."""
        with self._flushes._lock:
            known = job in self._flushes._jobs
            if known:
                self._flushes._jobs.remove(job)
            return known


def flushes_of(pool: Any, later: bool) -> Flushes:
    """`later`: SGLang was started without this backend, and may have replaced its weights before."""
    found = getattr(pool, _PLACE, None)
    if found is None:
        found = Flushes(pool, int(later))
        setattr(pool, _PLACE, found)
    return found


def _mark(pool: Any) -> Any:
    """A flush of SGLang's cache clears its host pool, which makes this anew."""
    return getattr(pool, "mem_state", None)


def _being_made() -> bool:
    """A cache of SGLang's resets itself at the end of its constructor: nothing was computed for it yet, and that is no flush."""
    resetting = []
    frame = sys._getframe(2)
    while frame is not None:
        name = frame.f_code.co_name
        if name in _RESETS:
            resetting.append(frame.f_locals.get("self"))
        elif name == "__init__" and any(one is not None and one is frame.f_locals.get("self") for one in resetting):
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False
