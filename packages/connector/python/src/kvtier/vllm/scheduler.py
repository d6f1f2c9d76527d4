"""The scheduler's half: what may be claimed of a prompt, and which blocks are stored. All of it is called from the engine's one loop
and polls; what takes time happens on the sessions' threads and in native code.

    request ──► lookups ──► stage (leased, checked) ──► claimed ──► plan ──► all ranks through ──► released
                  │ nothing, silent, late: (0, False), computed

Invariants: only what lies in the arena, leased and verified, is claimed; a request whose load failed is not asked for again; None is
answered until a deadline of ours at the most; whatever is leased or held ends with its request.
"""

from __future__ import annotations

import logging
import os
import time
from typing import Any

from kvtier.vllm import hints, identity, promises
from kvtier.vllm.groups import Group, Unsupported, align_tokens, groups_of, longest_prefix, usable_prefix
from kvtier.vllm.guard import Troubles
from kvtier.vllm.known import Known, Loading
from kvtier.vllm.messages import KvtierHandshake, KvtierMetadata, KvtierWorkerMetadata, LoadPlan, Rank
from kvtier.vllm.node import Attached, Node
from kvtier.vllm.options import Options
from kvtier.vllm.pace import Pace
from kvtier.vllm.staging import Lookups, Stage, chains_of
from kvtier.vllm.storing import Holder, Piece, Stores
from kvtier.vllm.versions import block_state

log = logging.getLogger("kvtier.vllm")

#: Of one request: its local hit shrank, or it was preempted. After that it is computed.
MAX_STAGES = 4
#: Of one request, when the node has answered something else since: it was slow, or came back, and is not silent.
MAX_LOOKUPS = 2
#: Requests that are known; the engine's own queue is what is long.
MAX_REQUESTS = 65_536


