"""Both connectors in engines that call them as newer versions of vLLM do, played: failures by request, tables that are asked for, blocks
that are waited for, and a runner that writes to new blocks first."""

from __future__ import annotations

import itertools
import types
import unittest
from dataclasses import replace
from typing import Any
from unittest import mock

import offload_double

offload_double.install()

import engine_worker  # noqa: E402
from engine_case import EngineCase, prompts, record_releases  # noqa: E402
from engine_parts import GroupShape, Pool, Shape  # noqa: E402
from engine_play import Engine  # noqa: E402
from engine_versions import V0_27, V0_29, V0_30  # noqa: E402
from rig import until  # noqa: E402
from kvtier.errors import KvError  # noqa: E402
from kvtier.vllm import connector as connector_module  # noqa: E402
from kvtier.vllm import storing  # noqa: E402
from kvtier.vllm.connector import KvtierConnector  # noqa: E402
from kvtier.vllm.offload_scheduler import OffloadHalf  # noqa: E402
from kvtier.vllm.offloading import KvtierOffloadingConnector  # noqa: E402
from kvtier.vllm.staging import Stage  # noqa: E402
from kvtier.vllm.store_jobs import StoreJobs  # noqa: E402
from kvtier.vllm.storing import Holder, Stores  # noqa: E402
from kvtier.vllm.worker import WorkerHalf  # noqa: E402

BOTH = (KvtierConnector, KvtierOffloadingConnector)


def hybrid(**more: Any) -> Shape:
    return Shape([GroupShape(), GroupShape("window", window=9)], blocks=160, version=V0_30, **more)


class Newer(EngineCase):
    """What one engine stored, another one loads, whatever hooks it has."""

    def test_every_version_loads_what_another_engine_stored(self) -> None:
        texts = [[n * 100 + i for i in range(49)] for n in range(4)]
        for version, connector in itertools.product((V0_27, V0_29, V0_30), BOTH):
            with self.subTest(version=version, connector=connector.__name__):
                more: dict[str, Any] = {"version": version, "connector": connector}
                self.both(Shape(**more))
                self.both(Shape(tp=2, asynchronous=True, step_tokens=24, **more))
                self.both(replace(hybrid(tp=2, step_tokens=24, connector=connector), version=version), 0.9, texts)

    def test_requests_that_are_preempted(self) -> None:
        texts = prompts(6, 40, 8)
        wanted = self.serve(self.alone(), texts, outputs=16)
        for version, connector in itertools.product((V0_29, V0_30), BOTH):
            shape = self.own(Shape(blocks=30, step_tokens=48, version=version, connector=connector))
            first = self.play(self.shared(), shape)
            for _ in range(3):
                self.assertEqual(self.serve(first, texts, outputs=16), wanted)
            self.assertGreater(first.preemptions, 0)
            second = self.play(self.shared(), replace(shape, blocks=160))
            self.assertEqual(self.serve(second, texts, outputs=16), wanted)
            self.assertGreater(second.external_tokens, 0)


