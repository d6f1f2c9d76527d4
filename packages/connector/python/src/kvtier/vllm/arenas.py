"""The arenas that a worker has mapped: the node's, and while it changes the one before.

     announced with a step ──► mapped by a thread ──► adopted in a later step, told once ──► not announced any more: closed, by another
                                   └─ failed: one line, tried again
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence

from kvtier.copies import Arena, ArenaRef, Copies
from kvtier.vllm.messages import ArenaPlace

log = logging.getLogger("kvtier.vllm")

#: A mapping that failed is tried again after this, at the next step.
_RETRY_S = 0.5


class Arenas:
    """All but mapping and unmapping themselves is of the engine's loop."""

    def __init__(self, copies: Callable[[], Copies], folder: str | None) -> None:
        """``folder``: where this process sees that of the node's arena."""
        self._copies = copies
        self._folder = folder
        self._arenas: dict[int, Arena] = {}
        #: Whose mapping is under way or has failed, by id.
        self._under_way: dict[int, threading.Thread] = {}
        self._new: dict[int, Arena] = {}
        #: Of which it was not told yet whether they are pinned.
        self._untold: set[int] = set()
        #: What is being unmapped.
        self._leaving: list[threading.Thread] = []
        self._lock = threading.Lock()
        self._complaint = ""

    def __getitem__(self, number: int) -> Arena:
        return self._arenas[number]

    def follow(self, wanted: Sequence[ArenaPlace]) -> None:
        """On threads: to populate a large mapping takes its time, and so does unmapping it. What is not wanted any more goes when its last
        copy ends."""
        ids = {place.id for place in wanted}
        for gone in [known for known in self._arenas if known not in ids]:
            thread = threading.Thread(target=self._unmap, args=(self._arenas.pop(gone),), name="kvtier-unmap", daemon=True)
            self._leaving = [*(one for one in self._leaving if one.is_alive()), thread]
            thread.start()
        for place in wanted:
            if place.id in self._arenas or place.id in self._under_way:
                continue
            thread = threading.Thread(target=self._map, args=(place,), name="kvtier-map", daemon=True)
            self._under_way[place.id] = thread
            thread.start()

    def adopt(self, device: int | None) -> list[int]:
        """Those that are mapped since the last call. ``device``: the GPU for which they are pinned; None: the CPU's memory."""
        with self._lock:
            new, self._new = self._new, {}
        self._arenas.update(new)
        for number in new:
            self._under_way.pop(number, None)
        if device is not None:
            self._untold.update(new)
            if self._untold:
                self._tell_pinning(device)
        return list(new)

    def close(self) -> None:
        for thread in [*self._under_way.values(), *self._leaving]:
            thread.join(0.2)

    def _unmap(self, arena: Arena) -> None:
        try:
            arena.close()
        except Exception as error:
            log.warning("kvtier: a worker cannot unmap an arena that is gone (%s)", error)

    def _map(self, place: ArenaPlace) -> None:
        try:
            arena = self._copies().map(ArenaRef(place.path, place.bytes, place.id, place.lock_byte), self._folder)
            with self._lock:
                self._new[place.id] = arena
        except Exception as error:
            if str(error) != self._complaint:
                self._complaint = str(error)
                log.warning("kvtier: a worker cannot map the arena (%s); it is tried again", error)
            time.sleep(_RETRY_S)
            self._under_way.pop(place.id, None)

    def _tell_pinning(self, device: int) -> None:
        for number in list(self._untold):
            arena = self._arenas.get(number)
            refusal = arena.refusal(device) if arena is not None else ""
            if refusal is None:
                continue
            self._untold.remove(number)
            if refusal:
                log.warning("kvtier: the arena cannot be pinned for GPU %d (%s); copies go over a buffer, slower", device, refusal)
            elif arena is not None:
                log.info("kvtier: %d MiB of the arena are pinned for GPU %d", arena.ref.bytes >> 20, device)
