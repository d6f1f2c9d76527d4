"""KV hints: what an orchestrator that is trusted says of a request's blocks, in the envelope that engines and routers share:

    {"protocol_version": "0.1", "message_id": ..., "actions": [{"action_id": ..., "action_type": "kv.pin", "action_version": "1.0",
                                                              "payload": {"ttl_ms": 60000}}]}

Of a request that has `kv_hints`, or `kv_hints` or `kv_hint` in its `kv_transfer_params`. Invariants: nothing is heeded unless the operator
says that who sends requests may hint; what is not known is ignored and counted; nothing here raises.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

MAX_ACTIONS = 16
#: Done without being asked: every request is looked up and loaded as soon as it comes.
_ALREADY = frozenset({"kv.prefetch", "kv.fetch"})
#: Keep its blocks: for `ttl_ms`; without one, to retain means as long as may be.
_KEEPS = frozenset({"kv.pin", "kv.retain"})


@dataclass(frozen=True)
class Hints:
    #: Its blocks stay so long after it has ended; 0: as long as others.
    pin_s: float = 0.0
    #: Actions by what became of them: done without being asked, to be pinned as they say, to be pinned more shortly, none of these.
    done: int = 0
    pinned: int = 0
    clipped: int = 0
    ignored: int = 0

    def outcomes(self, kept: bool) -> dict[str, int]:
        """`kept`: its blocks were pinned."""
        if kept:
            return {"done": self.done + self.pinned, "clipped": self.clipped, "ignored": self.ignored}
        return {"done": self.done, "clipped": 0, "ignored": self.ignored + self.pinned + self.clipped}


def of(request: Any, most_pin_s: float) -> Hints:
    """`most_pin_s`: longer pins are clipped to it."""
    params = getattr(request, "kv_transfer_params", None)
    said = getattr(request, "kv_hints", None)
    if said is None and isinstance(params, Mapping):
        said = params.get("kv_hints", params.get("kv_hint"))
    if said is None:
        return Hints()
    actions = said.get("actions") if isinstance(said, Mapping) else None
    version = str(said.get("protocol_version", "")) if isinstance(said, Mapping) else ""
    if not isinstance(actions, (list, tuple)) or not version.startswith("0."):
        return Hints(ignored=1)
    pin_s, counts = 0.0, {"done": 0, "pinned": 0, "clipped": 0, "ignored": max(0, len(actions) - MAX_ACTIONS)}
    for action in actions[:MAX_ACTIONS]:
        kind = action.get("action_type") if isinstance(action, Mapping) else None
        outcome = "done" if isinstance(kind, str) and kind in _ALREADY else "ignored"
        ttl_s = _ttl_s(action, kind, most_pin_s) if isinstance(kind, str) and kind in _KEEPS else None
        if ttl_s is not None:
            pin_s = max(pin_s, min(ttl_s, most_pin_s))
            outcome = "clipped" if ttl_s > most_pin_s else "pinned"
        counts[outcome] += 1
    return Hints(pin_s, **counts)


def _ttl_s(action: Mapping[str, Any], kind: str, most_s: float) -> float | None:
    payload = action.get("payload")
    ttl = payload.get("ttl_ms") if isinstance(payload, Mapping) else None
    if ttl is None and kind == "kv.retain":
        return most_s
    sound = isinstance(ttl, (int, float)) and not isinstance(ttl, bool) and 0 < ttl < 1e12
    return ttl / 1e3 if sound and ttl is not None else None
