"""vLLM's native offloading over a node, played against real cache nodes: as test_vllm_connector, with `offload_double` for vLLM's part."""

from __future__ import annotations

import signal
import unittest
from dataclasses import replace
from typing import Any
from unittest import mock

import offload_double
from rig import until

offload_double.install()

from engine_case import EngineCase, prompts  # noqa: E402
from engine_parts import GroupShape, Pool, Shape  # noqa: E402
from kvtier.vllm import offload_scheduler  # noqa: E402
from kvtier.vllm.connector import KvtierConnector  # noqa: E402
from kvtier.vllm.stats import PREFIX  # noqa: E402
from kvtier.vllm.offloading import KvtierOffloadingConnector, KvtierOffloadingSpec  # noqa: E402


def offloading(*groups: GroupShape, **more: object) -> Shape:
    return Shape(list(groups) or [GroupShape()], connector=KvtierOffloadingConnector, **more)  # type: ignore[arg-type]


class Offloading(EngineCase):
    """What one engine computed, another one loads; both give the tokens of an engine without a node."""

    def test_full_attention_of_each_layout(self) -> None:
        for layout in ("hnd", "split", "packed", "strided"):
            with self.subTest(layout=layout):
                self.both(offloading(GroupShape(layout=layout)))

    def test_ranks(self) -> None:
        self.both(offloading(tp=2))
        self.both(offloading(tp=2, pp=2))
        self.both(offloading(GroupShape("mla"), tp=2, heads=1))

    def test_windows_and_hybrids(self) -> None:
        texts = [[n * 100 + i for i in range(49)] for n in range(4)]
        self.both(offloading(GroupShape("window", window=9), blocks=160), 0.9, texts)
        self.both(offloading(GroupShape(), GroupShape("window", window=9), GroupShape("window", window=14), blocks=200), 0.9, texts)

    def test_what_was_pinned_for_it_is_let_go(self) -> None:
        """When it has loaded it, and when its request goes without."""
        text = prompts(1, 41)[0]
        for loads in (True, False):
            shape = self.own(Shape(options={"pin_ms": 600_000}))
            first, params = self.prefill(self.shared(), shape, text)
            first.run()
            until("it is pinned", lambda first=first: not first.connector._scheduler._node._pins)
            options = {**shape.options, "load": loads}
            second = self.play(self.shared(), replace(shape, connector=KvtierOffloadingConnector, options=options))
            second.add("decode", text, 4, kv_transfer_params=params)
            second.run()
            self.check(second)
            ended = second.connector._scheduler.counters.get("pins_ended", 0)
            self.assertEqual((ended, second.external_tokens > 0), (1, loads), self.told(second))

    def test_what_a_window_has_left_is_given_away_at_once(self) -> None:
        """In the step after it was stored, the blocks that the window has left are another request's: the whole prompt is stored all the same."""

        def last_freed_first(pool: Pool, blocks: object) -> None:
            freed(pool, blocks)
            for block in blocks:  # type: ignore[attr-defined]
                if block.block_id in pool.free:
                    pool.free.move_to_end(block.block_id, last=False)

        freed = Pool.free_blocks
        texts = [[n * 100 + i for i in range(49)] for n in range(6)]
        node, shape = self.shared(), self.own(offloading(GroupShape("window", window=9), step_tokens=64))
        with mock.patch.object(Pool, "free_blocks", last_freed_first):
            first = self.play(node, shape)
            given = []
            flush = first.workers[0].connector._worker.flush
            first.workers[0].connector._worker.flush = lambda number, until: (given.append(number), flush(number, until))
            step, stores = first.step, first.connector._scheduler._stores
            # A model's step takes longer than the node's answer; what is given away before it would not be stored.
            reserved = lambda: all(part.reservation.done for offer in list(stores._offers.values()) for part in offer.parts)
            first.step = lambda: (until("slots are reserved", reserved), step())[1]
            wanted = self.serve(first, texts)
        self.assertGreater(len(given), 2)
        second = self.play(node, shape)
        self.assertEqual(self.serve(second, texts), wanted)
        self.assertEqual(second.external_tokens, 6 * 48, self.told(first, second))

    def test_what_follows_a_long_hit_in_the_engine_is_stored_too(self) -> None:
        """vLLM offers the whole hit with it, once."""
        node, shape = self.shared(), self.own(offloading(blocks=3000, step_tokens=1024))
        first, text = self.play(node, shape), [i % 997 for i in range(5501)]
        self.serve(first, [text[:5001]], 1)
        self.until_held(node, first, 5000)
        reserved: list[int] = []
        for session in first.connector._scheduler._node.attached().sessions:
            reserve = session.reserve

            def counted(parent: bytes, chain: bytes, reserve: Any = reserve, **more: Any) -> Any:
                reserved.append(len(chain) // 32)
                return reserve(parent, chain, **more)

            session.reserve = counted
        wanted = self.serve(first, [text], 1)
        self.assertEqual(reserved, [1024, 351])
        self.until_held(node, first, 5500)
        self.assertEqual(self.stored(first), 1375)
        second = self.play(node, shape)
        self.assertEqual(self.serve(second, [text], 1), wanted)
        self.assertEqual(second.external_tokens, 5500, self.told(first, second))

    def test_a_store_is_committed_as_each_of_its_pieces_was_reserved(self) -> None:
        """Several of them may be of one share, and workers tell of it once."""
        with mock.patch.object(offload_scheduler, "MAX_OFFER_BLOCKS", 3):
            self.both(offloading(step_tokens=48), 1.0)

    def test_what_there_is_no_room_for_is_counted_as_left_out(self) -> None:
        node = self.shared()
        engine, text = self.play(node, self.own(offloading(step_tokens=48))), prompts(1, 41)[0]
        engine.connector._scheduler._stores.holder.most = 6
        self.serve(engine, [text], 1)
        self.until_held(node, engine, 24)
        counters = engine.connector._scheduler.counters
        self.assertEqual((counters["store_left_out_blocks"], counters.get("store_refused_blocks", 0)), (4, 0), counters)

    def test_chunks_and_steps_ahead(self) -> None:
        self.both(offloading(step_tokens=7))
        self.both(offloading(asynchronous=True))

    def test_blocks_given_away(self) -> None:
        """Too few blocks: stores are flushed, requests preempted."""
        engine = self.play(self.shared(), self.own(offloading(blocks=30, step_tokens=48)))
        texts = prompts(6, 40, 8)
        wanted = self.serve(self.alone(Shape(blocks=30, step_tokens=48)), texts, outputs=16)
        for _ in range(3):
            self.assertEqual(self.serve(engine, texts, outputs=16), wanted)
        self.assertGreater(engine.preemptions, 0)

    def test_it_shares_with_the_connector(self) -> None:
        for to, of in ((KvtierOffloadingConnector, None), (None, KvtierOffloadingConnector)):
            node, shape = self.shared(), self.own(Shape())
            writes, reads = replace(shape, connector=to), replace(shape, connector=of)
            texts = prompts(5)
            first = self.play(node, writes)
            wanted = self.serve(first, texts)
            self.until_held(node, first, 40)
            second = self.play(node, reads)
            self.assertEqual(self.serve(second, texts), wanted)
            self.assertGreaterEqual(second.external_tokens + second.local_tokens, 5 * 40, self.told(first, second))

    def test_bytes_that_changed_after_they_were_checked(self) -> None:
        """Nothing is loaded that is not what it was; the engine goes on."""
        node = self.node()
        texts = prompts(3)
        first = self.play(node, offloading())
        wanted = self.serve(first, texts)
        self.until_held(node, first, 40)
        second = self.play(node, offloading(prefix_caching=False))
        half = second.connector._scheduler
        plan, flips = half.plan_load, []

        def spoilt(name: str, keys: object) -> int:
            number = plan(name, keys)
            flips.append(number)
            if len(flips) == 1:
                self.flip(second)
            return number

        half.plan_load = spoilt
        self.assertEqual(self.serve(second, texts), wanted)
        self.assertGreater(half.counters["corrupt_blocks"], 0)

    def test_a_node_that_is_stopped_or_killed(self) -> None:
        for number in (signal.SIGSTOP, signal.SIGKILL):
            node = self.node()
            texts = prompts(4)
            first = self.play(node, offloading(prefix_caching=False))
            wanted = self.serve(first, texts)
            self.until_held(node, first, 40)
            node.send(number)
            self.assertEqual(self.serve(first, texts), wanted)
            if number == signal.SIGSTOP:
                node.send(signal.SIGCONT)
                until("it is served again", lambda: first.connector._scheduler._node.attached() is not None)
                before = first.external_tokens
                self.assertEqual(self.serve(first, texts), wanted)
                self.assertGreater(first.external_tokens, before)

    def test_other_requests(self) -> None:
        node, shape = self.shared(), self.own(offloading())
        engine = self.play(node, shape)
        text = prompts(1)[0]
        self.serve(engine, [text], lora_request=object())
        self.serve(engine, [text], kv_transfer_params={"kvtier": {"store": False}})
        self.assertEqual(self.stored(engine), 0)
        self.serve(engine, [text[:36]])
        self.until_held(node, engine, 36)
        other = self.play(node, shape)
        self.serve(other, [text], skip_reading=True)
        self.assertEqual(other.external_tokens, 0)

    def test_its_counters_are_vllms_metrics(self) -> None:
        """All of them declared, by the configuration as the API server has it, and counted of both halves."""
        node, texts = self.shared(), prompts(3)
        engine = self.play(node, self.own(offloading(prefix_caching=False)))
        metrics = KvtierOffloadingConnector.build_prom_metrics(engine.vllm_config(0), {}, [], {})
        for connector in (engine.connector, engine.workers[0].connector):
            ask = connector.get_kv_connector_stats

            def asked(ask: Any = ask) -> Any:
                told = ask()
                if told is not None:
                    metrics.observe(told.data)
                return told

            connector.get_kv_connector_stats = asked
        self.serve(engine, texts)
        self.until_held(node, engine, 40)
        self.serve(engine, texts)
        engine.connector.get_kv_connector_stats()
        half = engine.connector._scheduler
        for name in ("unasked", "unasked_hits", "loads", "loaded_blocks", "stored_blocks"):
            self.assertEqual(metrics.told[f"vllm:kvtier_{name}"], half.counters[name])

        def tiers_are_told() -> bool:
            engine.connector.get_kv_connector_stats()
            return ("kvtier_tier_blocks", ("arena",)) in metrics.gauges

        until("the node's tiers are told", tiers_are_told)
        self.assertEqual(metrics.gauges["kvtier_tier_in_service", ("disk",)], 1)
        self.assertEqual(metrics.told["vllm:kvtier_loaded_bytes"], engine.workers[0].connector._worker.loaded_bytes)
        self.assertGreater(half.counters["loaded_blocks"], 0)

    def test_whether_it_is_attached(self) -> None:
        """By both connectors: 0 before anything is said, so that an engine that never attaches is seen; 1 while all ranks have the arena."""
        for kind in (KvtierConnector, KvtierOffloadingConnector):
            node = self.node()

            def stepped(engine: Any) -> int:
                """What was said last, in this step or one before it."""
                ask, said = engine.connector.get_kv_connector_stats, vars(engine).setdefault("said", [])

                def asked() -> Any:
                    stats = ask()
                    data = stats.data if stats is not None else {}
                    gauges = data.get("gauges") or {name[len(PREFIX) :]: of[()] for name, of in data.get("data", {}).items() if () in of}
                    said.extend([gauges["attached"]] if "attached" in gauges else [])
                    return stats

                with mock.patch.object(engine.connector, "get_kv_connector_stats", asked):
                    engine.step()
                return said[-1]

            nobody = self.play(None, Shape(connector=kind), socket="/nowhere/node.sock", attached=False)
            self.assertEqual(stepped(nobody), 0)
            engine = self.play(node, self.own(Shape(connector=kind, tp=2)), attached=False)
            mapped = engine.connector._scheduler._node.mapped
            engine.connector._scheduler._node.mapped = lambda found: mapped({arena: ranks & {(0, 0)} for arena, ranks in found.items()})
            until("its sessions are there", lambda: stepped(engine) or any(one.attachment for one in engine.connector._scheduler._node._sessions))
            until("a worker has it", lambda: stepped(engine) or bool(engine.connector._scheduler._node._mappings._by_workers))
            self.assertEqual(stepped(engine), 0)  # the other one has not
            engine.connector._scheduler._node.mapped = mapped
            mapped({arena: {(0, 1)} for arena in engine.connector._scheduler._node._mappings._by_workers})
            until("it is attached", lambda: stepped(engine) == 1)
            node.send(signal.SIGKILL)
            until("it is not", lambda: stepped(engine) == 0)
        metrics = KvtierOffloadingConnector.build_prom_metrics(engine.vllm_config(0), {}, [], {0: ["0"]})
        self.assertEqual(metrics.gauges, {("vllm:kvtier_attached", ()): 0})

    def test_a_spec_without_its_connector(self) -> None:
        with self.assertRaisesRegex(ValueError, '"kv_connector": "KvtierOffloadingConnector"'):
            KvtierOffloadingSpec(None)


if __name__ == "__main__":
    unittest.main()
