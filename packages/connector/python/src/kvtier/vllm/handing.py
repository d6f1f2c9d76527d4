"""Prefill and decode in different pods, at the end of a request: what is promised and pinned for another pod, and what another pod pinned
for this one is let go.

     prefill pod: finished ──► pins, promise with a ticket ──► router ──► decode pod: all ranks through, or the request gone
                                  ▲                                          │
                                  └──────── the node, or its peer ◄── ticket ┘

Invariants: a ticket is shown once; nothing here waits. A ticket that is never shown costs the pin's time.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from kvtier.vllm import promises
from kvtier.vllm.groups import Group, align_tokens
from kvtier.vllm.known import Known
from kvtier.vllm.lookups import chains_of, hashes_of
from kvtier.vllm.node import Attached, Node
from kvtier.vllm.options import Options
from kvtier.vllm.wrapping import wrappers


class Handing:
    def __init__(
        self, options: Options, vllm_config: Any, groups: Sequence[Group], hash_tokens: int, node: Node, counters: dict[str, int]
    ) -> None:
        self._options = options
        self._groups = groups
        self._align = align_tokens(groups)
        self._hash_tokens = hash_tokens
        self._node = node
        self._counters = counters
        self._engine_id = str(getattr(vllm_config.kv_transfer_config, "engine_id", "") or "")
        self._tensor_ranks = int(vllm_config.parallel_config.tensor_parallel_size)
        #: vLLM's MultiConnector ends the engine where two of its connectors answer by the same keys: NIXL's are left to NIXL.
        self._only_ours = bool(wrappers())

    def promise(self, known: Known, request: Any, attached: Attached, covered_tokens: int) -> dict[str, Any] | None:
        """What was computed for another pod: pinned, and told in the answer. Of what was aborted there is nothing to tell.

        `covered_tokens`: of its prefix, what the node holds or was offered: for more the other pod would wait in vain.
        """
        if str(getattr(request, "status", "")).endswith("ABORTED"):
            return None
        if not known.stores or not promises.wanted(getattr(request, "kv_transfer_params", None)):
            return None
        tokens = min(covered_tokens, len(known.hashes) * self._hash_tokens) // self._align * self._align
        if tokens <= 0:
            return None
        ticket = b""
        if self._options.pin_ms:
            ticket = os.urandom(promises.TICKET_BYTES)
            self._node.pin(attached, chains_of(known.hashes, self._groups, tokens), self._options.pin_ms / 1e3, ticket)
        namespace = promises.namespace_of([share.namespace for share in attached.shares])
        node = attached.attachments[0].boot_epoch
        promise = promises.Promise(namespace, tokens, known.hashes[tokens // self._hash_tokens - 1].hex(), ticket, node)
        return promises.answer(
            promise,
            engine=self._engine_id,
            request=known.name,
            groups=len(self._groups),
            tensor_ranks=self._tensor_ranks,
            only_ours=self._only_ours,
        )

    def let_go(self, known: Known, attached: Attached | None) -> None:
        """It has what was pinned for it, or will never want it."""
        promise, known.pinned = known.pinned, None
        if promise is None or attached is None:
            return
        if promises.namespace_of([share.namespace for share in attached.shares]) != promise.namespace:
            return
        for share, session in zip(attached.shares, attached.sessions):
            end = promise.tokens // share.group.block_tokens
            session.end_pin(promise.ticket, hashes_of(known.hashes, share.group, end - 1, end) if end else b"")
        self._counters["pins_ended"] = self._counters.get("pins_ended", 0) + 1
