"""The connector for vLLM: prefill and decode in different pods, and what a long prompt costs the loop of an engine."""

from __future__ import annotations

import os
import sys
import time
import types
import unittest
from dataclasses import replace
from typing import Any
from unittest import mock

from rig import Node, until

from engine_case import EngineCase, prompts
from engine_parts import GroupShape, Shape
from engine_play import Engine
from kvtier import copies
from kvtier.vllm import hints, lookups, pace, staging, storing
from kvtier.vllm.messages import KvtierMetadata
from kvtier.vllm.worker import WorkerHalf


class Handed(EngineCase):
    """Prefill in one pod, decode in another: the answer's `kv_transfer_params` are all that goes between them."""

    def test_waits_until_it_is_held(self) -> None:
        for shape in (Shape(), Shape(tp=2), Shape([GroupShape(), GroupShape("window", window=9)], blocks=160)):
            text = prompts(1, 41)[0]
            (wanted,) = self.serve(self.alone(shape), [text])
            node, shape = self.shared(), self.own(shape)
            first, params = self.prefill(node, shape, text)
            self.assertEqual(params["remote_num_tokens"], 40)
            self.assertEqual(len(params["remote_block_ids"]), len(shape.groups))
            second = self.play(node, shape)
            second.add("decode", text, 4, kv_transfer_params=params)

            def waits() -> bool:
                second.step()
                return "promises" in second.connector._scheduler.counters

            until("it waits", waits)
            self.assertEqual(second.external_tokens, 0)
            first.run()
            second.run()
            self.check(first)
            self.check(second)
            self.assertEqual(second.done["decode"].output_tokens(), wanted)
            self.assertEqual(second.external_tokens, 40)
            self.assertEqual(second.connector._scheduler.counters["promises"], 1)

    def test_a_promise_that_is_not_kept(self) -> None:
        """The prefill pod is gone: one deadline, then it is computed."""
        node = self.shared()
        shape = self.own(Shape(options={"promise_deadline_ms": 400}))
        text = prompts(1, 41)[0]
        _, params = self.prefill(node, shape, text)
        second = self.play(node, shape)
        began = time.monotonic()
        (tokens,) = self.serve(second, [text], kv_transfer_params=params)
        self.assertEqual(second.external_tokens, 0)
        self.assertLess(time.monotonic() - began, 9)  # far from it, and below the deadline that there is where none is said
        self.no_leases(second)

    def test_no_more_is_promised_than_finds_room(self) -> None:
        """Of 20 blocks that one step fills 12 may be held: the other pod waits for these, and computes the rest at once."""
        node, text = self.shared(), prompts(1, 81)[0]
        shape = self.own(Shape(step_tokens=128, options={"held_blocks_share": 0.13, "promise_deadline_ms": 60_000}))
        (wanted,) = self.serve(self.alone(shape), [text])
        first, params = self.prefill(node, shape, text)
        first.run()
        self.check(first)
        self.until_held(node, first, 48)
        self.assertEqual((self.held(first, first.done["prefill"]), params["kvtier"]["tokens"]), (48, 48))
        second = self.play(node, shape)
        began = time.monotonic()
        self.assertEqual(self.serve(second, [text], kv_transfer_params=params), [wanted])
        self.assertLess(time.monotonic() - began, 20)
        self.assertEqual(second.external_tokens, 48)

    def test_all_that_the_last_step_filled_is_stored_in_as_many_offers_as_it_takes(self) -> None:
        node, text = self.shared(), prompts(1, 81)[0]
        with mock.patch.object(storing, "MAX_OFFER_BLOCKS", 6):
            first, params = self.prefill(node, self.own(Shape(step_tokens=128)), text)
            first.run()
        self.check(first)
        self.until_held(node, first, 80)
        self.assertEqual(params["kvtier"]["tokens"], 80)
        self.assertNotIn("store_left_out_blocks", first.connector._scheduler.counters)

    def test_promises_of_strangers(self) -> None:
        """Other names, other tokens, nonsense: nobody waits."""
        node = self.shared()
        shape = self.own(Shape(options={"promise_deadline_ms": 60_000}))
        text = prompts(1, 41)[0]
        _, params = self.prefill(node, shape, text)
        second = self.play(node, shape)
        said = params["kvtier"]
        for change in (
            {"namespace": "00" * 32}, {"last_hash": "00" * 32}, {"tokens": -4}, {"tokens": True}, {"tokens": 10**6},
            {"tokens": "40"}, {"last_hash": None}, {"namespace": 5}, {"namespace": "00" * 32, "ticket": 7},
        ):
            began = time.monotonic()
            self.serve(second, [text], kv_transfer_params={**params, "kvtier": {**said, **change}})
            self.assertLess(time.monotonic() - began, 20, change)
            second.pool.cached.clear()
        self.serve(second, [text], kv_transfer_params={**params, "kvtier": [1]})
        self.assertEqual(second.connector._scheduler.counters.get("promises", 0), 0)

    def test_a_store_is_all_that_links_the_pods(self) -> None:
        """Nothing of the prefill's answer reaches the decode pod: it loads what is committed when it asks, and waits for nothing."""
        node, shape = self.shared(), self.own(Shape())
        text = prompts(1, 41)[0]
        first = self.play(node, shape)
        first.add("prefill", text, 1)
        while "prefill" not in first.done:
            first.step()
        second = self.play(node, shape)
        (wanted,) = self.serve(self.alone(), [text])
        self.assertEqual(self.serve(second, [text]), [wanted])  # before its last blocks are committed
        self.assertEqual(second.connector._scheduler.counters.get("promises", 0), 0)
        first.run()
        self.until_held(node, first, 40)
        third = self.play(node, shape)
        self.assertEqual(self.serve(third, [text]), [wanted])
        self.assertEqual(third.external_tokens, 40, self.told(third))

    def test_the_keys_of_the_answer(self) -> None:
        """Those that NIXL's connector of vLLM 0.27 gives, and one of ours beside them. Blocks are found by their names; the
        node's boot epoch says only whether they can come from there."""
        _, params = self.prefill(self.shared(), self.own(Shape()), prompts(1, 41)[0])
        nixls = {
            "do_remote_prefill", "do_remote_decode", "remote_block_ids", "remote_engine_id", "remote_request_id", "remote_host",
            "remote_port", "tp_size", "remote_num_tokens", "remote_blocks_expiry_time", "transfer_mode",
        }
        self.assertEqual(params.keys(), nixls | {"kvtier"})
        self.assertEqual((params["do_remote_prefill"], params["transfer_mode"]), (True, "pull"))
        self.assertEqual(params["kvtier"].keys(), {"namespace", "tokens", "last_hash", "ticket", "node"})

    def test_prefills_and_decodes_that_are_aborted(self) -> None:
        """A prefill that nobody gets an answer of pins nothing. A decode pod that refuses its request lets its engine know by a request
        that is aborted as soon as it has come: it waits for nothing, and leaves nothing."""
        node, shape, text = self.shared(), self.own(Shape()), prompts(1, 41)[0]
        _, params = self.prefill(node, shape, text)
        engine = self.play(node, shape)
        pins: list[object] = []
        engine.connector._scheduler._node.pin = lambda *args: pins.append(args)
        engine.add("given up", text, 8, kv_transfer_params={"do_remote_decode": True})
        until("it has computed", lambda: (engine.step(), engine.requests["given up"].output_tokens())[1])
        engine.abort("given up")
        self.assertEqual((engine.done["given up"].answer, pins), (None, []))
        engine.add("refused", [0], 1, kv_transfer_params=params)
        engine.abort("refused")
        engine.run()
        self.check(engine)
        self.no_leases(engine)
        self.assertEqual((engine.connector._scheduler._requests, pins), ({}, []))

    def test_a_load_beside_a_local_hit_that_is_aborted_leaves_nothing(self) -> None:
        """Of a window the whole tail is to be offered after it, what it was to bring, too: nothing has filled that yet. The request was
        preempted: steps of its own once went as far."""
        text, node = prompts(1, 41)[0], self.shared()
        shape = self.own(Shape([GroupShape(), GroupShape("window", window=9)], blocks=160))
        first, _ = self.prefill(node, shape, text)
        first.run()
        names = b"".join(first.done["prefill"].block_hashes[:10])
        sessions = first.connector._scheduler._node.attached().sessions

        def is_held() -> bool:
            asked = [session.lookup(names, gaps=True, deadline_s=5) for session in sessions]
            ends = [[end for _, end in one.result().ranges] if one.wait(5) and one.error is None else [] for one in asked]
            return all(of[-1:] == [10] for of in ends)

        until("all of its tail is held", is_held)
        second = self.play(node, shape)
        stores = second.connector._scheduler._stores
        most, stores.holder.most = stores.holder.most, 0
        second.add("gone", text, 9)
        request = second.requests["gone"]
        with mock.patch.object(second.connector, "get_num_new_matched_tokens", return_value=(0, False)):
            until("it computes", lambda: (second.step(), request.output_tokens())[1])
        second._preempt(request)
        for group in (0, 1):  # another has taken its last whole block
            second.pool.blocks[second.pool.cached.pop((group, request.block_hashes[9]))].block_hash = None
        stores.holder.most = most
        with mock.patch.object(WorkerHalf, "finished", return_value=set()):
            until("it loads", lambda: (second.step(), request.state == "loading")[1])
        self.assertEqual((second.local_tokens, second.external_tokens, request.num_computed_tokens), (36, 4, 40))
        second.abort("gone")
        self.assertFalse(stores.pending)
        second.run()
        self.check(second)
        self.assertEqual(self.stored(second), 0)

    def test_what_is_promised_is_pinned(self) -> None:
        node = self.node(arena_bytes=1 << 20, disk_bytes=None)
        text = prompts(1, 41)[0]
        first, params = self.prefill(node, Shape(), text)
        first.run()
        half = first.connector._scheduler
        until("it is pinned", lambda: not half._node._pins)
        for seed in range(20):  # more than the arena holds
            self.serve(first, prompts(5, seed=seed + 2))
        second = self.play(node)
        self.serve(second, [text], kv_transfer_params=params)
        self.assertEqual(second.external_tokens, 40)


