"""The scheduler's half: one object that hears the engine's calls. All of it is called from the engine's one loop and polls; what takes
time happens on the sessions' threads and in native code.

    a request comes ──► what may be claimed of it (claims.py)       each step ──► plans for the workers, their results
    a request goes  ──► promised to another pod (handing.py)        filled blocks are offered (filled.py, storing.py)

Invariant: whatever is leased or held ends with its request.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Collection
from typing import Any

from kvtier.vllm import hints, identity, processors, promises
from kvtier.vllm.claims import Claims, failed_plan
from kvtier.vllm.filled import Filled
from kvtier.vllm.groups import Group, Unsupported, align_tokens, groups_of
from kvtier.vllm.guard import Troubles
from kvtier.vllm.handing import Handing
from kvtier.vllm.handshakes import Handshakes
from kvtier.vllm.known import Known
from kvtier.vllm.lookups import chains_of
from kvtier.vllm.messages import KvtierHandshake, KvtierMetadata, KvtierWorkerMetadata, Rank
from kvtier.vllm.node import Attached, Node
from kvtier.vllm.options import Options
from kvtier.vllm.resets import Resets
from kvtier.vllm.standing import SPARE_PATIENCES
from kvtier.vllm.storing import Holder, Stores
from kvtier.vllm.tiers import Figures

log = logging.getLogger("kvtier.vllm")

#: Requests that are known; the engine's own queue is what is long.
MAX_REQUESTS = 65_536


class SchedulerHalf:
    def __init__(self, options: Options, vllm_config: Any, kv_cache_config: Any, troubles: Troubles) -> None:
        self.counters: dict[str, int] = {}
        self.options = options
        self.refusal = ""
        self._troubles = troubles
        self._requests: dict[str, Known] = {}
        self._stores: Stores | None = None
        self._resets = Resets(troubles)
        self._filled: Filled | None = None
        self._groups: tuple[Group, ...] = ()
        self._node: Node | None = None
        self._claims: Claims | None = None
        self._expire_at = 0.0
        #: Of earlier steps.
        self._unheard: KvtierWorkerMetadata | None = None
        #: Requests of the last step that computed: it may still be under way.
        self._computed: Collection[str] = ()
        self._handing: Handing | None = None
        self._media = False
        self._handshakes = Handshakes(vllm_config, self._begin)
        try:
            identity.check_supported(vllm_config)
            _, self._hash_tokens = identity.block_sizes(vllm_config, kv_cache_config)
            self._groups = self._claimed(groups_of(kv_cache_config, self._hash_tokens, identity.uses_eagle(vllm_config)))
            self._align = align_tokens(self._groups)
            self._node = Node(options, vllm_config, self._groups, troubles)
            self._claims = Claims(options, self._groups, self._hash_tokens, self._node, self.counters)
            self._handing = Handing(options, vllm_config, self._groups, self._hash_tokens, self._node, self.counters)
            self._media = options.multimodal and processors.can_be_named(vllm_config)
        except Unsupported as error:
            self.refusal = str(error)
            log.warning("kvtier: nothing is loaded or stored in this engine: %s", error)

    # ---- start ------------------------------------------------------------------------------------------------------

    def _claimed(self, groups: tuple[Group, ...]) -> tuple[Group, ...]:
        return groups  # as hits are claimed of them

    def bind_pool(self, pool: Any) -> None:
        if self._node is not None:
            self._stores = Stores(Holder(pool, self.options.held_blocks_share), self.counters)
            self._filled = Filled(self._groups, self._hash_tokens, self._stores)
            self._resets.bind(pool, self._stores)

    def handshake(self, told: dict[Rank, Any]) -> None:
        """What the engine gives as the workers' may be another connector's."""
        self._handshakes.given(told)

    def _begin(self, told: dict[Rank, KvtierHandshake]) -> None:
        self._resets.hear(told)
        if self._node is not None:
            self._node.begin(told)

    # ---- a request comes --------------------------------------------------------------------------------------------

    def new_request(self, request: Any) -> None:
        if self._claims is None or len(self._requests) >= MAX_REQUESTS or request.request_id in self._requests:
            return
        known = self._known(request)
        self._requests[request.request_id] = known
        if known.loads:
            self._claims.look_up(known)

    def _known(self, request: Any) -> Known:
        params = getattr(request, "kv_transfer_params", None)
        said, promise = promises.hints_of(params), promises.read(params)
        images = bool(getattr(request, "mm_features", None))
        usable = getattr(request, "lora_request", None) is None and (not images or self._media)
        # A streaming session drops the last token of each answer, and keeps the hashes that it was part of: they name other tokens.
        usable = usable and not getattr(request, "resumable", False)
        reads = usable and self.options.load and said.get("load", True) is not False
        plain = not images and not getattr(request, "cache_salt", None) and getattr(request, "prompt_embeds", None) is None
        return Known(
            name=request.request_id,
            hashes=request.block_hashes,
            loads=reads and not getattr(request, "skip_reading_prefix_cache", False),
            stores=usable and self.options.store and said.get("store", True) is not False,
            tokens=getattr(request, "all_token_ids", None) if plain else None,
            promise=promise,
            pinned=promise if promise is not None and promise.ticket else None,
            tables=[[] for _ in self._groups],
            bases=[0] * len(self._groups),
            offered=[0] * len(self._groups),
            prompt_tokens=len(request.block_hashes) * self._hash_tokens,
        )

    def matched(self, request: Any, local_tokens: int) -> tuple[int | None, bool]:
        known = self._requests.get(request.request_id)
        if known is None:
            self.new_request(request)
            known = self._requests.get(request.request_id)
        if known is not None:
            known.local_tokens = local_tokens
        claims = self._claims
        if known is None or claims is None or not known.loads or known.denied or self._troubles.stopped:
            return 0, False
        claims.standing.alone = len(self._requests) == 1
        return claims.matched(known, request, local_tokens)

    def allocated(self, request: Any, blocks: Any, external_tokens: int) -> None:
        known = self._requests.get(request.request_id)
        if known is not None and self._claims is not None:
            # What a load is to bring counts as computed from here on, also another connector's: it is there when a step goes on from it.
            known.followed = 0
            self._claims.allocated(known, blocks, external_tokens)

    # ---- each step --------------------------------------------------------------------------------------------------

    def metadata(self, output: Any) -> KvtierMetadata:
        node, claims = self._node, self._claims
        if node is None or claims is None:
            return KvtierMetadata()
        planned = KvtierMetadata(list(node.places), claims.take_plans(), asks=self._handshakes.asks())
        followed = False
        try:
            if self._stores is not None:
                planned.stores = self._stores.plans()
            if output.total_num_scheduled_tokens:
                self._computed = output.num_scheduled_tokens
            elif not any(name in self._requests for name in self._computed):
                alone = len(self._requests) == 1
                planned.idle_s = (1 + SPARE_PATIENCES * alone) * self.options.patience_us / 1e6
            self._follow(output)
            followed = True
            now = time.monotonic()
            if self.options.plan_loads:
                claims.pace.step(int(output.total_num_scheduled_tokens), bool(output.scheduled_cached_reqs.req_ids), now)
            if now > self._expire_at:
                self._expire_at = now + 0.5
                claims.expire(self._requests.values(), now)
        except Exception as error:
            # Loads that were promised go out all the same.
            self._troubles.note("build_connector_meta", error)
            if not followed:
                self._lose_tables()
        return planned

    def loads(self) -> KvtierMetadata:
        """Where a step's plan went wrong: the loads that requests wait for. Where no other comes, nothing that was offered is copied."""
        try:
            self._lose_tables()
            if self._troubles.stopped and self._stores is not None:
                self._stores.drop_unplanned()
        except Exception as error:
            self._troubles.note("build_connector_meta", error)
        arenas = list(self._node.places) if self._node is not None else []
        return KvtierMetadata(arenas, self._claims.take_plans() if self._claims is not None else [])

    def fail_load(self, name: str, blocks: Any) -> None:
        """The request waits for a load that was not planned: it ends, and is computed."""
        claims, known = self._claims, self._requests.get(name)
        if claims is None or any(plan.request_id == name for plan in claims.planned):
            return
        failed = blocks.get_block_ids()
        if known is not None:
            known.denied = "plan"
            claims.leave(known)
            failed = known.behind_local(failed, self._groups)
        claims.planned.append(failed_plan(claims.number(), name, failed))

    def _follow(self, output: Any) -> None:
        if self._filled is not None:
            self._filled.follow(output, self._requests, self._offered_to())

    def _lose_tables(self) -> None:
        """Blocks of this step were not heard of: later ones would take their places, and be stored by their names."""
        for known in self._requests.values():
            known.lost = True

    def _offered_to(self) -> Attached | None:
        return self._node.attached() if self._node is not None and not self._troubles.stopped else None

    def hear(self, told: KvtierWorkerMetadata | None, failed: Collection[int] = ()) -> None:
        """What workers said; what a fault kept from being heard is told again: leases and held blocks end with it.

        `failed`: blocks that no load filled, of whatever connector.
        """
        is_foreign = bool(failed) and not set(failed) <= (told.failed if told is not None else set())
        if self._unheard is not None:
            told = self._unheard if told is None else self._unheard.aggregate(told)
        self._unheard = told
        if is_foreign:
            self._mistrust()  # before what it spoils is committed
        if told is not None:
            self.worker_output(told)
        self._unheard = None

    def _mistrust(self) -> None:
        """Another connector said that it had filled blocks, and had not: steps may have computed from them. Of ours, nobody computes before
        they are there."""
        if self._stores is not None:
            self._stores.spoil()
        for known in self._requests.values():
            known.offered = [0] * len(self._groups)
            known.next_tokens = 0

    def worker_output(self, told: KvtierWorkerMetadata) -> None:
        if self._node is None or self._claims is None:
            return
        self._handshakes.heard(told.handshakes)
        self._node.mapped(told.mapped)
        for name, is_bad in self._claims.through(told):
            known = self._requests.get(name)
            if known is not None and self._handing is not None:
                self._handing.let_go(known, self._offered_to())
            if known is not None and is_bad:
                known.denied = "corrupt"
                # What was bad is stored again, once it is computed.
                known.offered = [0] * len(self._groups)
        if self._stores is not None and told.stored:
            self._stores.copied(told.stored)

    # ---- a request goes ---------------------------------------------------------------------------------------------

    def finished(self, request: Any, block_ids: Any) -> dict[str, Any] | None:
        known = self._requests.pop(request.request_id, None)
        if known is None or self._claims is None:
            return None
        self._claims.leave(known)
        attached = self._offered_to()
        if self._handing is not None:
            self._handing.let_go(known, attached)
        if attached is None or self._filled is None or self._handing is None:
            return None
        known.table_of(block_ids)
        computed = min(int(request.num_computed_tokens), known.followed)
        self._filled.ended(known, computed, attached)
        self._heed(known, request, attached)
        return self._handing.promise(known, request, attached, self._filled.covered(known, computed))

    def _heed(self, known: Known, request: Any, attached: Attached) -> None:
        if not self.options.hint_pin_ms or not known.stores:
            return
        said = hints.of(request, self.options.hint_pin_ms / 1e3)
        computed = min(int(request.num_computed_tokens), len(known.hashes) * self._hash_tokens) // self._align * self._align
        kept = said.pin_s > 0 and computed > 0 and self._node is not None
        if kept and self._node is not None:
            kept = self._node.pin(attached, chains_of(known.hashes, self._groups, computed), said.pin_s)
        for outcome, count in said.outcomes(kept).items():
            self._add(f"hints_{outcome}", count)

    def gone(self, name: str) -> None:
        known = self._requests.pop(name, None)
        if known is not None and self._claims is not None and self._handing is not None:
            self._claims.leave(known)
            self._handing.let_go(known, self._offered_to())

    # ---- the rest ---------------------------------------------------------------------------------------------------

    @property
    def wants_steps(self) -> bool:
        """Something ends only in a step: stores that hold blocks, a new arena that workers have not mapped."""
        if self._stores is not None and self._stores.pending:
            return True
        planned = self._claims is not None and bool(self._claims.planned)
        return planned or (self._node is not None and (self._handshakes.wants_steps or self._node.wants_steps()))

    @property
    def frees_soon(self) -> bool:
        """Blocks that stores hold become free by themselves: who has none left need preempt nobody for them."""
        return self._stores is not None and self._stores.frees_soon()

    def reset(self) -> bool:
        """Other weights from now on, for all that is known: nothing that is stored is this model's any more, nor what is computed half with
        the old ones."""
        if self._node is None or self._claims is None or self.options.keep_on_reset:
            return True
        for known in self._requests.values():
            self._claims.leave(known)
            known.lookups = None
            known.denied = "reset"
            known.stores = False
        if self._stores is not None:
            self._stores.drop_unplanned()
        self._node.renew(os.urandom(16))
        log.warning(
            "kvtier: the engine has reset its caches (sleep and pauses do, too): nothing that was stored before is loaded by it until it "
            'starts again, nor is what it stores now by others; where weights are never replaced, say "keep_on_reset": true'
        )
        return True

    def counted(self) -> dict[str, int]:
        """All that was counted, since the start."""
        unknown = self._node.unknown_answers if self._node is not None else 0
        return {**self.counters, "unknown_answers": unknown}

    @property
    def attached(self) -> bool:
        """There is a node that answers, all ranks have mapped its arena, and nothing of ours has given up."""
        return self._offered_to() is not None

    def tiers(self) -> dict[str, Figures]:
        """What is new of the node's tiers."""
        return self._node.tiers.take() if self._node is not None else {}

    def shutdown(self) -> None:
        if self._claims is not None:
            for known in self._requests.values():
                self._claims.leave(known)
        self._requests.clear()
        if self._stores is not None:
            self._stores.drop_unplanned()
        if self._node is not None:
            self._node.close()

    def _add(self, name: str, count: int) -> None:
        self.counters[name] = self.counters.get(name, 0) + count
