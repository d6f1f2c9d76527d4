"""The arenas that a worker has mapped: the node's, and while it changes the one before.

     announced with a step ──► mapped by a thread ──► told once, in a later step ──► not announced any more, or its session has ended:
                                   └─ failed: one line, tried again                  unmapped by a thread when its last copy has ended

Invariant: an arena whose session has ended goes without a step, too: an engine that is idle takes none, and the next node may have no
room for its own arena beside it. A thread that the system refuses costs time and nothing else: it is tried again.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Sequence

from kvtier.copies import Arena, ArenaRef, Copies, Job
from kvtier.errors import KvError
from kvtier.hold import is_held, watch
from kvtier.threads import start
from kvtier.vllm.messages import ArenaPlace

log = logging.getLogger("kvtier.vllm")

#: A mapping that failed is tried again after this, at the next step.
_RETRY_S = 0.5
#: How often it is looked whether a session has ended.
_LOOK_S = 0.25


class ArenaGone(KeyError):
    """Nothing can be copied from or to an arena that is not mapped any more."""


class Arenas:
    """All but mapping, unmapping and looking are of the engine's loop."""

    def __init__(self, copies: Callable[[], Copies], folder: str | None) -> None:
        """``folder``: where this process sees that of the node's arena."""
        self._copies = copies
        self._folder = folder
        self._arenas: dict[int, Arena] = {}
        self._places: dict[int, ArenaPlace] = {}
        #: By which it is seen whether its session has ended, by id.
        self._watches: dict[int, int] = {}
        #: Whose mapping is under way or has failed, by id.
        self._under_way: dict[int, threading.Thread] = {}
        #: Mapped, and not told yet.
        self._new: list[int] = []
        #: Of which it was not told yet whether they are pinned.
        self._untold: set[int] = set()
        #: What is being unmapped.
        self._leaving: list[threading.Thread] = []
        #: What no thread could be had for: it is unmapped at the next look or step.
        self._left: list[Arena] = []
        self._lock = threading.Lock()
        self._complaint = ""
        self._looking: threading.Thread | None = None
        self._closed = threading.Event()

    def __getitem__(self, number: int) -> Arena:
        arena = self._arenas.get(number)
        if arena is None:
            raise ArenaGone(number)
        return arena

    def begin(self, number: int, copy: Callable[[Arena], Job]) -> Job:
        """@raises ArenaGone, also where it goes meanwhile"""
        try:
            return copy(self[number])
        except KvError as error:
            if error.code == "UNKNOWN" and number not in self._arenas:
                raise ArenaGone(number) from error
            raise

    def follow(self, wanted: Sequence[ArenaPlace]) -> None:
        """On threads: to populate a large mapping takes its time, and so does unmapping it. What is not wanted any more goes when its last
        copy ends."""
        ids = {place.id for place in wanted}
        with self._lock:
            left, self._left = self._left, []
            for arena in left:
                self._let_go(arena)
        for gone in [known for known in list(self._arenas) if known not in ids]:
            with self._lock:
                self._let_go(self._take(gone))
        for place in wanted:
            # Both are looked at in one go: a mapping that ends in between is in neither, and would be made twice.
            with self._lock:
                known = self._places.get(place.id)
                if known is not None:
                    if known.life != place.life:
                        self._announced_anew(place)
                elif place.id not in self._under_way:
                    thread = threading.Thread(target=self._map, args=(place,), name="kvtier-map", daemon=True)
                    try:
                        start(thread)
                    except OSError as error:
                        self._complain(error)
                        continue
                    self._under_way[place.id] = thread

    def adopt(self, device: int | None) -> list[int]:
        """Those that are mapped since the last call. ``device``: the GPU for which they are pinned; None: the CPU's memory."""
        with self._lock:
            new, self._new = self._new, []
        if device is not None:
            self._untold.update(new)
            if self._untold:
                self._tell_pinning(device)
        return new

    def close(self) -> None:
        self._closed.set()
        with self._lock:
            while self._watches:
                os.close(self._watches.popitem()[1])
        for thread in [*self._under_way.values(), *self._leaving]:
            thread.join(0.2)

    def _announced_anew(self, place: ArenaPlace) -> None:
        """The scheduler's half has mapped it once more, and perhaps cannot hold the byte now, or can by now. Under the lock."""
        if not place.session_byte:
            self._unwatch(place.id)
        elif place.id not in self._watches:
            try:
                self._look_on()
                self._watch(place.id, self._watched(place))
            except FileNotFoundError:
                self._let_go(self._take(place.id))  # it has ended, and an idle engine takes no step that would tell
                return
            except OSError as error:
                self._complain(error)  # it is announced in the next step, too
                return
        self._places[place.id] = place
        self._new.append(place.id)

    def _watched(self, place: ArenaPlace) -> int | None:
        """@raises FileNotFoundError where it has ended"""
        return watch(self._ref(place).within(self._folder).lock_path) if place.session_byte else None

    def _watch(self, number: int, fd: int | None) -> None:
        """Under the lock, and looked on."""
        if fd is not None:
            self._watches[number] = fd

    def _look_on(self) -> None:
        """Before something is watched. Under the lock. @raises OSError where the system has no thread for it now"""
        if self._looking is None:
            looking = threading.Thread(target=self._look, name="kvtier-arenas", daemon=True)
            start(looking)
            self._looking = looking

    def _unwatch(self, number: int) -> None:
        """Under the lock."""
        if (fd := self._watches.pop(number, None)) is not None:
            os.close(fd)

    def _take(self, number: int) -> Arena | None:
        """Nothing is begun with it any more. Under the lock."""
        self._places.pop(number, None)
        self._unwatch(number)
        if number in self._new:
            self._new.remove(number)
        return self._arenas.pop(number, None)

    def _let_go(self, arena: Arena | None) -> None:
        """Under the lock."""
        if arena is None:
            return
        thread = threading.Thread(target=self._unmap, args=(arena,), name="kvtier-unmap", daemon=True)
        try:
            start(thread)
        except OSError:
            self._left.append(arena)
        else:
            self._leaving = [*(one for one in self._leaving if one.is_alive()), thread]

    def _complain(self, error: Exception) -> None:
        if str(error) != self._complaint:
            self._complaint = str(error)
            log.warning("kvtier: a worker cannot map the arena (%s); it is tried again", error)

    def _unmap(self, arena: Arena | None) -> None:
        try:
            if arena is not None:
                arena.close()
        except Exception as error:
            log.warning("kvtier: a worker cannot unmap an arena that is gone (%s)", error)

    def _ref(self, place: ArenaPlace) -> ArenaRef:
        return ArenaRef(place.path, place.bytes, place.id, place.lock_byte)

    def _has_ended(self, place: ArenaPlace) -> bool:
        """The session that it was announced for. Under the lock. The scheduler's half keeps the byte, also of a node that has gone, as long
        as something that it has claimed is to be copied."""
        fd = self._watches.get(place.id)
        return fd is not None and place.session_byte != 0 and not is_held(fd, place.session_byte)

    def _map(self, place: ArenaPlace) -> None:
        fd = None
        try:
            fd = self._watched(place)
            if fd is None or is_held(fd, place.session_byte):
                if fd is not None:
                    with self._lock:
                        self._look_on()
                arena = self._copies().map(self._ref(place), self._folder)
                with self._lock:
                    self._arenas[place.id], self._places[place.id] = arena, place
                    watched, fd = fd, None
                    self._watch(place.id, watched)
                    self._new.append(place.id)
                    del self._under_way[place.id]
                return
        except FileNotFoundError:
            pass  # it has ended
        except Exception as error:
            self._complain(error)
        finally:
            if fd is not None:
                os.close(fd)
        time.sleep(_RETRY_S)
        with self._lock:
            self._under_way.pop(place.id, None)

    def _look(self) -> None:
        while not self._closed.wait(_LOOK_S):
            with self._lock:
                gone = [self._take(place.id) for place in list(self._places.values()) if self._has_ended(place)]
                left, self._left = self._left, []
            gone += left
            for arena in gone:
                self._unmap(arena)

    def _tell_pinning(self, device: int) -> None:
        for number in list(self._untold):
            arena = self._arenas.get(number)
            try:
                refusal = arena.refusal(device) if arena is not None else ""
            except KvError:
                arena, refusal = None, ""  # it went meanwhile
            if refusal is None:
                continue
            self._untold.remove(number)
            if refusal:
                log.warning("kvtier: the arena cannot be pinned for GPU %d (%s); copies go over a buffer, slower", device, refusal)
            elif arena is not None:
                log.info("kvtier: %d MiB of the arena are pinned for GPU %d", arena.ref.bytes >> 20, device)