class Hinted(EngineCase):
    """KV hints of an orchestrator that is trusted."""

    @staticmethod
    def hint(kind: str, **payload: Any) -> dict[str, Any]:
        action = {"action_id": "1", "action_type": kind, "action_version": "1.0", "payload": payload}
        return {"kv_hints": {"protocol_version": "0.1", "message_id": "m", "actions": [action]}}

    def test_a_pin_outlives_what_comes_after_it(self) -> None:
        text = prompts(1, 41)[0]
        for kind, most, kept in (("kv.pin", 60_000, 40), ("kv.retain", 60_000, 40), ("kv.pin", 0, 0)):
            node = self.node(arena_bytes=1 << 20, disk_bytes=None)
            shape = Shape(options={"hint_pin_ms": most})
            first = self.play(node, shape)
            self.serve(first, [text], kv_transfer_params=self.hint(kind, ttl_ms=50_000))
            until("it is pinned", lambda: not first.connector._scheduler._node._pins)
            for seed in range(20):  # more than the arena holds
                self.serve(first, prompts(5, seed=seed + 2))
            second = self.play(node, shape)
            self.serve(second, [text])
            self.assertEqual(second.external_tokens, kept, self.told(first, second))

    def test_each_action_by_its_outcome(self) -> None:
        engine = self.play(self.shared(), self.own(Shape(options={"hint_pin_ms": 60_000})))

        def outcomes(text: list[int], **params: Any) -> list[int]:
            counters = engine.connector._scheduler.counters
            names = ("hints_done", "hints_clipped", "hints_ignored")
            before = [counters.get(name, 0) for name in names]
            self.serve(engine, [text], kv_transfer_params=params)
            return [counters[name] - count for name, count in zip(names, before)]

        whole, short = prompts(1, 41)[0], [5, 6]
        self.assertEqual(outcomes(whole, **self.hint("kv.retain", ttl_ms=50)), [1, 0, 0])
        self.assertEqual(outcomes(whole, **self.hint("kv.retain")), [1, 0, 0])
        self.assertEqual(outcomes(whole, **self.hint("kv.pin", ttl_ms=90_000)), [0, 1, 0])
        self.assertEqual(outcomes(whole, **self.hint("kv.prefetch")), [1, 0, 0])
        self.assertEqual(outcomes(whole, **self.hint("kv.demote")), [0, 0, 1])
        # Less than a block: there is nothing to keep.
        engine.add("short", short, 1, kv_transfer_params=self.hint("kv.pin", ttl_ms=5))
        ignored = engine.connector._scheduler.counters["hints_ignored"]
        engine.run()
        self.assertEqual(engine.connector._scheduler.counters["hints_ignored"], ignored + 1)

    def test_what_is_heeded(self) -> None:
        def counted(params: Any, clipped: int = 0) -> tuple[float, int, int]:
            said = hints.of(types.SimpleNamespace(kv_transfer_params=params), 100.0)
            self.assertEqual(said.clipped, clipped)
            return said.pin_s, said.done + said.pinned + said.clipped, said.ignored

        for kind in ("kv.pin", "kv.retain"):
            self.assertEqual(counted(self.hint(kind, ttl_ms=5_000)), (5.0, 1, 0))
            self.assertEqual(counted(self.hint(kind, ttl_ms=100_000)), (100.0, 1, 0))
            self.assertEqual(counted(self.hint(kind, ttl_ms=5_000_000), clipped=1), (100.0, 1, 0))
        self.assertEqual(counted(self.hint("kv.retain", priority=3)), (100.0, 1, 0))
        self.assertEqual(counted(self.hint("kv.retain", ttl_ms="long")), (0.0, 0, 1))
        self.assertEqual(counted(self.hint("kv.prefetch")), (0.0, 1, 0))
        self.assertEqual(counted({"kv_hint": self.hint("kv.fetch")["kv_hints"]}), (0.0, 1, 0))
        self.assertEqual(counted(None), (0.0, 0, 0))
        for ttl in (0, -1, True, "5", None, float("nan"), float("inf")):
            self.assertEqual(counted(self.hint("kv.pin", ttl_ms=ttl)), (0.0, 0, 1), ttl)
        for nonsense in (5, "x", [], {}, {"protocol_version": "1.0", "actions": []}, {"protocol_version": "0.1", "actions": 3}):
            self.assertEqual(counted({"kv_hints": nonsense}), (0.0, 0, 1), nonsense)
        self.assertEqual(counted({"kv_hints": {"protocol_version": "0.1", "actions": [None, {}, {"action_type": []}]}}), (0.0, 0, 3))
        self.assertEqual(counted({"kv_hints": {"protocol_version": "0.1", "actions": [{"action_type": "kv.fetch"}] * 20}}), (0.0, 16, 4))


