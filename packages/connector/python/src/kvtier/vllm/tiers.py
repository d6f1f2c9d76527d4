"""What the node says of its tiers, for vLLM's metrics: asked beside serving now and then, taken by the engine's loop.

Invariant: what is taken is new. A node that has not answered for a while is said to be out of service, tier by tier, and so is a tier that
it does not name any more; their other figures stay what was said last.
"""

from __future__ import annotations

import threading
import time
from typing import Any

from kvtier.requests import Request, TierState
from kvtier.session import Session

_EVERY_S = 5.0
#: Two answers did not come.
_SILENT_S = 12.0

#: Figures of one tier.
Figures = dict[str, int]
#: What is told of each tier, as docs/metrics.md has it: `kvtier_tier_` + name.
TIER_FIGURES: dict[str, str] = {
    "blocks": "blocks that a tier of the cache node holds",
    "bytes": "bytes that a tier of the cache node holds",
    "capacity_bytes": "the budget of a tier of the cache node",
    "hits": "blocks of lookups that a tier of the cache node held, and no faster one",
    "misses": "blocks of lookups that neither a tier of the cache node nor a faster one gave",
    "evictions": "blocks that left a tier of the cache node to make room",
    "corrupt": "objects of a tier of the cache node whose bytes did not match",
    "in_service": "0 where a tier of the cache node broke, or the node does not answer",
}


class Tiers:
    """`keep` is of the node's thread, `take` of the engine's loop."""

    def __init__(self) -> None:
        self._asked: Request[dict[str, TierState]] | None = None
        self._ask_at = 0.0
        self._heard_at = 0.0
        #: Tiers that were said to be in service.
        self._serving: set[str] = set()
        self._fresh: dict[str, Figures] = {}
        self._lock = threading.Lock()

    def keep(self, session: Session | None) -> None:
        """`session`: one to ask; None: there is none now."""
        now = time.monotonic()
        asked = self._asked
        if asked is not None and asked.done:
            self._asked = None
            if asked.error is None and asked.value is not None:
                self._heard_at = now
                self._hear(asked.value)
        if self._serving and now - self._heard_at > _SILENT_S:
            self._hear({})
        if self._asked is None and session is not None and now >= self._ask_at:
            self._ask_at = now + _EVERY_S
            self._asked = session.tiers()

    def take(self) -> dict[str, Figures]:
        if not self._fresh:
            return {}
        with self._lock:
            fresh, self._fresh = self._fresh, {}
        return fresh

    def _hear(self, told: dict[str, TierState]) -> None:
        serving = {tier for tier, state in told.items() if state.in_service}
        news: dict[str, Figures] = {tier: {"in_service": 0} for tier in self._serving - told.keys()}
        news.update((tier, {name: int(getattr(state, name)) for name in TIER_FIGURES}) for tier, state in told.items())
        self._serving = serving
        with self._lock:
            for tier, figures in news.items():
                self._fresh.setdefault(tier, {}).update(figures)


def tiers_of(data: dict[str, Any]) -> dict[str, Figures]:
    """Of the data of statistics, which come from another process."""
    found = data.get("tiers")
    return found if isinstance(found, dict) else {}
