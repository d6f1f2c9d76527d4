"""An inference engine's scheduler and workers, played: the calls of vLLM V1 in their order, with KV that says which tokens it is of.

Every token's KV is a hash of all tokens up to it, its layer and its head; each step reads what attention would read and compares. A
block that is stale, foreign, torn or late is a wrong answer here, not a small number. What travels between the halves is pickled.

Not vLLM's code: an implementation of the interface's rules (docs/vllm.md) for one purpose.
"""

from __future__ import annotations

import hashlib
import os
import pickle
import sys
import time
import types
from collections import deque
from typing import Any

os.environ.setdefault("KVTIER_WITHOUT_VLLM", "1")

from engine_parts import (  # noqa: E402
    PATIENT,
    ROOT,
    Blocks,
    FullAttentionSpec,
    MambaSpec,
    MLAAttentionSpec,
    Pool,
    Request,
    Shape,
    SlidingWindowSpec,
    next_token,
)
from engine_versions import Together  # noqa: E402
from engine_worker import Work, Worker  # noqa: E402
from kvtier.vllm.bases import KVConnectorRole  # noqa: E402
from kvtier.vllm.connector import KvtierConnector  # noqa: E402

_utils = types.ModuleType("vllm.v1.core.kv_cache_utils")


class Engine:
    def __init__(self, shape: Shape, socket: str) -> None:
        self.shape = shape
        self.socket = socket
        self.wrong: list[Any] = []
        self.steps = 0
        self.preemptions = 0
        self.external_tokens = 0
        self.local_tokens = 0
        self.most_nones = 0
        #: Blocks that a load was to fill and did not, as workers told them, and requests that they told so.
        self.lost_blocks = 0
        self.lost_requests: list[str] = []
        #: Requests whose tables the connector asked for; steps in which somebody waited for blocks.
        self.asked_tables: list[str] = []
        self.waited = 0
        self._states: dict[tuple[int, ...], list[bytes]] = {}
        self.hash_tokens = min(group.block_tokens for group in shape.groups)
        self.align = max(group.block_tokens for group in shape.groups)
        self.pool = Pool(shape.blocks, shape.prefix_caching)
        self.requests: dict[str, Request] = {}
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.done: dict[str, Request] = {}
        self._received: set[str] = set()
        self._failed: set[str] = set()
        self._together = Together(shape.tp * shape.pp)
        self._finished: set[str] = set()
        self._new_blocks: list[int] = []
        self._in_flight: deque[Any] = deque()
        self._scheduled_before: set[str] = set()
        self._nones: dict[str, int] = {}
        self.workers = [Worker(self, stage, rank) for stage in range(shape.pp) for rank in range(shape.tp)]
        self.config = self.vllm_config(0)
        self.connector = (shape.connector or KvtierConnector)(self.config, KVConnectorRole.SCHEDULER, self.kv_cache_config(0))
        assert self.config.kv_transfer_config.kv_load_failure_policy == "recompute"
        self.connector.bind_gpu_block_pool(self.pool)
        handshakes = {(w.stage, w.rank): pickle.loads(pickle.dumps(w.connector.get_handshake_metadata())) for w in self.workers}
        self.connector.set_xfer_handshake_metadata_pp_aware(handshakes)
        _utils.NONE_HASH = ROOT  # type: ignore[attr-defined]
        sys.modules["vllm.v1.core.kv_cache_utils"] = _utils

    # ---- configuration ----------------------------------------------------------------------------------------------

    def layer_names(self, group: int, stage: int) -> list[str]:
        each = self.shape.groups[group].layers
        return [f"model.layers.{stage * each + i}.group{group}.attn" for i in range(each)]

    def vllm_config(self, rank: int) -> Any:
        shape = self.shape
        speculative = types.SimpleNamespace(method="ngram", use_eagle=lambda: False) if shape.drafts else None
        return types.SimpleNamespace(
            kv_transfer_config=types.SimpleNamespace(
                kv_connector_extra_config={**PATIENT, "socket": self.socket, **shape.options},
                kv_load_failure_policy="fail",
                is_kv_producer=True,
            ),
            parallel_config=types.SimpleNamespace(
                rank=rank, tensor_parallel_size=shape.tp, pipeline_parallel_size=shape.pp, decode_context_parallel_size=shape.dcp
            ),
            cache_config=types.SimpleNamespace(
                block_size=self.align, cache_dtype="auto", prefix_caching_hash_algo="sha256", calculate_kv_scales=False
            ),
            model_config=types.SimpleNamespace(
                model="/nowhere", dtype="bfloat16", quantization=None, hf_config=types.SimpleNamespace(name=shape.model),
                get_total_num_kv_heads=lambda: shape.heads,
                multimodal_config=types.SimpleNamespace(**shape.media) if shape.media is not None else None,
            ),
            speculative_config=speculative,
            use_v2_model_runner=shape.version.second_runner,
        )

    def kv_cache_config(self, stage: int) -> Any:
        groups = []
        for number, group in enumerate(self.shape.groups):
            heads = 1 if group.kind == "mla" else max(1, self.shape.heads // self.shape.tp)
            page = group.block_tokens * heads * 4 * self.shape.dim
            kind = {"full": FullAttentionSpec, "mla": MLAAttentionSpec, "window": SlidingWindowSpec, "mamba": MambaSpec}[group.kind]
            spec = kind(block_size=group.block_tokens, page_size_bytes=page, sliding_window=group.window or None)
            groups.append(types.SimpleNamespace(layer_names=self.layer_names(number, stage), kv_cache_spec=spec))
        return types.SimpleNamespace(
            num_blocks=self.shape.blocks, kv_cache_groups=groups, kv_cache_tensors=[], needs_kv_cache_zeroing=self.shape.zeroes
        )

    def states(self, tokens: list[int]) -> list[bytes]:
        """Of each position, what its KV depends on."""
        out: list[bytes] = []
        state = hashlib.blake2b(digest_size=16)
        for token in tokens:
            state.update(token.to_bytes(4, "big"))
            out.append(state.copy().digest())
        return out

    # ---- requests ---------------------------------------------------------------------------------------------------

    def add(self, name: str, prompt: list[int], outputs: int = 4, **more: Any) -> None:
        request = Request(name, prompt, outputs, self.hash_tokens, **more)
        self.requests[name] = request
        self.waiting.append(request)
        self.connector.on_new_request(request)

    def abort(self, name: str) -> None:
        request = self.requests.get(name)
        if request is None or request.state == "finished":
            return
        loading = request.state == "loading" and name not in self._received  # where it has ended, nothing more is told of it
        self._received.discard(name)
        if request in self.running:
            self.running.remove(request)
        if request in self.waiting:
            self.waiting.remove(request)
        request.status = "RequestStatus.FINISHED_ABORTED"
        self._end(request, free=not loading)

    def run(self, limit_s: float = 60.0) -> None:
        """Until all requests have ended and the connector has nothing more to do. Steps of nothing are fast: time is what bounds."""
        end = time.monotonic() + limit_s
        while self.requests or self._finished or self._in_flight or self.connector.has_pending_push_work():
            if time.monotonic() > end:
                raise AssertionError(f"not through after {limit_s} s: {[(r.request_id, r.state) for r in self.requests.values()]}")
            if not self.step():
                time.sleep(0.001)  # as vLLM does where requests wait and nothing was computed

    def step(self) -> bool:
        """Whether anything was computed."""
        output = self._schedule()
        self.steps += 1
        self._in_flight.append(self._execute(output))
        while len(self._in_flight) > (1 if self.shape.asynchronous and output.work else 0):
            self._update(self._in_flight.popleft())
        return bool(output.work)

    # ---- schedule ----------------------------------------------------------------------------------------------------

    def _schedule(self) -> Any:
        budget = self.shape.step_tokens
        new, cached, work, preempted = [], [], [], []
        self._new_blocks = []
        scheduled: set[str] = set()
        for request in list(self.running):
            if request not in self.running:
                continue
            count = min(request.num_tokens + len(request.drafts) - request.num_computed_tokens, budget)
            if request.in_flight and request.num_computed_tokens >= request.num_tokens:
                continue  # its next token is not known yet
            if count <= 0:
                continue
            before = [len(table) for table in request.tables]
            waits = False
            while not self._allocate(request, request.num_computed_tokens + count):
                waits = self.shape.version.waits and self.connector.has_pending_block_frees()
                if waits:
                    break
                victim = self.running[-1]
                self._preempt(victim)
                preempted.append(victim.request_id)
                if victim is request:
                    break
            self.waited += waits
            if waits or request.state != "running":
                break
            grown = [table[n:] for table, n in zip(request.tables, before)]
            cached.append((request, grown if any(grown) else None, request.num_computed_tokens, False))
            work.append(self._work(request, count))
            scheduled.add(request.request_id)
            budget -= count
        skipped: list[Request] = []
        # What holds blocks already comes first.
        self.waiting = deque(sorted(self.waiting, key=lambda request: request.state != "loading"))
        while self.waiting and budget > 0 and len(self.running) < self.shape.max_running and not preempted:
            request = self.waiting[0]
            if request.state == "loading" and not self._promote(request):
                skipped.append(self.waiting.popleft())
                continue
            external, later = 0, False
            local: list[list[int]] = [[] for _ in self.shape.groups]
            computed = request.num_computed_tokens
            if computed == 0:
                local, local_tokens = self._local_hit(request)
                external, later = self.connector.get_num_new_matched_tokens(request, local_tokens)
                if external is None:
                    self._nones[request.request_id] = self._nones.get(request.request_id, 0) + 1
                    self.most_nones = max(self.most_nones, self._nones[request.request_id])
                    skipped.append(self.waiting.popleft())
                    continue
                assert external == 0 or later, "this connector loads between steps"
                assert external % self.align == 0
                computed = local_tokens + external
                assert computed <= request.num_tokens
                if computed == request.num_tokens and not external:
                    raise AssertionError("a local hit of everything")
                self.local_tokens += local_tokens
            fresh = request.num_computed_tokens == 0
            count = 0 if later else min(request.num_tokens - computed, budget)
            if fresh:
                request.tables = local
                for table in local:
                    self.pool.touch([self.pool.blocks[i] for i in table if i])
            if not self._allocate(request, computed + count, computed if fresh else None):
                if fresh:
                    self._free(request)
                break
            self.connector.update_state_after_alloc(request, Blocks(request.tables), external)
            self.waiting.popleft()
            if later:
                request.state = "loading"
                request.num_computed_tokens = computed
                request.external = external
                self.external_tokens += external
                skipped.append(request)
                continue
            request.state = "running"
            self.running.append(request)
            request.num_computed_tokens = computed
            if request.epoch and not self.shape.version.second_runner:
                cached.append((request, [list(table) for table in request.tables], computed, True))
            else:
                new.append(types.SimpleNamespace(
                    req_id=request.request_id, block_ids=tuple(list(t) for t in request.tables), num_computed_tokens=computed
                ))
            request.epoch += 1
            work.append(self._work(request, count))
            scheduled.add(request.request_id)
            budget -= count
        self.waiting.extendleft(reversed(skipped))
        output = types.SimpleNamespace(
            scheduled_new_reqs=new,
            scheduled_cached_reqs=types.SimpleNamespace(
                req_ids=[one[0].request_id for one in cached],
                resumed_req_ids={one[0].request_id for one in cached if one[3]},
                new_block_ids=[None if one[1] is None else tuple(one[1]) for one in cached],
                num_computed_tokens=[one[2] for one in cached],
            ),
            total_num_scheduled_tokens=sum(item.end - item.computed for item in work),
            num_scheduled_tokens={item.name: item.end - item.computed for item in work},
            preempted_req_ids=set(preempted),
            finished_req_ids=self._finished,
            new_blocks=self._new_blocks,
            new_block_ids_to_zero=list(self._new_blocks) if self.shape.zeroes else None,
            kv_connector_block_state=self.shape.version.state_of({w.name: tuple(w.tables) for w in work}, self.asked_tables),
            work=work,
        )
        self._finished = set()
        output.kv_connector_metadata = pickle.loads(pickle.dumps(self.connector.build_connector_meta(output)))
        for item in work:
            request = self.requests[item.name]
            request.num_computed_tokens = item.end
            request.in_flight += 1
            self._name_blocks(request)
        return output

    def _work(self, request: Request, count: int) -> Work:
        tokens = request.all_token_ids + request.drafts
        computed = request.num_computed_tokens
        return Work(request.request_id, list(tokens[: computed + count]), [list(t) for t in request.tables], computed, computed + count)

    def _local_hit(self, request: Request) -> tuple[list[list[int]], int]:
        """The longest prefix that all groups have, at least one token short of everything."""
        end = (request.num_tokens - 1) // self.align * self.align if self.shape.prefix_caching else 0
        if request.skip_reading_prefix_cache:
            end = 0
        while end > 0:
            tables: list[list[int]] = []
            for number, group in enumerate(self.shape.groups):
                blocks, step = end // group.block_tokens, group.block_tokens // self.hash_tokens
                first = 0 if not group.window else max(0, (end - group.window + 1) // group.block_tokens)
                ids = [self.pool.cached.get((number, request.block_hashes[(i + 1) * step - 1]), 0) for i in range(first, blocks)]
                if 0 in ids:
                    break
                tables.append([0] * first + ids)
            else:
                return tables, end
            end -= self.align
        return [[] for _ in self.shape.groups], 0

    def _allocate(self, request: Request, tokens: int, computed: int | None = None) -> bool:
        if not request.tables:
            request.tables = [[] for _ in self.shape.groups]
        at = request.num_computed_tokens if computed is None else computed
        plan = []
        for number, group in enumerate(self.shape.groups):
            table = request.tables[number]
            gone = max(0, (at - group.window + 1) // group.block_tokens) if group.window else 0
            for i in range(min(gone, len(table))):
                if table[i]:
                    self.pool.free_blocks([self.pool.blocks[table[i]]])
                    table[i] = 0
            wanted = -(-tokens // group.block_tokens)
            nulls = max(0, min(gone, wanted) - len(table))
            plan.append((table, nulls, max(0, wanted - len(table) - nulls)))
        ids = self.pool.take(sum(count for _, _, count in plan))
        if ids is None:
            return False
        self._new_blocks.extend(ids)
        for table, nulls, count in plan:
            table.extend([0] * nulls + ids[:count])
            ids = ids[count:]
        return True

    def _name_blocks(self, request: Request, tokens: int | None = None) -> None:
        """Blocks are findable as soon as they are scheduled: this step computes them."""
        known = min(request.num_computed_tokens if tokens is None else tokens, request.num_tokens)
        for number, group in enumerate(self.shape.groups):
            step = group.block_tokens // self.hash_tokens
            for i in range(min(known // group.block_tokens, len(request.block_hashes) // step)):
                self.pool.name(request.tables[number][i], (number, request.block_hashes[(i + 1) * step - 1]))

    def _preempt(self, request: Request) -> None:
        self.running.remove(request)
        self._free(request)
        request.state, request.num_computed_tokens, request.drafts = "waiting", 0, []
        self.waiting.appendleft(request)
        self.preemptions += 1

    def _free(self, request: Request) -> None:
        for table in request.tables:
            self.pool.free_blocks([self.pool.blocks[i] for i in reversed(table) if i])
        request.tables = []

    def _promote(self, request: Request) -> bool:
        name = request.request_id
        if name not in self._received:
            return False
        self._received.discard(name)
        request.state = "waiting"
        if name in self._failed:
            self._failed.discard(name)
            if request.num_computed_tokens == 0:
                self._free(request)
        if request.num_computed_tokens:
            self._name_blocks(request)
        if request.num_computed_tokens == request.num_tokens:
            request.num_computed_tokens -= 1
        return True

    # ---- execute, update -----------------------------------------------------------------------------------------------

    def _execute(self, output: Any) -> Any:
        told = [worker.execute(output, output.work) for worker in self.workers]
        return types.SimpleNamespace(output=output, told=told, epochs={w.name: self.requests[w.name].epoch for w in output.work})

    def _update(self, result: Any) -> None:
        told = self._together.hear(result.told)
        self.lost_requests += sorted(told.failed_recving)
        for name in told.failed_recving:
            if self.requests[name].state == "loading":
                self.requests[name].num_computed_tokens = 0
                self._failed.add(name)
        if told.invalid_block_ids:
            self.lost_blocks += len(told.invalid_block_ids)
            self._take_back(told.invalid_block_ids)
        for item in result.output.work:
            self._token(item, result.epochs[item.name])
        self.connector.update_connector_output(told)
        for name in told.finished_recving:
            request = self.requests[name]
            if request.state == "loading":
                self._received.add(name)
            else:
                assert request.state == "finished"
                self._forget(request)
        self.connector.get_kv_connector_stats()

    def _take_back(self, invalid: set[int]) -> None:
        if len(self.shape.groups) > 1 and not self.shape.version.hybrid_blocks:
            raise RuntimeError("blocks of several groups failed: this engine ends")
        for request in list(self.waiting):
            if request.state != "loading":
                continue
            for number, group in enumerate(self.shape.groups):
                for i, block in enumerate(request.tables[number]):
                    if block in invalid:
                        end = i * group.block_tokens // self.align * self.align if len(self.shape.groups) == 1 else 0
                        request.num_computed_tokens = min(request.num_computed_tokens, end)
                        self._failed.add(request.request_id)

    def _token(self, item: Work, epoch: int) -> None:
        request = self.requests.get(item.name)
        if request is None or request.state == "finished":
            return
        request.in_flight -= 1
        if request.epoch != epoch or request.state != "running" or item.end < request.num_tokens:
            return
        known = request.num_tokens
        drafts = item.tokens[known:]
        accepted = 0
        token = next_token(request.all_token_ids, self.shape.model)
        while accepted < len(drafts) and drafts[accepted] == token and len(request.output_tokens()) + 1 < request.outputs:
            request.all_token_ids.append(token)
            accepted += 1
            token = next_token(request.all_token_ids, self.shape.model)
        request.num_computed_tokens -= len(drafts) - accepted
        request.all_token_ids.append(token)
        request.hash_more()
        self._name_blocks(request, request.num_computed_tokens)
        if self.shape.drafts:
            right = next_token(request.all_token_ids, self.shape.model)
            request.drafts = [right] + [1] * (self.shape.drafts - 1)
        if len(request.output_tokens()) >= request.outputs:
            self.running.remove(request)
            self._end(request)

    def _end(self, request: Request, free: bool = True) -> None:
        request.state = "finished"
        for number, group in enumerate(self.shape.groups):
            if group.window and request.tables:
                gone = max(0, (request.num_computed_tokens - group.window + 1) // group.block_tokens)
                table = request.tables[number]
                for i in range(min(gone, len(table))):
                    if table[i]:
                        self.pool.free_blocks([self.pool.blocks[table[i]]])
                        table[i] = 0
        known = request.num_computed_tokens
        tables = request.tables or [[] for _ in self.shape.groups]
        clipped = tuple(table[: -(-known // g.block_tokens)] for table, g in zip(tables, self.shape.groups))
        keep, request.answer = self.connector.request_finished_all_groups(request, clipped)
        assert keep is False
        self._finished.add(request.request_id)
        self.done[request.request_id] = request
        if free:
            self._forget(request)

    def _forget(self, request: Request) -> None:
        self._free(request)
        del self.requests[request.request_id]

    # ---- what tests ask --------------------------------------------------------------------------------------------------

    def all_free(self) -> bool:
        return len(self.pool.free) == len(self.pool.blocks) - 1

    def close(self) -> None:
        self.connector.shutdown()
        for worker in self.workers:
            worker.connector.shutdown()
