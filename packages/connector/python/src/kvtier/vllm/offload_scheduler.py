"""The scheduler's half under vLLM's native offloading: vLLM decides what is looked up, loaded and stored, block by block; leases, checks
and deadlines are those of the connector.

     asked for hits ──► leased and checked, as for the connector ──► vLLM looks up each block: HIT for what is leased, else MISS
     prepare_load   ──► a plan from the leased slots                  prepare_store ──► offer, Reserve, plan, Commit

Invariants: HIT is said of nothing but leased and checked blocks; a lease that was told lasts at least until the step is scheduled;
every plan that vLLM was promised ends, whatever went wrong.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

from kvtier.vllm.groups import Group
from kvtier.vllm.guard import Troubles, harmless
from kvtier.vllm.known import Known
from kvtier.vllm.messages import LoadPlan
from kvtier.vllm.offload_bases import (
    LookupResult,
    OffloadingManager,
    OffloadKey,
    PrepareStoreOutput,
    ReqContext,
    RequestOffloadingContext,
    get_offload_block_hash,
    get_offload_group_idx,
    make_offload_key,
)
from kvtier.vllm.offload_messages import Numbered
from kvtier.vllm.options import Options
from kvtier.vllm.scheduler import SchedulerHalf
from kvtier.vllm.storing import MAX_OFFER_BLOCKS, Piece, Stores

log = logging.getLogger("kvtier.vllm")


class _Places:
    """Stands for the engine's pool: vLLM itself holds blocks that are stored, and here they are places in its list of them."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.held = 0

    @property
    def room(self) -> int:
        return self.most - self.held

    def hold(self, ids: Sequence[int]) -> list[Any]:
        self.held += len(ids)
        return list(ids)

    def let_go(self, blocks: list[Any]) -> None:
        self.held -= len(blocks)


class OffloadHalf(SchedulerHalf):
    def __init__(self, options: Options, vllm_config: Any, kv_cache_config: Any, troubles: Troubles) -> None:
        super().__init__(options, vllm_config, kv_cache_config, troubles)
        # Each block of the engine once: vLLM takes back what it needs.
        self._stores = Stores(_Places(int(kv_cache_config.num_blocks)), self.counters)  # type: ignore[arg-type]
        #: Of a request whose stage is ready: its keys, and which block of its group each of them is.
        self._leased: dict[str, dict[OffloadKey, int]] = {}
        #: The runner writes to blocks that were given away before the workers' half hears of it: it zeroes them, or copies others over
        #: them. What a store took of them then would be whole by its checksum, under a name that is not its own.
        self._overwrites = False
        self._early_writes = bool(getattr(vllm_config, "use_v2_model_runner", True))
        if not self.refusal and self._early_writes and getattr(kv_cache_config, "needs_kv_cache_zeroing", False):
            self._stop_storing()

    def _claimed(self, groups: tuple[Group, ...]) -> tuple[Group, ...]:
        """vLLM wants the block that a window's first token lies in, also where the next token does not look at it any more."""
        return tuple(replace(group, more_tail_tokens=1) if group.window_tokens else group for group in groups)

    # ---- loads --------------------------------------------------------------------------------------------------------

    def ready(self, request: Any, local_tokens: int) -> bool:
        """Whether vLLM may look its blocks up now; what it then finds is leased."""
        self._leased.pop(request.request_id, None)
        tokens, _ = self.matched(request, local_tokens)
        if tokens is None:
            return False
        known = self._requests.get(request.request_id)
        if tokens and known is not None and known.stage is not None:
            self._leased[known.name] = self._keys_of(known)
        return True

    def _keys_of(self, known: Known) -> dict[OffloadKey, int]:
        stage, keys = known.stage, {}
        assert stage is not None
        for group in self._groups:
            for block in stage.leased(group):
                keys[make_offload_key(known.hashes[(block + 1) * group.hash_step - 1], group.index)] = block
        return keys

    def looked_up(self, name: str, found: int | None) -> None:
        """vLLM has made up its mind. What it does not take is let go; while it defers the request, the lease has its own end."""
        if found == 0:
            self._leased.pop(name, None)
            known = self._requests.get(name)
            if known is not None and self._claims is not None:
                self._claims.leave(known)
                known.lookups = None

    def holds(self, name: str, key: OffloadKey) -> bool:
        return key in self._leased.get(name, ())

    def plan_load(self, name: str, keys: Collection[OffloadKey]) -> int:
        """Its number: from here on the request waits for it."""
        claims = self._claims
        assert claims is not None  # vLLM loads what was a hit
        number = claims.number()
        known, blocks = self._requests.get(name), self._leased.pop(name, {})
        stage = known.stage if known is not None else None
        wanted: dict[int, list[tuple[int, int]]] = {}
        failed = []
        for place, key in enumerate(keys):
            if key in blocks and stage is not None and not stage.released:
                wanted.setdefault(get_offload_group_idx(key), []).append((place, blocks[key]))
            else:
                failed.append(place)
        parts = []
        try:
            if known is None or stage is None or failed:
                raise RuntimeError(f"{len(failed)} of {len(keys)} blocks are to be loaded that were not claimed")
            parts = stage.parts_at(wanted)
        except Exception as error:
            self._troubles.note("prepare_load", error)
            failed = list(range(len(keys)))
            if known is not None:
                known.denied = "plan"
                claims.leave(known)
        if parts and stage is not None and known is not None:
            known.stage, known.lookups = None, None
            claims.claim(number, known, stage)
            self._add("loaded_blocks", len(keys))
        # The plan's name at the workers: vLLM's job there names the request.
        claims.planned.append(LoadPlan(number, str(number), parts, failed))
        return number

    def fail_plan(self, name: str, count: int) -> int:
        """A plan that brings nothing: the request waits for it, and is computed."""
        claims = self._claims
        if claims is None:
            return 0
        number = claims.number()
        claims.planned.append(LoadPlan(number, str(number), [], list(range(count))))
        known = self._requests.get(name)
        if known is not None:
            known.denied = "plan"
            claims.leave(known)
        return number

    # ---- stores -------------------------------------------------------------------------------------------------------

    def _follow(self, output: Any) -> None:
        """vLLM says itself what is to be stored; and which blocks of this step are written to before stores of them are waited for."""
        written = getattr(output, "new_block_ids_to_zero", None) or getattr(output, "kv_cache_block_copies", None)
        if written and self._early_writes:
            self._stop_storing()

    def _stop_storing(self) -> None:
        if self._overwrites:
            return
        self._overwrites = True
        if self._stores is not None:
            self._stores.spoil()
        log.warning(
            "kvtier: this engine zeroes new blocks, or copies over them, before it waits for their stores: nothing is stored over vLLM's "
            "native offloading, and what others stored is loaded; use KvtierConnector, which stores here, or VLLM_USE_V2_MODEL_RUNNER=0"
        )

    def plan_store(self, name: str, keys: Sequence[OffloadKey]) -> tuple[int, list[OffloadKey]] | None:
        """What of it is offered, in vLLM's order, and the offer's number. None: not now, but at the next step."""
        known = self._requests.get(name)
        attached = self._node.attached() if self._node is not None and not self._troubles.stopped else None
        if known is None or attached is None or self._stores is None or not known.stores or self._overwrites:
            return 0, []
        taken: list[OffloadKey] = []
        pieces: list[Piece] = []
        # All of them: vLLM does not say again what is not taken now, and what is held already may be most of it.
        room = self._stores.room(len(keys))
        if room <= 0:
            return None
        for at, key in enumerate(keys):
            if len(taken) >= room:
                self._stores.left_out(len(keys) - at)
                break
            group = self._groups[get_offload_group_idx(key)]
            block = self._find(known, group, get_offload_block_hash(key))
            if block is None:
                continue
            last = pieces[-1] if pieces else None
            whole = last is None or last.group is not group or last.first + len(last.ids) != block
            if last is None or whole or len(last.ids) == MAX_OFFER_BLOCKS:
                last = Piece(group, block, [])
                pieces.append(last)
            last.ids.append(len(taken))
            taken.append(key)
        if not taken:
            return 0, []
        return self._stores.offer(attached, known.hashes, pieces, known.tokens), taken

    @staticmethod
    def _find(known: Known, group: Group, name: bytes) -> int | None:
        """Which block of its group has this name. vLLM asks in order: it is the next one, or not far."""
        step = group.hash_step
        blocks = len(known.hashes) // step
        first = known.offered[group.index]
        for block in itertools.chain(range(first, blocks), range(min(first, blocks))):
            if known.hashes[(block + 1) * step - 1] == name:
                known.offered[group.index] = block + 1
                return block
        return None

    def ended(self) -> list[int]:
        """Offers that will not be copied, since the last call."""
        if self._stores is None:
            return []
        gone = list(self._stores.unplanned)
        self._stores.unplanned.clear()
        return gone

    def gone(self, name: str) -> None:
        self._leased.pop(name, None)
        super().gone(name)


