"""Prefill and decode in different pods: what the one promises in `kv_transfer_params`, and the other waits for.

The decode pod computes the same block names from the same tokens, so nothing of the prefill pod is needed but when: its answer may come
before its last block is committed. The promise says up to where and under which names; whoever has other names ignores it, and a promise
that is not kept is a miss after its deadline. Its blocks are pinned until their time is over, or until the
decode pod shows the ticket. The keys of NIXL's exchange are filled beside it, harmlessly: proxies copy the dict, and
some look for them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

KEY = "kvtier"
TICKET_BYTES = 16
NODE_BYTES = 8


@dataclass(frozen=True)
class Promise:
    #: Digest over the namespaces of all shares.
    namespace: str
    tokens: int
    #: Name of the last block, hex.
    last_hash: str
    #: By which its pins are ended before their time; empty: it has none.
    ticket: bytes = b""
    #: Boot epoch of the node that has them, by which another one knows whether they can come from there; None: it is not said.
    node: int | None = None


def namespace_of(namespaces: Sequence[bytes]) -> str:
    return hashlib.sha256(b"".join(namespaces)).hexdigest()


def hints_of(params: Any) -> Mapping[str, Any]:
    """What a request says to this connector; users may say anything."""
    said = params.get(KEY) if isinstance(params, Mapping) else None
    return said if isinstance(said, Mapping) else {}


def wanted(params: Any) -> bool:
    """This request is computed for another pod."""
    return isinstance(params, Mapping) and params.get("do_remote_decode") is True


def read(params: Any) -> Promise | None:
    """What came with a request is a stranger's: None for whatever is not a promise."""
    said = hints_of(params)
    # Without NIXL's keys it was made beside another connector.
    if not said or params.get("do_remote_prefill", True) is not True or wanted(params):
        return None
    namespace, tokens, last = said.get("namespace"), said.get("tokens"), said.get("last_hash")
    if not isinstance(tokens, int) or isinstance(tokens, bool) or not 0 < tokens < 1 << 32:
        return None
    if not isinstance(namespace, str) or not isinstance(last, str) or len(namespace) != 64 or len(last) > 128:
        return None
    return Promise(namespace, tokens, last, _ticket(said.get("ticket")), _node(said.get("node")))


def _ticket(said: Any) -> bytes:
    try:
        return bytes.fromhex(said) if isinstance(said, str) and len(said) == 2 * TICKET_BYTES else b""
    except ValueError:
        return b""


def _node(said: Any) -> int | None:
    try:
        return int.from_bytes(bytes.fromhex(said), "big") if isinstance(said, str) and len(said) == 2 * NODE_BYTES else None
    except ValueError:
        return None


def answer(promise: Promise, *, engine: str, request: str, groups: int, tensor_ranks: int, only_ours: bool = False) -> dict[str, Any]:
    """The response's `kv_transfer_params`, for the router to hand on as they are. `only_ours`: without NIXL's keys."""
    ours = {"namespace": promise.namespace, "tokens": promise.tokens, "last_hash": promise.last_hash}
    if promise.ticket:
        ours["ticket"] = promise.ticket.hex()
    if promise.node is not None:
        ours["node"] = promise.node.to_bytes(NODE_BYTES, "big").hex()
    if only_ours:
        return {KEY: ours}
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_engine_id": engine,
        "remote_block_ids": [[] for _ in range(groups)],
        "remote_request_id": request,
        "remote_host": "127.0.0.1",
        "remote_port": 0,
        "tp_size": tensor_ranks,
        "remote_num_tokens": promise.tokens,
        "remote_blocks_expiry_time": None,
        "transfer_mode": "pull",
        KEY: ours,
    }