class Planned(EngineCase):
    """A load that computing would beat is not begun, or ends in time."""

    def test_what_the_node_says_is_slower_is_computed(self) -> None:
        node, shape = self.shared(), self.own(Shape())
        text = prompts(1, 41)[0]
        (wanted,) = self.serve(self.play(node, shape), [text])
        for plans, said_ms, loaded in ((True, 15_000.0, 0), (True, 1.0, 40), (False, 15_000.0, 40)):
            engine = self.play(node, replace(shape, options={**shape.options, "plan_loads": plans}))
            said = mock.patch.object(lookups.Lookups, "estimated_ms", lambda _self, _tokens, said=said_ms: said)
            with said, mock.patch.object(pace, "BASE_MS", 10_000.0):  # a busy machine takes its time
                self.assertEqual(self.serve(engine, [text]), [wanted])
            self.assertEqual(engine.external_tokens, loaded, self.told(engine))

    def test_a_step_that_computes_nothing_stands_for_its_loads(self) -> None:
        """Else the engine would sleep, and look again later. A step that computes stands for nothing."""
        node, shape = self.shared(), self.own(Shape())
        texts = prompts(1, 41) + prompts(1, 41, seed=9)
        first = self.play(node, shape)
        wanted = self.serve(first, texts[:1], outputs=200) + self.serve(first, texts[1:])
        until("both are held", lambda: all(self.held(first, one) >= 40 for one in first.done.values()))
        stood: list[bool] = []
        real = copies.Copies.load

        def slow(*args: Any) -> copies.Job:
            job = real(*args)
            ended = job.ended
            came: list[bool] = []

            def looked(wait_s: float = 0.0) -> bool:  # as one that takes its time: it has come when somebody has waited, or comes again
                stood.append(wait_s > 0)
                is_due = wait_s > 0 or any(came) or len(came) > 3
                came.append(is_due and ended(5.0))  # and never before it truly has
                return came[-1]

            job.ended = looked  # type: ignore[method-assign]
            return job

        def loading(engine: Engine, name: str) -> bool:
            engine.step()
            return engine.requests[name].state == "loading"

        with mock.patch.object(copies.Copies, "load", slow):
            patient = replace(shape, options={**shape.options, "patience_us": 20_000}, prefix_caching=False)
            second = self.play(node, patient)
            second.add("idle", texts[0], outputs=200)
            until("it is loaded", lambda: loading(second, "idle"))
            self.assertEqual(second._received, {"idle"})  # in the step that began it
            self.assertEqual(stood, [True, False])
            second.step()
            stood.clear()
            second.add("busy", texts[1])
            until("the other is loaded", lambda: loading(second, "busy"))
            self.assertEqual((second.requests["idle"].state, stood), ("running", [False]))
            second.run()
        self.assertEqual([second.done[name].output_tokens() for name in ("idle", "busy")], wanted)
        self.assertEqual(second.external_tokens, 80)
        self.assertEqual(stood[0], False)
        self.check(second)

    def test_the_only_request_is_waited_for_longer(self) -> None:
        """Where there is nothing else to do, a step stands three patiences at most; beside others one for each answer."""
        node, shape = self.shared(), self.own(Shape())
        texts = prompts(2)
        first = self.play(node, shape)
        wanted = self.serve(first, texts)
        self.until_held(node, first, 40)
        waited: list[float] = []
        age_s = 0.0
        real = staging.Stage.wait

        def wait(stage: staging.Stage, wait_s: float) -> bool:
            waited.append(round(wait_s, 6))
            stage.began_at -= age_s
            return real(stage, 0.0) if len(waited) < 3 else real(stage, wait_s)

        second = self.play(node, replace(shape, options={**shape.options, "patience_us": 20_000}, prefix_caching=False))
        half = second.connector._scheduler

        def ask(*names: str) -> None:
            for name, text in zip(names, texts):
                second.add(name, text)
            until("the node has answered", lambda: all(half._requests[name].lookups.done for name in names))

        with mock.patch.object(staging.Stage, "wait", wait):
            ask("alone")
            second.run()
            self.assertEqual(waited[0], 0.06)
            self.assertLessEqual(set(waited[1:]), {0.04})  # in the next step: what it may stand longer
            waited[:], age_s = [], 1.0
            ask("slow")
            second.run()
            self.assertEqual(waited, [0.06])  # what takes long is waited for in no further step
            age_s = 0.0
            waited[:] = [0.0] * 3
            ask("one", "other")
            second.run()
            self.assertEqual(waited[3:5], [0.02, 0.02])
            self.assertLessEqual(set(waited[5:]), {0.04})  # of one that a busy machine did not bring by then, in a later step
        self.assertEqual(second.done["alone"].output_tokens(), wanted[0])
        self.check(second)

    def test_the_pace_of_steps(self) -> None:
        one = pace.Pace()
        self.assertEqual(one.limit_ms(1_000, 2_000), 250)
        one.step(1_000, False, 1.0)
        one.step(1_000, False, 9.0)  # it was idle
        self.assertIsNone(one.us_per_token)
        one.step(10, True, 9.1)
        self.assertAlmostEqual(one.us_per_token or 0, 100)
        one.step(1_000, True, 9.2)  # of ten tokens: says nothing
        one.step(1_000, True, 9.25)
        self.assertAlmostEqual(one.us_per_token or 0, 87.5)
        self.assertAlmostEqual(one.limit_ms(1_000, 2_000), 50 + 1.25 * 87.5)  # on a busy machine computing is slow, too
        self.assertEqual(one.limit_ms(10**6, 2_000), 2_000)

    def test_how_long_an_answer_is_waited_for(self) -> None:
        one = pace.Pace()
        self.assertEqual(one.answer_ms(10, 50, 2_000), 500)  # nothing was computed yet
        self.assertEqual(one.answer_ms(10, 50, 200), 200)
        one.step(1_000, True, 1.0)
        one.step(1_000, True, 1.8)
        self.assertEqual(one.us_per_token, 800)
        self.assertEqual(one.answer_ms(100, 50, 2_000), 50)
        self.assertEqual(one.answer_ms(1_000, 50, 2_000), 200)
        self.assertEqual(one.answer_ms(10**6, 50, 2_000), 2_000)
        self.assertEqual(one.answer_ms(10**6, 5_000, 2_000), 5_000)


