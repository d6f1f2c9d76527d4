"""Blocks that are held for stores, when the engine resets its own prefix cache: it does so only where no block is in use, and may take
no step more, nor keep the memory.

     reset ──► offers that are not planned are dropped
               planned ones: their copies are waited for, where the workers are of this process ──► let go; what was copied is still stored
                             elsewhere, or late ──► held until it is told: the engine says that it could not reset

Invariant: no block is let go that something is still copied from.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from typing import Any, Protocol
from weakref import WeakValueDictionary

from kvtier.vllm.guard import Troubles
from kvtier.vllm.messages import KvtierHandshake, Rank
from kvtier.vllm.storing import Stores

#: A reset waits so long for copies.
WAIT_S = 2.0


class _Copier(Protocol):
    def has_copied(self, number: int, share: int, until: float) -> bool: ...


_workers: WeakValueDictionary[str, _Copier] = WeakValueDictionary()


def place_of(worker: _Copier) -> str:
    """By which a scheduler's half finds this worker's, if both are of one process."""
    place = os.urandom(16).hex()
    _workers[place] = worker
    return place


class Resets:
    def __init__(self, troubles: Troubles) -> None:
        self._troubles = troubles
        self._places: dict[Rank, str] = {}

    def hear(self, told: Mapping[Rank, KvtierHandshake]) -> None:
        self._places = {rank: one.place for rank, one in told.items()}

    def bind(self, pool: Any, stores: Stores) -> None:
        reset = getattr(pool, "reset_prefix_cache", None)
        if reset is None:
            return

        def reset_prefix_cache(*args: Any, **kwargs: Any) -> Any:
            self._let_go(stores)
            return reset(*args, **kwargs)

        pool.reset_prefix_cache = reset_prefix_cache

    def _let_go(self, stores: Stores) -> None:
        try:
            stores.drop_unplanned()
            until = time.monotonic() + WAIT_S
            stores.let_go_copied(lambda number, share, rank: self._copied(number, share, rank, until))
        except Exception as error:
            self._troubles.note("reset_prefix_cache", error)

    def _copied(self, number: int, share: int, rank: Rank, until: float) -> bool:
        worker = _workers.get(self._places.get(rank, ""))
        return worker is not None and worker.has_copied(number, share, until)
