"""`kv_connector_extra_config`, validated: what is not known is refused at the start, in one line."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvtier.options import BadOptions as BadOptions
from kvtier.options import parsed


@dataclass(frozen=True)
class Options:
    socket: str
    #: Where this container sees the folder that the node calls its arena's; "": at the same place.
    arena_dir: str = ""
    #: The node may be of another user, if its socket's folder is of this group, by name or number; "": only of our own, or root.
    group: str = ""
    tenant: str = ""
    #: Blocks are removed so long after they were stored; 0: never.
    ttl_seconds: int = 0
    #: Also of requests without a hit: how long the engine's loop may stand for an answer of the node.
    patience_us: int = 1_000
    #: A lookup may take so long, or a quarter of what computing the prompt takes, where that is longer.
    lookup_deadline_ms: int = 50
    #: A load that takes longer ends; what came until then is not used.
    load_deadline_ms: int = 2_000
    #: Deadlines follow what the engine computes in that time, and what the node says is slower than that is computed.
    plan_loads: bool = True
    #: What is leased for a request that is not admitted is let go after this.
    lease_ms: int = 10_000
    #: Shorter hits are computed.
    min_load_tokens: int = 0
    #: Of the engine's blocks, how many may be held for stores at a time.
    held_blocks_share: float = 0.2
    #: Threads of a worker that copy, each way.
    copy_threads: int = 2
    load: bool = True
    store: bool = True
    #: What was stored before the engine reset its connector's cache (sleep and pauses do) may be loaded after it. False: it may be another
    #: model's.
    keep_on_reset: bool = False
    #: Requests with images and the like: their hashes are the engine's own, but users may choose them (multi_modal_uuids).
    multimodal: bool = True
    #: 64 hex digits that stand for the weights instead of their content.
    weights_digest: str = ""
    #: A folder, or a file of this name, where digests of weights are kept between starts; "": `kvtier.weights.default_cache_path`.
    weights_cache: str = ""
    #: Further minor versions of vLLM, "0.31": whoever names them has tried them.
    accept_versions: tuple[str, ...] = ()
    #: A promise of another pod's prefill is waited for so long at most.
    promise_deadline_ms: int = 10_000
    #: What was promised to another pod stays so long in the node.
    pin_ms: int = 30_000
    #: Who sends requests may hint (`kv_hints`), and keep blocks for so long at most; 0: hints are ignored.
    hint_pin_ms: int = 0


_NUMBERS: dict[str, tuple[float, float]] = {
    "ttl_seconds": (0, 10**9),
    "patience_us": (0, 20_000),
    "lookup_deadline_ms": (1, 5_000),
    "load_deadline_ms": (1, 60_000),
    "lease_ms": (100, 600_000),
    "min_load_tokens": (0, 10**9),
    "held_blocks_share": (0.001, 0.5),
    "copy_threads": (1, 64),
    "promise_deadline_ms": (1, 120_000),
    "pin_ms": (0, 600_000),
    "hint_pin_ms": (0, 86_400_000),
}


def parse(extra: Mapping[str, Any] | None) -> Options:
    return parsed(Options, extra or {}, _NUMBERS, "kv_connector_extra_config", "0.31")