class Cost(EngineCase):
    """All that the loop of the engine spends in the scheduler's half on a prompt of 32k tokens that is held."""

    def instructions(self, engine: Any, text: list[int]) -> int:
        """Of Python, in the dearest call of each kind: the same on a busy machine, and a loop over blocks would be thousands."""
        most: dict[str, int] = {}
        count = 0

        def traced(frame: Any, event: str, _argument: Any) -> Any:
            nonlocal count
            frame.f_trace_opcodes, frame.f_trace_lines = True, False
            count += event == "opcode"
            return traced

        for name in ("get_num_new_matched_tokens", "build_connector_meta"):
            real = getattr(engine.connector, name)

            def counted(*args: Any, real: Any = real, name: str = name) -> Any:
                nonlocal count
                count = 0
                engine.connector._scheduler._expire_at = 0.0  # what it does twice a second, it does now
                sys.settrace(traced)
                try:
                    return real(*args)
                finally:
                    sys.settrace(None)
                    most[name] = max(most.get(name, 0), count)

            setattr(engine.connector, name, counted)
        self.serve(engine, [text], outputs=1)
        if os.environ.get("KVTIER_BENCH"):
            print(f"32k tokens: instructions of Python {most}")
        return sum(most.values())

    def test_a_prompt_of_32k_tokens(self) -> None:
        blocks = 2048
        shape = Shape([GroupShape(layers=1, block_tokens=16)], blocks=blocks + 8, heads=1, dim=1, prefix_caching=False,
                      step_tokens=40_000, options={"held_blocks_share": 0.5, "patience_us": 0})
        node = self.node()
        text = list(range(blocks * 16))
        engine = self.play(node, shape)
        while self.stored(engine) < blocks:
            self.serve(engine, [text], outputs=2)
        spent: dict[str, float] = {}
        for name in ("get_num_new_matched_tokens", "build_connector_meta"):
            real = getattr(engine.connector, name)

            def timed(*args: Any, real: Any = real, name: str = name) -> Any:
                began = time.thread_time_ns()  # what it costs, and not what others on this machine do
                given = real(*args)
                took = (time.thread_time_ns() - began) / 1e3
                # Of hundreds of steps in which nothing is new, the dearest is the one in which the machine did something else.
                if not isinstance(given, KvtierMetadata) or given.loads or args[0].scheduled_new_reqs:
                    spent[name] = max(spent.get(name, 0.0), took)
                return given

            setattr(engine.connector, name, timed)
        sums = []
        for _ in range(9 if os.environ.get("KVTIER_BENCH") else 3):
            spent.clear()
            before = engine.external_tokens
            self.serve(engine, [text], outputs=1)
            self.assertEqual(engine.external_tokens - before, blocks * 16)
            sums.append(sum(spent.values()))
        for name in spent:
            delattr(engine.connector, name)  # what times it is none of it
        self.assertLess(self.instructions(engine, text), 1_600)
        limit = 50 + 0.02 * blocks
        if os.environ.get("KVTIER_BENCH"):
            print(f"32k tokens: {min(sums):.0f} us at best, {sorted(sums)[len(sums) // 2]:.0f} us at the median, limit {limit:.0f} us; {spent}")
        # The figure is for a quiet machine; what grows with more than the blocks is found on any.
        self.assertLess(min(sums), 8 * limit)


if __name__ == "__main__":
    unittest.main()