class Failures(EngineCase):
    """A load fails: of one group its blocks are told, of several its request, and the engine goes on."""

    def stored_by(self, shape: Shape, texts: list[list[int]]) -> list[list[int]]:
        """They are held; the tokens."""
        first = self.play(self.shared(), shape)
        wanted = self.serve(first, texts)
        self.until_held(self.shared(), first, 40)
        return wanted

    def fails_once(self, engine: Engine, rank: int, error: Exception) -> None:
        """The first copy of a load that this rank begins."""
        half = engine.workers[rank].connector._worker
        load, failed = half._load, []

        def one(part: Any, arena: Any) -> Any:
            if not failed:
                failed.append(part)
                raise error
            return load(part, arena)

        half._load = one

    def test_what_was_bad_is_computed_and_stored_again(self) -> None:
        """Bytes are flipped between claim and copy."""
        text = prompts(1, 41)[0]
        for connector, tp in itertools.product(BOTH, (1, 2)):
            with self.subTest(connector=connector.__name__, tp=tp):
                node, shape = self.node(disk_bytes=None), hybrid(connector=connector, tp=tp)
                first = self.play(node, shape)
                wanted = self.serve(first, [text])
                self.until_held(node, first, 40)
                second = self.play(node, shape)
                self.flips_what_is_claimed(second)
                second.add("r", text)
                second.run()
                self.check(second)
                self.assertEqual([second.done["r"].output_tokens()], wanted)
                self.assertEqual((second.lost_requests, second.lost_blocks), (["r"], 0))
                self.assertGreaterEqual(second.connector._scheduler.counters["corrupt_blocks"], 10 * tp)
                self.no_leases(second)
                third = self.play(node, replace(shape, prefix_caching=False))
                until("it is whole again", lambda third=third: (self.serve(third, [text]) == wanted, third.external_tokens >= 40)[1])
                self.assertEqual(third.lost_requests, [])

    def flips_what_is_claimed(self, engine: Engine) -> None:
        half = engine.connector._scheduler
        for name in ("plan_load",) if isinstance(half, OffloadHalf) else ("allocated",):
            real = getattr(half, name)

            def flipped(*args: Any, real: Any = real) -> Any:
                made = real(*args)
                if half._claims._loading:
                    self.flip(engine)
                return made

            setattr(half, name, flipped)

    def test_a_copy_that_cannot_begin_is_told_by_its_request_and_the_next_one_loads(self) -> None:
        texts = prompts(2, 41, shared=0)
        for connector in BOTH:
            with self.subTest(connector=connector.__name__):
                shape = self.own(hybrid(connector=connector))
                wanted, said = self.stored_by(shape, texts), record_releases(self)
                second = self.play(self.shared(), shape)
                self.fails_once(second, 0, KvError("BUSY", "4096 copies are under way"))
                second.add("fails", texts[0])
                with self.assertLogs("kvtier.vllm", "ERROR"):
                    second.run()
                second.add("loads", texts[1])
                second.run()
                self.assertEqual([second.done[name].output_tokens() for name in ("fails", "loads")], wanted)
                self.assertEqual((second.wrong, second.lost_requests, second.lost_blocks), ([], ["fails"], 0))
                self.assertTrue(second.all_free())
                self.no_leases(second)
                # What lies in the arena is sound: nothing of it is said to be corrupt, nor stored again.
                self.assertEqual((said, self.stored(second)), ([[], []] * 2, 0), self.told(second))

    def test_a_rank_that_fails_alone_ends_the_load_when_all_are_through(self) -> None:
        text = prompts(1, 41)[0]
        for connector in BOTH:
            with self.subTest(connector=connector.__name__):
                shape = self.own(hybrid(connector=connector, tp=2))
                wanted = self.stored_by(shape, [text])
                second = self.play(self.shared(), shape)
                self.fails_once(second, 1, KvError("BUSY", "4096 copies are under way"))
                late = second.workers[0].connector._worker
                finished, late.finished = late.finished, lambda: set()
                loading = second.connector._scheduler._claims._loading
                second.add("r", text)
                with self.assertLogs("kvtier.vllm", "ERROR"):
                    until("one rank is through", lambda: (second.step(), any(one.through for one in loading.values()))[1])
                for _ in range(3):
                    second.step()
                self.assertEqual((second.requests["r"].state, second.lost_requests), ("loading", []))
                late.finished = finished
                second.run()
                self.assertEqual(([second.done["r"].output_tokens()], second.wrong), (wanted, []))
                self.assertEqual((second.lost_requests, second.lost_blocks), (["r"], 0))
                self.assertTrue(second.all_free())
                self.no_leases(second)

    def test_of_one_group_what_is_in_front_of_a_failed_block_is_kept(self) -> None:
        text = prompts(1, 41)[0]
        for connector in BOTH:
            with self.subTest(connector=connector.__name__):
                shape = self.own(Shape(version=V0_30, connector=connector))
                wanted = self.stored_by(shape, [text])
                second, computed = self.play(self.shared(), shape), []
                half = second.workers[0].connector._worker
                settle = half._settle
                half._settle = lambda load: (load.fail([second.requests["r"].tables[0][6]]), settle(load))
                execute = second._execute
                second._execute = lambda output: (computed.extend(item.computed for item in output.work), execute(output))[1]
                second.add("r", text, 1)
                second.run()
                self.check(second)
                self.assertEqual(([second.done["r"].output_tokens()], computed), ([wanted[0][:1]], [24]))
                self.assertEqual((second.lost_requests, second.lost_blocks), ([], 1))

    def test_a_load_that_was_never_planned_ends_as_one_that_failed(self) -> None:
        text = prompts(1, 41)[0]
        for connector, broken in ((KvtierConnector, (Stage, "parts")), (KvtierOffloadingConnector, (Stage, "parts_at"))):
            with self.subTest(connector=connector.__name__):
                shape = self.own(hybrid(connector=connector))
                wanted = self.stored_by(shape, [text])
                second = self.play(self.shared(), shape)
                second.add("r", text)
                with mock.patch.object(*broken, side_effect=RuntimeError("no plan")), self.assertLogs("kvtier.vllm", "ERROR"):
                    second.run()
                self.assertEqual(([second.done["r"].output_tokens()], second.wrong), (wanted, []))
                self.assertEqual((second.lost_requests, second.lost_blocks, second.all_free()), (["r"], 0, True))
                self.no_leases(second)

    def test_jobs_without_a_plan_fail_each_by_itself(self) -> None:
        """Of native offloading: in one step several of them end so."""
        texts = prompts(3, 41, shared=0)
        shape = self.own(hybrid(connector=KvtierOffloadingConnector))
        wanted = self.stored_by(shape, texts)
        second = self.play(self.shared(), shape)
        for i, text in enumerate(texts):
            second.add(f"{i}", text)
        half = second.connector._scheduler
        fail_plan = half.fail_plan

        def unplanned(name: str, count: int) -> int:
            fail_plan(name, count)
            half._claims.planned.pop()
            return 0

        half.fail_plan = unplanned
        with mock.patch.object(half, "plan_load", side_effect=RuntimeError("on purpose")), self.assertLogs("kvtier.vllm", "ERROR"):
            second.run()
        self.assertEqual(([second.done[f"{i}"].output_tokens() for i in range(3)], second.wrong), (wanted, []))
        self.assertEqual((sorted(second.lost_requests), second.lost_blocks, second.all_free()), (["0", "1", "2"], 0, True))

    def test_who_goes_while_its_load_fails_leaves_nothing(self) -> None:
        text = prompts(1, 41)[0]
        for connector in BOTH:
            with self.subTest(connector=connector.__name__):
                shape = self.own(hybrid(connector=connector))
                self.stored_by(shape, [text])
                second = self.play(self.shared(), shape)
                self.fails_once(second, 0, KvError("BUSY", "4096 copies are under way"))
                half = second.workers[0].connector._worker
                finished, half.finished = half.finished, lambda: set()
                second.add("r", text)
                with self.assertLogs("kvtier.vllm", "ERROR"):
                    until("it loads", lambda: (second.step(), second.requests["r"].state == "loading")[1])
                    second.step()
                second.abort("r")
                half.finished = finished
                second.run()
                self.assertEqual((second.wrong, second.lost_blocks, second.all_free(), self.stored(second)), ([], 0, True, 0))
                self.no_leases(second)

    def test_who_asks_in_both_ways_hears_of_each_load_once(self) -> None:
        """A wrapper that asks for what has finished does not hear failed requests: it hears their blocks, and never that all is well."""
        texts = prompts(2, 41, shared=0)
        for connector in BOTH:
            with self.subTest(connector=connector.__name__):
                shape = self.own(hybrid(connector=connector))
                self.stored_by(shape, texts)
                second, heard = self.play(self.shared(), shape), []
                self.fails_once(second, 0, KvError("BUSY", "4096 copies are under way"))

                def both(_version: Any, ours: Any, finished: set[str], heard: list[Any] = heard) -> tuple[set[str], set[str]]:
                    names = ours.get_finished(finished)[1] or set()
                    told = ours.get_transfer_results(finished)
                    heard.append((names, told.finished_recving, told.failed_recving))
                    return names, set()

                second.add("fails", texts[0])
                with (
                    mock.patch.object(engine_worker, "ended", both), self.assertLogs("kvtier.vllm", "ERROR"),
                    self.assertRaisesRegex(RuntimeError, "this engine ends"),
                ):
                    second.run()
                self.assertEqual([one for one in heard if any(one)], [({"fails"}, set(), set())])

    def test_an_engine_that_takes_no_failed_requests_is_told_blocks(self) -> None:
        text = prompts(1, 41)[0]
        shape = self.own(Shape(version=V0_30))
        wanted = self.stored_by(shape, [text])
        second = self.play(self.shared(), shape)
        self.fails_once(second, 0, KvError("BUSY", "4096 copies are under way"))
        second.add("r", text)
        with mock.patch.object(connector_module, "takes_failed_requests", lambda: False), self.assertLogs("kvtier.vllm", "ERROR"):
            second.run()
        self.assertEqual(([second.done["r"].output_tokens()], second.wrong), (wanted, []))
        self.assertEqual((second.lost_requests, second.lost_blocks), ([], 10))

    def test_another_connectors_failed_request_spoils_nothing(self) -> None:
        """Nobody computes from what it was to bring, and nothing of it is stored; what others computed is."""
        texts = prompts(2, 41, shared=0)
        for connector in BOTH:
            with self.subTest(connector=connector.__name__):
                shape = self.own(hybrid(connector=connector))
                wanted = self.serve(self.alone(replace(shape, connector=None)), texts)
                first = self.play(self.shared(), shape)
                ours, loading = first.connector, []
                ask, tell, hear = ours.get_num_new_matched_tokens, ours.update_state_after_alloc, first._together.hear

                # As vLLM's MultiConnector where another is chosen: all are asked, and hear of the blocks with 0 tokens of theirs.
                def matched(request: Any, local: int, ask: Any = ask, loading: list[Any] = loading) -> tuple[int | None, bool]:
                    found = ask(request, local)
                    if found[0] is None or request.request_id != "fails" or loading:
                        return found
                    loading.append(request)
                    return 40 - local, True

                def heard(told: Any, hear: Any = hear, loading: list[Any] = loading) -> Any:
                    both = hear(told)
                    if loading and loading[0].state == "loading" and "others" in first.done:
                        both.finished_recving.add("fails")
                        both.failed_recving.add("fails")
                    return both

                ours.get_num_new_matched_tokens = matched
                ours.update_state_after_alloc = lambda request, blocks, tokens, tell=tell: tell(
                    request, blocks, 0 if request.request_id == "fails" else tokens
                )
                first._together.hear = heard
                first.add("fails", texts[0])
                first.add("others", texts[1])
                with mock.patch.object(Stores, "spoil") as spoil:
                    first.run()
                spoil.assert_not_called()
                self.check(first)
                self.assertEqual([first.done[name].output_tokens() for name in ("fails", "others")], wanted)
                self.assertEqual(first.lost_requests, ["fails"])
                for name in first.done:
                    until("it is held", lambda name=name: self.held(first, first.done[name]) >= 40)
                second = self.play(self.shared(), shape)
                self.assertEqual(self.serve(second, texts), wanted)
                self.assertEqual(second.external_tokens, 80, self.told(first, second))