def _stored_nothing() -> PrepareStoreOutput:
    return PrepareStoreOutput(keys_to_store=[], store_spec=Numbered(0), evicted_keys=[])


class Manager(OffloadingManager):  # type: ignore[misc]
    """vLLM's interface to the half. Without one (a version that is not known, a model that cannot be served) all is missed."""

    def __init__(self, half: OffloadHalf | None, troubles: Troubles) -> None:
        self._half = half
        self.troubles = troubles

    @harmless(RequestOffloadingContext)
    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        return RequestOffloadingContext()

    @harmless(lambda: LookupResult.MISS)
    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        held = self._half is not None and self._half.holds(req_context.req_id, key)
        return LookupResult.HIT if held else LookupResult.MISS

    def _failed(self, keys: Collection[OffloadKey], req_context: ReqContext) -> Numbered:
        return Numbered(self._half.fail_plan(req_context.req_id, len(keys)) if self._half is not None else 0)

    @harmless(lambda: Numbered(0), _failed)
    def prepare_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> Numbered:
        return Numbered(self._half.plan_load(req_context.req_id, keys) if self._half is not None else 0)

    @harmless(_stored_nothing)
    def prepare_store(self, keys: Collection[OffloadKey], req_context: ReqContext) -> PrepareStoreOutput | None:
        number = 0
        taken: list[OffloadKey] = []
        if self._half is not None:
            planned = self._half.plan_store(req_context.req_id, list(keys))
            if planned is None:
                return None
            number, taken = planned
        return PrepareStoreOutput(keys_to_store=taken, store_spec=Numbered(number), evicted_keys=[])

    @harmless(lambda: None)
    def on_request_finished(self, req_context: ReqContext) -> None:
        if self._half is not None:
            self._half.gone(req_context.req_id)

    @harmless(lambda: False)
    def has_pending_work(self) -> bool:
        return self._half is not None and self._half.wants_steps
