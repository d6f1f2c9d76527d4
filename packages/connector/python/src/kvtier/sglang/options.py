"""The key `kvtier` of `--hicache-storage-backend-extra-config`, validated: what is not known is refused at the start, in one line."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvtier.options import BadOptions, parsed

_WHERE = 'hicache-storage-backend-extra-config, "kvtier"'


@dataclass(frozen=True)
class Options:
    socket: str
    #: Where this container sees the folder that the node calls its arena's; "": at the same place.
    arena_dir: str = ""
    #: The node may be of another user, if its socket's folder is of this group, by name or number; "": only of our own, or root.
    group: str = ""
    tenant: str = ""
    #: Pages are removed so long after they were stored; 0: never.
    ttl_seconds: int = 0
    #: A lookup that takes longer is a miss.
    lookup_deadline_ms: int = 50
    #: What a batch of pages did not bring by then is a miss.
    load_deadline_ms: int = 2_000
    #: What a batch of pages could not store by then is not stored.
    store_deadline_ms: int = 2_000
    #: Of one reserve or load: longer batches go piece by piece.
    piece_bytes: int = 64 << 20
    #: Threads that copy, each way.
    copy_threads: int = 2
    load: bool = True
    store: bool = True
    #: What SGLang flushes stays in the node and may be loaded again. False: a flush may have been for other weights.
    keep_on_flush: bool = False
    #: 64 hex digits that stand for the weights instead of their content.
    weights_digest: str = ""
    #: A folder, or a file of this name, where digests of weights are kept between starts; "": `kvtier.weights.default_cache_path`.
    weights_cache: str = ""
    #: Further versions of SGLang, "0.6": whoever names them has tried them.
    accept_versions: tuple[str, ...] = ()


_NUMBERS: dict[str, tuple[int, int]] = {
    "ttl_seconds": (0, 10**9),
    "lookup_deadline_ms": (1, 5_000),
    "load_deadline_ms": (1, 60_000),
    "store_deadline_ms": (1, 60_000),
    "piece_bytes": (1 << 20, 1 << 30),
    "copy_threads": (1, 64),
}


def parse(extra_config: Mapping[str, Any] | None) -> Options:
    given = (extra_config or {}).get("kvtier")
    if not isinstance(given, Mapping):
        raise BadOptions(f'{_WHERE} is missing: an object such as {{"socket": "/run/kvtier/node.sock"}}')
    return parsed(Options, given, _NUMBERS, _WHERE, "0.6")