class SchedulerHalf:
    def __init__(self, options: Options, vllm_config: Any, kv_cache_config: Any, troubles: Troubles) -> None:
        self.counters: dict[str, int] = {}
        self.options = options
        self.refusal = ""
        self._troubles = troubles
        self._requests: dict[str, Known] = {}
        self._loading: dict[int, Loading] = {}
        self._planned: list[LoadPlan] = []
        self._next_load = 1
        self._stores: Stores | None = None
        self._groups: tuple[Group, ...] = ()
        self._node: Node | None = None
        self._lookup_slow = False
        self._pace = Pace()
        self._expire_at = 0.0
        self._engine_id = str(getattr(vllm_config.kv_transfer_config, "engine_id", "") or "")
        self._tensor_ranks = int(vllm_config.parallel_config.tensor_parallel_size)
        try:
            identity.check_supported(vllm_config)
            _, self._hash_tokens = identity.block_sizes(vllm_config, kv_cache_config)
            self._groups = self._claimed(groups_of(kv_cache_config, self._hash_tokens, identity.uses_eagle(vllm_config)))
            self._align = align_tokens(self._groups)
            self._node = Node(options, vllm_config, self._groups, troubles)
        except Unsupported as error:
            self.refusal = str(error)
            log.warning("kvtier: nothing is loaded or stored in this engine: %s", error)

    # ---- start ------------------------------------------------------------------------------------------------------

    def _claimed(self, groups: tuple[Group, ...]) -> tuple[Group, ...]:
        return groups  # as hits are claimed of them

    def bind_pool(self, pool: Any) -> None:
        self._stores = Stores(Holder(pool, self.options.held_blocks_share), self.counters)

    def handshake(self, told: dict[Rank, KvtierHandshake]) -> None:
        if self._node is not None:
            self._node.begin(told)

    # ---- a request comes -----------------------------------------------------------------------------------------------

    def new_request(self, request: Any) -> None:
        if self._node is None or len(self._requests) >= MAX_REQUESTS or request.request_id in self._requests:
            return
        known = self._known(request)
        self._requests[request.request_id] = known
        if known.loads:
            self._look_up(known)

    def _known(self, request: Any) -> Known:
        params = getattr(request, "kv_transfer_params", None)
        said = promises.hints_of(params)
        images = bool(getattr(request, "mm_features", None))
        usable = getattr(request, "lora_request", None) is None and (not images or self.options.multimodal)
        reads = usable and self.options.load and said.get("load", True) is not False
        plain = not images and not getattr(request, "cache_salt", None) and getattr(request, "prompt_embeds", None) is None
        return Known(
            name=request.request_id,
            hashes=request.block_hashes,
            loads=reads and not getattr(request, "skip_reading_prefix_cache", False),
            stores=usable and self.options.store and said.get("store", True) is not False,
            tokens=getattr(request, "all_token_ids", None) if plain else None,
            promise=promises.read(params),
            tables=[[] for _ in self._groups],
            offered=[0] * len(self._groups),
        )

    def _look_up(self, known: Known) -> bool:
        attached = self._node.attached() if self._node is not None else None
        if attached is None or not known.hashes:
            return False
        known.asked_at = time.monotonic()
        known.lookups = Lookups(attached, list(known.hashes), self._answer_s(known))
        known.asked += 1
        self._add("lookups", 1)
        return True

    def _answer_s(self, known: Known) -> float:
        tokens = len(known.hashes) * self._hash_tokens
        return self._pace.answer_ms(tokens, self.options.lookup_deadline_ms, self.options.load_deadline_ms) / 1e3

    # ---- what may be claimed --------------------------------------------------------------------------------------------

    def matched(self, request: Any, local_tokens: int) -> tuple[int | None, bool]:
        known = self._requests.get(request.request_id)
        if known is None:
            self.new_request(request)
            known = self._requests.get(request.request_id)
        if known is None or not known.loads or known.denied or self._troubles.stopped:
            return 0, False
        if known.stage is not None:
            return self._staged(known, request, local_tokens)
        if known.lookups is None:
            return self._not_asked(known, request, local_tokens)
        lookups = known.lookups
        if not lookups.done and not (not self._lookup_slow and lookups.wait(self.options.patience_us / 1e6)):
            self._lookup_slow = True
            if time.monotonic() - known.asked_at < lookups.deadline_s + 0.01:
                return None, False
            return self._unanswered(known, "lookup")
        known.held = lookups.held(self._groups)
        if known.held is None:
            return self._unanswered(known, "lookup")
        self._lookup_slow = False
        self._skip_held(known)
        return self._begin(known, request, local_tokens)

    def _unanswered(self, known: Known, why: str) -> tuple[int | None, bool]:
        """A node that is silent is not asked again, and who waits for it does so once."""
        if known.asked < MAX_LOOKUPS and self._look_up(known):
            return None, False
        return self._deny(known, why)

    def _not_asked(self, known: Known, request: Any, local_tokens: int) -> tuple[int | None, bool]:
        """The node was not there when it came, or it comes again after it was admitted once."""
        node = self._node
        if node is None:
            return 0, False
        self._look_up(known)
        if known.lookups is not None:
            return self.matched(request, local_tokens)
        now = time.monotonic()
        known.asked_at = known.asked_at or now
        # Workers are mapping the arena: a step or two.
        if node.may_attach_soon() and now - known.asked_at < self._answer_s(known):
            return None, False
        return self._deny(known, "not attached")

    def _begin(self, known: Known, request: Any, local_tokens: int) -> tuple[int | None, bool]:
        held, lookups = known.held, known.lookups
        if held is None or lookups is None:
            return self._deny(known, "lookup")
        limit = min(int(request.num_tokens), lookups.hashes * self._hash_tokens)
        end = longest_prefix(self._groups, held, local_tokens, limit)
        usable = usable_prefix(self._groups, end, local_tokens, int(request.num_tokens))
        if usable < end:
            end = longest_prefix(self._groups, held, local_tokens, usable)
        end, await_s = self._promised(known, lookups.attached, end, local_tokens, limit)
        tokens = end - local_tokens
        if tokens <= 0 or tokens < self.options.min_load_tokens:
            return 0, False
        node = self._node
        if node is None or node.attached() is not lookups.attached:
            return self._unanswered(known, "detached")
        known.stages += 1
        if known.stages > MAX_STAGES:
            return self._deny(known, "too often")
        deadline_ms = self._pace.limit_ms(tokens, self.options.load_us_per_token, self.options.load_deadline_ms)
        if self.options.plan_loads and not await_s and lookups.estimated_ms(tokens) > deadline_ms:
            return self._deny(known, "slow")
        deadline_s = max(deadline_ms / 1e3, await_s)
        known.stage = Stage(lookups, node.copies, self._groups, local_tokens, end, deadline_s, await_s)
        self._add("loads", 1)
        if known.stage.wait(self.options.patience_us / 1e6):
            return self._staged(known, request, local_tokens)
        return None, False

    def _promised(
        self, known: Known, attached: Attached, end: int, local_tokens: int, limit: int
    ) -> tuple[int, float]:
        """Where another pod computes more of it now, that is waited for: until its deadline, and once."""
        promise, known.promise = known.promise, None
        if promise is None or known.stages > 0:
            return end, 0.0
        until = min(promise.tokens, limit) // self._align * self._align
        until = usable_prefix(self._groups, until, local_tokens, limit + 1)
        at = promise.tokens // self._hash_tokens - 1
        ours = promises.namespace_of([share.namespace for share in attached.shares]) == promise.namespace
        if not ours or until <= end or not 0 <= at < len(known.hashes) or known.hashes[at].hex() != promise.last_hash:
            return end, 0.0
        self._add("promises", 1)
        return until, self.options.promise_deadline_ms / 1e3

    def _staged(self, known: Known, request: Any, local_tokens: int) -> tuple[int | None, bool]:
        stage = known.stage
        assert stage is not None
        if stage.claimed:
            return 0, False
        stage.asked_at = time.monotonic()
        if local_tokens < stage.first_tokens:
            # Blocks of the local hit were evicted while it waited: what was staged does not begin where it must.
            self._leave_stage(known)
            self._add("restaged", 1)
            return self._begin(known, request, local_tokens)
        if not stage.poll():
            return None, False
        ready = stage.ready_tokens or 0
        if ready <= stage.first_tokens:
            self._leave_stage(known)
            # It is not what the lookup said: what is missing or bad is stored again, once it is computed.
            known.offered = [0] * len(self._groups)
            return self._deny(known, stage.reason or "missing")
        if not stage.alive:
            self._leave_stage(known)
            return self._deny(known, "detached")
        if ready <= local_tokens:
            self._leave_stage(known)
            return 0, False
        return ready - local_tokens, True

    def _deny(self, known: Known, why: str) -> tuple[int, bool]:
        known.denied = why
        self._add(f"denied_{why.replace(' ', '_')}", 1)
        return 0, False

    def _leave_stage(self, known: Known) -> None:
        stage, known.stage = known.stage, None
        if stage is not None and not stage.claimed:
            stage.release()

    def allocated(self, request: Any, blocks: Any, external_tokens: int) -> None:
        known = self._requests.get(request.request_id)
        if known is None:
            return
        if external_tokens <= 0:
            self._leave_stage(known)
            known.lookups = None
            return
        stage, known.stage, known.lookups = known.stage, None, None
        number, self._next_load = self._next_load, self._next_load + 1
        ids = blocks.get_block_ids()
        try:
            if stage is None or not stage.ready_tokens:
                raise RuntimeError(f"{external_tokens} tokens are to be loaded that were not claimed")
            parts = stage.parts(ids, stage.ready_tokens - external_tokens)
        except Exception:
            # The request waits for a load by now: it must end, and all that it was to bring is computed.
            if stage is not None:
                stage.release()
            known.denied = "plan"
            self._planned.append(LoadPlan(number, known.name, [], sorted({block for of in ids for block in of if block})))
            raise
        stage.claimed = True
        self._loading[number] = Loading(known.name, stage)
        self._planned.append(LoadPlan(number, known.name, parts))
        self._add("loaded_tokens", external_tokens)
        for group in self._groups:
            # Where it came short of what the lookup said, blocks behind it are missing or bad: they are stored again.
            held = known.offered[group.index] if stage.ready_tokens >= stage.end_tokens else 0
            known.offered[group.index] = max(held, stage.ready_tokens // group.block_tokens)

    # ---- each step -----------------------------------------------------------------------------------------------------

    def metadata(self, output: Any) -> KvtierMetadata:
        node = self._node
        if node is None:
            return KvtierMetadata()
        loads, self._planned = self._planned, []
        planned = KvtierMetadata(list(node.places), loads)
        try:
            if self._stores is not None:
                planned.stores = self._stores.plans()
            self._follow(output)
            now = time.monotonic()
            if self.options.plan_loads:
                self._pace.step(int(output.total_num_scheduled_tokens), bool(output.scheduled_cached_reqs.req_ids), now)
            if now > self._expire_at:
                self.expire()
        except Exception as error:
            # Loads that were promised go out all the same.
            self._troubles.note("build_connector_meta", error)
        return planned

    def _follow(self, output: Any) -> None:
        """Tables and computed tokens of what is scheduled; blocks that earlier steps filled are offered."""
        node, stores = self._node, self._stores
        attached = node.attached() if node is not None and stores is not None and not self._troubles.stopped else None
        said = block_state(output)
        scheduled = output.num_scheduled_tokens
        for new in output.scheduled_new_reqs:
            known = self._requests.get(new.req_id)
            if known is not None:
                known.tables = [list(ids) for ids in new.block_ids]
                known.next_tokens = 0
                self._offer(known, int(new.num_computed_tokens), attached, int(scheduled.get(new.req_id, 0)))
        cached = output.scheduled_cached_reqs
        for i, name in enumerate(cached.req_ids):
            known = self._requests.get(name)
            if known is None:
                continue
            added = cached.new_block_ids[i]
            if name in cached.resumed_req_ids:
                known.tables = [list(ids) for ids in added] if added is not None else [[] for _ in self._groups]
                known.next_tokens = 0
            elif added is not None:
                for table, ids in zip(known.tables, added):
                    table.extend(ids)
            if said is not None and name in said:
                known.tables = [list(ids) for ids in said[name]]
            computed, ahead = int(cached.num_computed_tokens[i]), int(scheduled.get(name, 0))
            if computed + ahead >= known.next_tokens:
                self._offer(known, computed, attached, ahead)

    def _offer(self, known: Known, computed_tokens: int, attached: Attached | None, ahead_tokens: int = 0) -> None:
        """`ahead_tokens`: what the step that begins now computes. Of windows their blocks are held already, and copied after it: a
        step later the first of the tail may have left the window."""
        if attached is None or self._stores is None or not known.stores:
            return
        self._read_held(known)
        named = len(known.hashes) * self._hash_tokens
        room = self._stores.room()
        pieces: list[Piece] = []
        next_tokens = computed_tokens + ahead_tokens + self._align
        for group in self._groups:
            index = group.index
            end = min(computed_tokens + (ahead_tokens if group.window_tokens else 0), named) // group.block_tokens
            first = max(known.offered[index], group.first_live(computed_tokens))
            if group.window_tokens:
                # One end earlier, too: where all of a request is held, its last block is computed again.
                first = max(first, group.first_needed(0, end) - self._align // group.block_tokens)
            ids = known.tables[index][first:end]
            while ids and ids[0] == 0:
                ids, first = ids[1:], first + 1
            if 0 in ids:
                ids = ids[: ids.index(0)]
            # A part of a window's tail is of no use.
            ids = ids[:room] if not group.window_tokens or len(ids) <= room else []
            room -= len(ids)
            if ids:
                pieces.append(Piece(group, first, ids))
                known.offered[index] = first + len(ids)
            next_tokens = min(next_tokens, (max(known.offered[index], end) + 1) * group.block_tokens)
            if room <= 0:
                next_tokens = 0
        known.next_tokens = next_tokens
        if pieces:
            self._stores.offer(attached, known.hashes, pieces, known.tokens)

    def _read_held(self, known: Known) -> None:
        """Answered after the request was admitted: what is held need not be stored."""
        if known.held is None and known.lookups is not None and known.lookups.done:
            known.held = known.lookups.held(self._groups)
            self._skip_held(known)

    def _skip_held(self, known: Known) -> None:
        for group, ranges in zip(self._groups, known.held or ()):
            if not group.window_tokens and ranges and ranges[0][0] == 0:
                known.offered[group.index] = max(known.offered[group.index], ranges[0][1])

    def worker_output(self, told: KvtierWorkerMetadata) -> None:
        node = self._node
        if node is None:
            return
        node.mapped(told.mapped)
        for number, ranks in told.loaded.items():
            loading = self._loading.get(number)
            if loading is None:
                continue
            loading.through.update(ranks)
            for share, indexes in told.bad.get(number, {}).items():
                loading.bad.setdefault(share, set()).update(indexes)
            if loading.through >= node.ranks:
                del self._loading[number]
                loading.stage.release(loading.bad)
                if loading.bad:
                    self._failed(loading)
        if self._stores is not None and told.stored:
            self._stores.copied(told.stored)

    def _failed(self, loading: Loading) -> None:
        self._add("corrupt_blocks", sum(len(indexes) for indexes in loading.bad.values()))
        known = self._requests.get(loading.request)
        if known is not None:
            known.denied = "corrupt"
            # What was bad is stored again, once it is computed.
            known.offered = [0] * len(self._groups)

    def finished(self, request: Any, block_ids: Any) -> dict[str, Any] | None:
        known = self._requests.pop(request.request_id, None)
        if known is None:
            return None
        self._leave_stage(known)
        attached = self._node.attached() if self._node is not None and self._stores is not None else None
        if attached is not None and not self._troubles.stopped:
            known.tables = [list(ids) for ids in block_ids]
            self._offer(known, int(request.num_computed_tokens), attached)
            self._heed(known, request, attached)
            return self._promise(known, request, attached)
        return None

    def _heed(self, known: Known, request: Any, attached: Attached) -> None:
        if not self.options.hint_pin_ms or not known.stores:
            return
        said = hints.of(request, self.options.hint_pin_ms / 1e3)
        self._add("hints_heeded", said.heeded)
        self._add("hints_ignored", said.ignored)
        computed = min(int(request.num_computed_tokens), len(known.hashes) * self._hash_tokens) // self._align * self._align
        if said.pin_s > 0 and computed > 0 and self._node is not None:
            self._node.pin(attached, chains_of(known.hashes, self._groups, computed), said.pin_s)

    def _promise(self, known: Known, request: Any, attached: Attached) -> dict[str, Any] | None:
        """What was computed for another pod: pinned, and told in the answer."""
        if not known.stores or not promises.wanted(getattr(request, "kv_transfer_params", None)):
            return None
        computed = min(int(request.num_computed_tokens), len(known.hashes) * self._hash_tokens)
        tokens = computed // self._align * self._align
        if tokens <= 0 or self._node is None:
            return None
        if self.options.pin_ms:
            self._node.pin(attached, chains_of(known.hashes, self._groups, tokens), self.options.pin_ms / 1e3)
        namespace = promises.namespace_of([share.namespace for share in attached.shares])
        promise = promises.Promise(namespace, tokens, known.hashes[tokens // self._hash_tokens - 1].hex())
        return promises.answer(
            promise,
            engine=self._engine_id,
            request=known.name,
            groups=len(self._groups),
            tensor_ranks=self._tensor_ranks,
            node=attached.attachments[0].session.hex(),
        )

    # ---- the rest ------------------------------------------------------------------------------------------------------

    def expire(self) -> None:
        """Leases of requests that the engine does not come to."""
        now = time.monotonic()
        self._expire_at = now + 0.5
        limit = now - self.options.lease_ms / 1e3
        for known in self._requests.values():
            if known.stage is not None and not known.stage.claimed and known.stage.asked_at < limit:
                self._leave_stage(known)
                known.lookups = None
                self._add("leases_expired", 1)

    @property
    def wants_steps(self) -> bool:
        """Something ends only in a step: stores that hold blocks, a new arena that workers have not mapped."""
        if self._stores is not None and self._stores.pending:
            return True
        return bool(self._planned) or (self._node is not None and self._node.wants_steps())

    def reset(self) -> bool:
        """Other weights from now on: nothing that is stored is this model's any more, nor what is computed half with the old ones."""
        if self._node is None:
            return True
        for known in self._requests.values():
            self._leave_stage(known)
            known.lookups = None
            known.denied = "reset"
            known.stores = False
        if self._stores is not None:
            self._stores.drop_unplanned()
        self._node.renew(os.urandom(16))
        return True

    def shutdown(self) -> None:
        for known in self._requests.values():
            self._leave_stage(known)
        self._requests.clear()
        if self._stores is not None:
            self._stores.drop_unplanned()
        if self._node is not None:
            self._node.close()

    def _add(self, name: str, count: int) -> None:
        self.counters[name] = self.counters.get(name, 0) + count