class Tables(EngineCase):
    def test_tables_are_asked_for_where_blocks_are_offered_and_mend_what_was_not_followed(self) -> None:
        (text,), node = prompts(1, 60), self.shared()
        shape = self.own(Shape(version=V0_30, step_tokens=24, prefix_caching=False))
        engine = self.play(node, shape)
        half = engine.connector._scheduler
        engine.add("r", text, 40)
        until("its first step", lambda: (engine.step(), "r" in half._requests and half._requests["r"].followed)[1])
        half._lose_tables()
        until("its answer", lambda: (engine.step(), len(engine.requests["r"].output_tokens()) >= 2)[1])
        self.assertFalse(half._requests["r"].lost)
        engine.run()
        self.check(engine)
        # Where a block has become whole, and not in each of 42 steps.
        self.assertLessEqual(len(engine.asked_tables), 100 // 4)
        self.until_held(node, engine, 96)


class Frees(EngineCase):
    def test_who_has_no_block_left_waits_for_those_of_stores_instead_of_preempting(self) -> None:
        ends, grows = prompts(2, 40, 0)
        for version, preempts in ((V0_29, True), (V0_30, False)):
            shape = self.own(Shape(blocks=31, version=version, prefix_caching=False))
            engine = self.play(self.shared(), shape)
            poll = StoreJobs.poll

            def polled(jobs: StoreJobs, engine: Engine = engine, poll: Any = poll) -> None:
                if engine.waited or engine.preemptions:
                    poll(jobs)

            with mock.patch.object(StoreJobs, "poll", polled), mock.patch.object(storing, "FREES_SOON_S", 60.0):
                engine.add("ends", ends, 1)
                engine.add("grows", grows, 48)
                engine.run()
            self.check(engine)
            self.assertEqual((engine.preemptions > 0, engine.waited > 0), (preempts, not preempts), version)
            self.assertEqual(engine.done["grows"].output_tokens(), self.serve(self.alone(Shape()), [grows], 48)[0])

    def test_how_long_it_is_waited_and_for_what(self) -> None:
        attachment = types.SimpleNamespace(usable=True, wants_token_ids=False)
        reservation = types.SimpleNamespace(done=False, attachment=attachment, abort=lambda: None)
        session = types.SimpleNamespace(reserve=lambda *_args, **_more: reservation)
        group = types.SimpleNamespace(index=0, window_tokens=0, hash_step=1, block_tokens=4)
        attached: Any = types.SimpleNamespace(
            shares=[types.SimpleNamespace(group=group, number=0, ranks=((0, 0),))], sessions=[session], attachments=[attachment],
            arena=types.SimpleNamespace(ref=types.SimpleNamespace(id=1)),
        )
        pool, now = Pool(20, True), 100.0
        with mock.patch.object(storing.time, "monotonic", lambda: now):
            stores = Stores(Holder(pool, 1.0), {})
            ids = pool.take(3) or []
            stores.offer(attached, [bytes(32)] * 3, [storing.Piece(group, 0, ids)], None)  # type: ignore[arg-type]
            self.assertFalse(stores.frees_soon())  # the request has them, too
            pool.free_blocks([pool.blocks[ids[2]]])
            self.assertTrue(stores.frees_soon())
            attachment.usable = False  # the node is silent
            self.assertFalse(stores.frees_soon())
            (offer,) = stores._offers.values()
            offer.planned = True  # the workers copy, whatever the node does
            self.assertTrue(stores.frees_soon())
            now += storing.FREES_SOON_S
            self.assertFalse(stores.frees_soon())
            self.assertTrue(stores.pending)

            def offer_lone() -> None:
                lone = pool.take(1) or []
                stores.offer(attached, [bytes(32)], [storing.Piece(group, 0, lone)], None)  # type: ignore[arg-type]
                pool.free_blocks([pool.blocks[lone[0]]])

            # What is offered meanwhile does not prolong it: who waits is preempted in the end.
            attachment.usable = True
            now += 1
            answers = []
            for _ in range(6):
                offer_lone()
                answers.append(stores.frees_soon())
                now += 0.1
            self.assertEqual(answers, [True] * 3 + [False] * 3)
            now += storing.FREES_SOON_S  # nobody asked: the next wait is another one
            offer_lone()
            self.assertTrue(stores.frees_soon())

    def test_a_copy_that_does_not_end_is_not_waited_for(self) -> None:
        ends, grows = prompts(2, 40, 0)
        engine = self.play(self.shared(), self.own(Shape(blocks=31, version=V0_30, prefix_caching=False)))
        with mock.patch.object(StoreJobs, "poll"), mock.patch.object(WorkerHalf, "report", return_value=None):
            engine.add("ends", ends, 1)
            engine.add("grows", grows, 48)
            until("it preempts", lambda: (engine.step(), engine.preemptions)[1])
        engine.run()
        self.check(engine)
        self.assertEqual(len(engine.done["grows"].output_tokens()), 48)


class Overwritten(EngineCase):
    """The second runner zeroes new blocks before stores of who had them are waited for."""

    def test_over_native_offloading_nothing_is_stored_and_what_others_stored_is_loaded(self) -> None:
        texts = prompts(6, 40, 8)
        wanted = self.serve(self.alone(), texts, outputs=16)
        small = self.own(Shape(blocks=30, step_tokens=48, zeroes=True, version=V0_30))
        with self.assertLogs("kvtier.vllm", "WARNING") as logs:
            first = self.play(self.shared(), replace(small, connector=KvtierOffloadingConnector))
            for _ in range(2):
                self.assertEqual(self.serve(first, texts, outputs=16), wanted)
        self.assertEqual(len([line for line in logs.output if "nothing is stored over vLLM's native offloading" in line]), 1)
        self.assertEqual(self.stored(first), 0)
        # The connector holds what it stores; so does it under the first runner, where stores are waited for in time.
        for version, connector in ((V0_30, KvtierConnector), (V0_27, KvtierOffloadingConnector)):
            shape = self.own(replace(small, version=version, connector=connector))
            writes = self.play(self.shared(), shape)
            for _ in range(2):
                self.assertEqual(self.serve(writes, texts, outputs=16), wanted)
            self.assertGreater(self.stored(writes), 0)
            reads = self.play(self.shared(), replace(shape, version=V0_30, connector=KvtierOffloadingConnector, blocks=160))
            self.assertEqual(self.serve(reads, texts, outputs=16), wanted)
            self.assertGreater(reads.external_tokens, 0)
            self.assertEqual(self.stored(reads), 0)

    def test_blocks_that_are_copied_over_end_it_too(self) -> None:
        """Whatever was offered before is not committed."""
        engine = self.play(self.shared(), self.own(Shape(connector=KvtierOffloadingConnector, version=V0_30)))
        half = engine.connector._scheduler
        with mock.patch.object(StoreJobs, "poll"):
            engine.add("r", prompts(1)[0], 8)
            until("stores are planned", lambda: (engine.step(), any(offer.planned for offer in half._stores._offers.values()))[1])
        with self.assertLogs("kvtier.vllm", "WARNING") as logs:
            for _ in range(2):
                half._follow(types.SimpleNamespace(new_block_ids_to_zero=None, kv_cache_block_copies=[(3, 4)]))
        self.assertEqual(len(logs.output), 1)
        engine.run()
        self.check(engine)
        self.assertEqual(self.stored(engine), 0)


if __name__ == "__main__":
    unittest.main()
