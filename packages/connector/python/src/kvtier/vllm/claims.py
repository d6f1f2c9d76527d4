"""What of a prompt may be claimed, and its way until all ranks are through with it.

    request ──► lookups ──► stage (leased, checked) ──► claimed ──► plan ──► all ranks through ──► released
                  │ nothing, silent, late: (0, False), computed

Invariants: only what lies in the arena, leased and verified, is claimed; a request whose load failed is not asked for again; None is
answered until a deadline of ours at the most; whatever is leased ends with its request.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import Any

from kvtier.vllm import promises
from kvtier.vllm.groups import Group, Prefixes
from kvtier.vllm.known import Known, Loading, denial
from kvtier.vllm.lookups import Lookups
from kvtier.vllm.messages import KvtierWorkerMetadata, LoadPlan
from kvtier.vllm.node import Attached, Node
from kvtier.vllm.options import Options
from kvtier.vllm.pace import Pace
from kvtier.vllm.room import NO_ROOM, Room
from kvtier.vllm.staging import Stage
from kvtier.vllm.standing import Standing

#: Of one request: its local hit shrank, what was promised did not come, or it was preempted. After that it is computed.
MAX_STAGES = 4
#: Of one request, when the node has answered something else since: it was slow, or came back, and is not silent.
MAX_LOOKUPS = 2
#: Of one request, so often what it waited for may end in vain while the engine did not come to it. After that it is computed.
MAX_ANEW = 16

_NOTHING = (0, False)
_LATER = (None, False)


def failed_plan(number: int, name: str, blocks: Sequence[Sequence[int]]) -> LoadPlan:
    """Nothing will be copied to these: the request that waits for it goes on, and computes them."""
    return LoadPlan(number, name, [], sorted({block for of in blocks for block in of if block}))


class Claims:
    def __init__(self, options: Options, groups: Sequence[Group], hash_tokens: int, node: Node, counters: dict[str, int]) -> None:
        self.pace = Pace()
        #: Made since the last step.
        self.planned: list[LoadPlan] = []
        self._options = options
        self._groups = groups
        self._prefixes = Prefixes(groups)
        self._hash_tokens = hash_tokens
        self._node = node
        self._counters = counters
        self._loading: dict[int, Loading] = {}
        #: What the engine was told last that it may claim.
        self._offered: Stage | None = None
        self._next_load = 1
        self._lookup_slow = False
        self.standing = Standing(options.patience_us / 1e6)
        self._room = Room()
        #: Of the engine; and the last one in which the link took no more questions.
        self._steps = 0
        self._full_in = -1
        node.follow_claims(self._arenas)

    def _arenas(self) -> set[int]:
        """That something is claimed of, or may be just now. Of any thread."""
        offered, loading = self._offered, list(self._loading.values())
        stages = [one.stage for one in loading] + ([offered] if offered is not None and not offered.released else [])
        return {stage.attached.arena.ref.id for stage in stages}

    # ---- asking -----------------------------------------------------------------------------------------------------

    def look_up(self, known: Known) -> bool:
        attached = self._node.attached()
        if attached is None or not known.hashes:
            return False
        known.asked_at = time.monotonic()
        known.held = None
        known.lookups = Lookups(attached, list(known.hashes), self._answer_s(known))
        known.asked += 1
        held = known.lookups.held if known.lookups.spared else None
        self._add("lookups" if held is None else "unasked_hits" if any(held) else "unasked", 1)
        return True

    def _answer_s(self, known: Known) -> float:
        tokens = len(known.hashes) * self._hash_tokens
        return self.pace.answer_ms(tokens, self._options.lookup_deadline_ms, self._options.load_deadline_ms) / 1e3

    # ---- what may be claimed ----------------------------------------------------------------------------------------

    def matched(self, known: Known, request: Any, local_tokens: int) -> tuple[int | None, bool]:
        now, step = time.monotonic(), self._steps
        # It was passed over, and for long: the engine was busy with others, and what ended then was not waited for.
        was_away = step - known.came_in > 1 and now - known.came_at > self._options.load_deadline_ms / 2e3
        known.came_at, known.came_in = now, step
        if was_away and now >= known.room_until > 0 and self._may_anew(known):
            known.room_until = 0.0
        if known.stage is not None:
            return self._staged(known, known.stage, request, local_tokens, was_away)
        if known.room_until and not self._room.may_try(known, now, step):
            return _LATER
        lookups = known.lookups
        if lookups is None:
            return self._not_asked(known, request, local_tokens)
        if not lookups.done and (self._lookup_slow or not self.standing.wait(lookups)):
            self._lookup_slow = True
            if time.monotonic() - known.asked_at < lookups.deadline_s + 0.01:
                return _LATER
            return self._unanswered(known, "lookup")
        if not known.hear(self._groups):
            return self._unanswered(known, "lookup")
        known.ask_until = 0.0
        if not lookups.spared:
            self._lookup_slow = False
        return self._begin(known, request, local_tokens)

    def _may_anew(self, known: Known) -> bool:
        known.anew += 1
        return known.anew <= MAX_ANEW

    def _unanswered(self, known: Known, why: str) -> tuple[int | None, bool]:
        """A node that is silent is not asked again, and who waits for it does so once."""
        if known.lookups is not None and known.lookups.busy and self._asks_later(known):
            return _LATER
        if known.asked < MAX_LOOKUPS and self.look_up(known):
            return _LATER
        return self._deny(known, why)

    def _asks_later(self, known: Known) -> bool:
        """More ask at once than the link takes: the node was not asked. It is once others were answered, until a load would end."""
        now = time.monotonic()
        known.ask_until = known.ask_until or now + self._deadline_ms(len(known.hashes) * self._hash_tokens) / 1e3
        if now >= known.ask_until:
            return False
        if self._full_in == self._steps:
            return True
        known.asked -= 1
        asks = self.look_up(known)
        if asks and known.lookups is not None and known.lookups.busy:
            self._full_in = self._steps
        return asks

    def _not_asked(self, known: Known, request: Any, local_tokens: int) -> tuple[int | None, bool]:
        """The node was not there when it came, or it comes again after it was admitted once."""
        if not known.hashes:
            return _NOTHING  # less than a block: no node has any of it
        if self.look_up(known):
            return self.matched(known, request, local_tokens)
        now = time.monotonic()
        known.asked_at = known.asked_at or now
        # Sessions attach, or workers map the arena: a step or two.
        answer_s = self._answer_s(known)
        if now - known.asked_at < answer_s and self._node.may_attach_soon(answer_s):
            return _LATER
        return self._deny(known, "not attached")

    def _begin(self, known: Known, request: Any, local_tokens: int) -> tuple[int | None, bool]:
        held, lookups, options = known.held, known.lookups, self._options
        if held is None or lookups is None:
            return self._deny(known, "lookup")
        all_tokens = int(request.num_tokens)
        if known.fruitless[0] is held and known.fruitless[1:] == (local_tokens, all_tokens):
            return _NOTHING
        limit = min(all_tokens, lookups.hashes * self._hash_tokens)
        prefixes = self._prefixes
        end = prefixes.longest(held, local_tokens, limit)
        usable = prefixes.usable(end, local_tokens, all_tokens)
        if usable < end:
            end = prefixes.longest(held, local_tokens, usable)
        await_s, promise, held_end = 0.0, known.promise, end
        if promise is not None:
            end, await_s = self._promised(known, lookups.attached, end, local_tokens, limit)
        await_from = promise.node if promise is not None and await_s else None
        tokens = end - local_tokens
        if tokens <= 0 or tokens < options.min_load_tokens:
            known.fruitless = (held, local_tokens, all_tokens)
            return _NOTHING
        if self._node.attached() is not lookups.attached:
            return self._unanswered(known, "detached")
        known.stages += 1
        if known.stages > MAX_STAGES:
            return self._deny(known, "too often")
        deadline_ms = self._deadline_ms(tokens)
        if options.plan_loads and not await_s and lookups.estimated_ms(tokens) > deadline_ms:
            return self._deny(known, "slow")
        deadline_s = max(deadline_ms / 1e3, await_s)
        stage = known.stage = Stage(lookups, self._node.copies, prefixes, local_tokens, end, deadline_s, await_s, await_from)
        if await_s:
            stage.held_tokens = held_end
        self._room.leased += 1
        self._add("loads", 1)
        if options.patience_us and self.standing.wait(stage):
            return self._staged(known, stage, request, local_tokens)
        return _LATER

    def _deadline_ms(self, tokens: int) -> float:
        most = self._options.load_deadline_ms
        return self.pace.limit_ms(tokens, most) if self._options.plan_loads else most

    def _promised(
        self, known: Known, attached: Attached, end: int, local_tokens: int, limit: int
    ) -> tuple[int, float]:
        """Where another pod computes more of it now, that is waited for: until its deadline, and once."""
        promise, known.promise = known.promise, None
        if promise is None or known.stages > 0:
            return end, 0.0
        until = min(promise.tokens, limit) // self._prefixes.align * self._prefixes.align
        until = self._prefixes.usable(until, local_tokens, limit + 1)
        at = promise.tokens // self._hash_tokens - 1
        ours = promises.namespace_of([share.namespace for share in attached.shares]) == promise.namespace
        if not ours or until <= end or not 0 <= at < len(known.hashes) or known.hashes[at].hex() != promise.last_hash:
            return end, 0.0
        self._add("promises", 1)
        return until, self._options.promise_deadline_ms / 1e3

    def _staged(
        self, known: Known, stage: Stage, request: Any, local_tokens: int, was_away: bool = False
    ) -> tuple[int | None, bool]:
        if stage.claimed:
            return _NOTHING
        stage.asked_at = time.monotonic()
        if local_tokens < stage.first_tokens:
            # Blocks of the local hit were evicted while it waited: what was staged does not begin where it must.
            self.leave(known)
            self._add("restaged", 1)
            return self._begin(known, request, local_tokens)
        if not stage.poll() and not self.standing.wait_soon(stage):
            return _LATER
        bad = stage.take_bad()
        if bad:
            self._add("bad_blocks", bad)
        ready = stage.ready_tokens or 0
        if ready < stage.end_tokens and stage.reason in NO_ROOM:
            if self._waits_for_room(known, stage):
                return _LATER
        elif known.room_until:
            self._room.has(known)
        if ready < stage.held_tokens and self._prefixes.has_windows:
            # It ended in vain, and of windows no block was asked for that a shorter prefix needs: what is held is staged by itself.
            self.leave(known)
            self._add("restaged", 1)
            return self._begin(known, request, local_tokens)
        if ready <= stage.first_tokens:
            self.leave(known)
            if stage.reason == "deadline" and was_away and self._may_anew(known):
                self._forget(known)
                return self._not_asked(known, request, local_tokens)
            # It is not what the lookup said: what is missing or bad is stored again, once it is computed.
            known.offered = [0] * len(self._groups)
            return self._deny(known, stage.reason or "missing")
        self._offered = stage  # first: who finds that its session has ended keeps the arena of what is offered by then
        if not stage.alive:
            self.leave(known)
            return self._deny(known, "detached")
        if ready <= local_tokens:
            self.leave(known)
            return _NOTHING
        return ready - local_tokens, True

    def _waits_for_room(self, known: Known, stage: Stage) -> bool:
        """Many requests wait together, and of an arena a part can be leased: those that are admitted give their leases back soon. Who is in
        front of the queue waits as long for it as for a load."""
        now = time.monotonic()
        until = known.room_until or now + self._deadline_ms(stage.end_tokens - stage.first_tokens) / 1e3
        if now >= until:
            return False
        known.stage = None
        stage.release()
        self._room.waits(known, until)
        known.stages -= 1
        return True

    @staticmethod
    def _forget(known: Known) -> None:
        """What was staged for it has ended before the engine came to it: as if it had not been asked about."""
        known.lookups, known.asked = None, 0
        known.stages -= 1

    def _deny(self, known: Known, why: str) -> tuple[int, bool]:
        known.denied = why
        self._add(f"denied_{denial(why)}", 1)
        return _NOTHING

    def leave(self, known: Known) -> None:
        """What is staged for it is let go, unless it is claimed."""
        stage, known.stage = known.stage, None
        if stage is not None and not stage.claimed:
            stage.release()
            self._room.ended()

    # ---- plans --------------------------------------------------------------------------------------------------------

    def allocated(self, known: Known, blocks: Any, external_tokens: int) -> None:
        if external_tokens <= 0:
            self.leave(known)
            known.lookups, known.asked = None, 0
            return
        stage, known.stage, known.lookups, known.asked = known.stage, None, None, 0
        ids = blocks.get_block_ids()
        try:
            if stage is None or not stage.ready_tokens:
                raise RuntimeError(f"{external_tokens} tokens are to be loaded that were not claimed")
            parts = stage.parts(ids, stage.ready_tokens - external_tokens)
        except Exception:
            # The request waits for a load by now: it must end, and all that it was to bring is computed.
            if stage is not None:
                stage.release()
                self._room.ended()
            known.denied = "plan"
            self.planned.append(failed_plan(self.number(), known.name, known.behind_local(ids, self._groups)))
            raise
        number = self.number()
        self.claim(number, known, stage)
        self.planned.append(LoadPlan(number, known.name, parts))
        self._add("loaded_tokens", external_tokens)
        for group in self._groups:
            # Where it came short of what the lookup said, blocks behind it are missing or bad: they are stored again.
            held = known.offered[group.index] if stage.ready_tokens >= stage.end_tokens else 0
            end = stage.ready_tokens // group.block_tokens
            if group.window_tokens and stage.first_tokens // group.block_tokens > group.first_needed(0, end):
                # What its tail has in front of the local hit was not asked for: the node need not hold it.
                end = 0
            known.offered[group.index] = max(held, end)

    def number(self) -> int:
        """Of a plan that is made now."""
        number, self._next_load = self._next_load, self._next_load + 1
        return number

    def claim(self, number: int, known: Known, stage: Stage) -> None:
        """Until all ranks are through with this plan, the stage stays."""
        stage.claimed = True
        self._loading[number] = Loading(known.name, stage, known)

    def take_plans(self) -> list[LoadPlan]:
        planned, self.planned = self.planned, []
        self._steps += 1
        self.standing.step()
        return planned

    def through(self, told: KvtierWorkerMetadata) -> list[tuple[str, bool]]:
        """What workers said of their copies; the requests that all ranks are through with, and whether bytes of them were bad."""
        ended = []
        for number, ranks in told.loaded.items():
            loading = self._loading.get(number)
            if loading is None:
                continue
            loading.through.update(ranks)
            if number in told.missed:
                # Its blocks are sound where they are, and held: they are not stored again. What kept it from being copied may stay.
                loading.known.denied = "failed"
            for share, indexes in told.bad.get(number, {}).items():
                loading.bad.setdefault(share, set()).update(indexes)
            if loading.through >= self._node.ranks:
                del self._loading[number]
                loading.stage.release(loading.bad)
                self._room.ended()
                if loading.bad:
                    self._add("corrupt_blocks", sum(len(indexes) for indexes in loading.bad.values()))
                ended.append((loading.request, bool(loading.bad)))
        return ended

    def expire(self, requests: Iterable[Known], now: float) -> None:
        """Leases of requests that the engine does not come to."""
        limit = now - self._options.lease_ms / 1e3
        for known in requests:
            if known.stage is not None and not known.stage.claimed and known.stage.asked_at < limit:
                self.leave(known)
                self._forget(known)
                self._add("leases_expired", 1)

    def _add(self, name: str, count: int) -> None:
        self._counters[name] = self._counters.get(name, 0) + count
