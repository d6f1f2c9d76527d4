"""Edges of what may be claimed and stored, played against real cache nodes: each a case in which one rank, one step or one block is
unlike the others."""

from __future__ import annotations

import tempfile
import unittest
from pathlib import Path
from typing import Any
from unittest import mock

from rig import Node, until

from engine_case import EngineCase, prompts
from engine_memory import Tensor
from engine_parts import GroupShape, Shape
from engine_play import Engine
from kvtier import leases
from kvtier.copies import Job
from kvtier.vllm import identity
from kvtier.vllm import options as options_module
from kvtier.vllm.guard import Troubles
from kvtier.vllm.messages import KvtierMetadata
from kvtier.vllm.store_jobs import StoreJobs
from kvtier.vllm.storing import Stores
from kvtier.vllm.worker import WorkerHalf
from test_vllm_queues import Asked, Queues, Stood, Waiting  # noqa: F401  run with those below


class Unasked(EngineCase):
    SHAPES = (
        Shape(),
        Shape(tp=2),
        Shape([GroupShape(), GroupShape("window", window=9)], blocks=160),
        Shape([GroupShape("window", window=9)]),
        Shape([GroupShape("mla")], tp=2),
    )

    def counted(self, engine: Any, *names: str) -> list[int]:
        return [engine.connector._scheduler.counters.get(name, 0) for name in names]

    def reading(self, engine: Any) -> Any:
        attached = engine.connector._scheduler._node.attached()
        until("the tables are read", lambda: all(one.held for one in attached.attachments))
        return attached

    def test_what_nobody_holds_costs_no_question(self) -> None:
        for shape in map(self.own, self.SHAPES):
            texts = prompts(4, shared=0)
            wanted = self.serve(self.alone(shape), texts)
            # It holds nothing: names share buckets of the table, and which do follows from the machine's processor, which is in all names.
            engine = self.play(self.node(), shape)
            self.reading(engine)
            claims = engine.connector._scheduler._claims
            claims._lookup_slow = True
            with mock.patch("kvtier.session.Session.lookup", side_effect=AssertionError("the node was asked")):
                self.assertEqual(self.serve(engine, texts), wanted)
            self.assertEqual(self.counted(engine, "unasked", "lookups", "denied_lookup"), [4, 0, 0])
            self.assertTrue(claims._lookup_slow, "what was not asked says nothing of how fast the node is")

    def test_what_one_share_lacks_nobody_is_asked_for(self) -> None:
        text = prompts(1, 41)[0]
        for shape in map(self.own, self.SHAPES[1:3]):
            first = self.play(self.shared(), shape)
            (wanted,) = self.serve(first, [text])
            self.until_held(self.shared(), first, 40)
            for lacks in range(2):
                engine = self.play(self.shared(), shape)
                sessions = self.reading(engine).sessions
                with mock.patch.object(sessions[lacks], "lacks", lambda *_, **__: True):
                    self.assertEqual(self.serve(engine, [text]), [wanted])
                self.assertEqual((self.counted(engine, "unasked", "lookups"), engine.external_tokens), ([1, 0], 0))
            engine = self.play(self.shared(), shape)
            self.reading(engine)
            self.assertEqual(self.serve(engine, [text]), [wanted])
            self.assertEqual((self.counted(engine, "unasked", "lookups", "unasked_hits"), engine.external_tokens), ([0, 0, 1], 40))

    def test_what_lies_in_the_arena_is_loaded_without_a_question(self) -> None:
        for shape in map(self.own, self.SHAPES):
            texts = prompts(4, 41)
            first = self.play(self.shared(), shape)
            wanted = self.serve(first, texts)
            for request in list(first.done.values()):
                until("all of it is held", lambda request=request: self.held(first, request) >= 40)
            engine = self.play(self.shared(), shape)
            self.reading(engine)
            with mock.patch("kvtier.session.Session.lookup", side_effect=AssertionError("the node was asked")):
                self.assertEqual(self.serve(engine, texts), wanted)
            self.assertEqual(self.counted(engine, "unasked_hits", "unasked", "lookups"), [4, 0, 0], self.told(engine))
            found = engine.external_tokens + engine.local_tokens
            self.assertGreaterEqual(found, 4 * 40 // engine.align * engine.align, self.told(engine))

    def test_a_table_that_says_too_much_costs_a_load_that_comes_short(self) -> None:
        """What is held is loaded, what is not is computed and stored."""
        text = prompts(1, 41)[0]
        for held in (0, 1, 6):
            shape = self.own(Shape())
            (wanted,) = self.serve(self.alone(shape), [text])
            if held:
                first = self.play(self.shared(), shape)
                self.serve(first, [text[: 4 * held]], outputs=1)
                self.until_held(self.shared(), first, 4 * held)
            engine = self.play(self.shared(), shape)
            self.reading(engine)
            with mock.patch("kvtier.session.Session.lacks", return_value=False):
                with mock.patch("kvtier.session.Session.in_arena", return_value=((0, held + 2),)):
                    self.assertEqual(self.serve(engine, [text]), [wanted])
            self.assertEqual((self.counted(engine, "unasked_hits", "lookups"), engine.external_tokens), ([1, 0], 4 * held))
            self.until_held(self.shared(), engine, 40)

    def test_what_lies_elsewhere_is_asked_for(self) -> None:
        shape, text, node = self.own(Shape()), prompts(1, 41)[0], self.node()
        first = self.play(node, shape)
        (wanted,) = self.serve(first, [text])
        self.until_held(node, first, 40)
        first.close()
        node.end()
        node.start()
        for counted in ([1, 0], [0, 1]):  # from the disk; that brought it into the arena
            engine = self.play(node, shape)
            self.reading(engine)
            self.assertEqual(self.serve(engine, [text]), [wanted])
            self.assertEqual((self.counted(engine, "lookups", "unasked_hits"), engine.external_tokens), (counted, 40))

    def test_without_a_table_the_node_is_asked(self) -> None:
        shape, text = self.own(Shape()), prompts(1)[0]
        with mock.patch("kvtier.attachment.HeldTable.open", lambda *_: None):
            engine = self.play(self.shared(), shape)
        self.serve(engine, [text])
        self.assertEqual(self.counted(engine, "unasked", "lookups"), [0, 1])


class Offers(EngineCase):
    def test_a_prefix_that_requests_share_takes_room_once(self) -> None:
        """Each of them offers it; held at the same time, one by one, their blocks would be more than may be held."""
        shape, texts = self.own(Shape()), prompts(5)
        engine = self.play(self.shared(), shape)
        stores = engine.connector._scheduler._stores
        offered = sum(len(text) for text in texts) // engine.align
        self.assertGreater(offered, stores.holder.most)
        with mock.patch.object(stores, "plans", list):  # the node answers no reserve in time
            for number, text in enumerate(texts):
                engine.add(f"shares-{number}", text)
            while engine.requests:
                engine.step()
            # The second began in the first one's step, when nothing was to be found yet: its prefix is its own.
            self.assertEqual((stores.holder.held, offered), (10 + 10 + 3 * 4, 50))
        engine.run()
        self.check(engine)
        self.assertEqual(stores.holder.held, 0)
        for request in engine.done.values():
            until("all of it is held", lambda request=request: self.held(engine, request) >= 40, seen=lambda: self.told(engine))
        self.assertNotIn("store_left_out_blocks", engine.connector._scheduler.counters)

    def test_what_finds_no_room_until_its_request_ends_is_counted(self) -> None:
        shape = self.own(Shape(options={"held_blocks_share": 0.13}))
        engine = self.play(self.shared(), shape)
        stores = engine.connector._scheduler._stores
        self.assertEqual(stores.holder.most, 12)
        with mock.patch.object(stores, "plans", list):
            for number, text in enumerate(prompts(2, shared=0)):
                engine.add(f"apart-{number}", text)
            while engine.requests:
                engine.step()
            self.assertEqual(stores.holder.held, 12)
        engine.run()
        self.check(engine)
        self.assertEqual(engine.connector._scheduler.counters["store_left_out_blocks"], 8)
        until("what had room is held", lambda: sum(self.held(engine, one) for one in engine.done.values()) == 48)


class Claims(EngineCase):
    def filled(self, shape: Shape, text: list[int]) -> list[int]:
        """It is held; the tokens."""
        first = self.play(self.shared(), shape)
        (wanted,) = self.serve(first, [text])
        self.until_held(self.shared(), first, 40)
        return wanted

    def test_ranks_that_end_in_different_steps(self) -> None:
        """The lease stays until the last of them is through."""
        shape, text = self.own(Shape(tp=2)), prompts(1)[0]
        wanted = self.filled(shape, text)
        second = self.play(self.shared(), shape)
        late = second.workers[1].connector._worker
        finished, late.finished = late.finished, lambda: set()
        half, stages = second.connector._scheduler, []
        claim = half._claims.claim
        half._claims.claim = lambda number, known, stage: (stages.append(stage), claim(number, known, stage))
        second.add("waits", text)

        def first_rank_is_through() -> bool:
            second.step()
            return any(loading.through == {(0, 0)} for loading in half._claims._loading.values())

        until("one rank is through", first_rank_is_through)
        for _ in range(3):
            second.step()
        self.assertEqual([stage.alive for stage in stages], [True])
        self.assertEqual(second.requests["waits"].state, "loading")
        late.finished = finished
        second.run()
        self.check(second)
        self.no_leases(second)
        self.assertEqual((second.done["waits"].output_tokens(), second.external_tokens), (wanted, 40))

    def test_a_hit_is_what_all_ranks_can_bring(self) -> None:
        text = prompts(1)[0]
        for lacks in (0, 1):
            shape = self.own(Shape(tp=2))
            first = self.play(self.shared(), shape)
            self.serve(first, [text[:20]], outputs=1)
            until("five blocks are held", lambda: self.held(first, next(iter(first.done.values()))) == 20)
            # From here on nothing of this rank is copied.
            half = first.workers[lacks].connector._worker
            half._stores.start = half.refuse
            (wanted,) = self.serve(first, [text], outputs=1)
            attached = first.connector._scheduler._node.attached()
            more = attached.sessions[1 - lacks]
            chain = b"".join(list(first.done.values())[-1].block_hashes[:10])

            def held() -> int:
                asked = more.lookup(chain, deadline_s=5)
                asked.wait(5)
                return asked.result().blocks

            until("the other rank has all of it", lambda: held() == 10)
            reads = Shape(tp=2, options={**shape.options, "store": False})
            second = self.play(self.shared(), reads)
            claims, ends = second.connector._scheduler._claims, []
            claim = claims.claim

            def claimed(number: int, known: Any, stage: Any, ends: list[int] = ends, claim: Any = claim) -> None:
                ends.append(stage.end_tokens)
                claim(number, known, stage)

            claims.claim = claimed
            self.assertEqual(self.serve(second, [text], outputs=1), [wanted])
            self.assertEqual((ends, second.external_tokens), ([20], 20), self.told(second))
            # Also where the node's first word was of more, and its lease is not.
            third = self.play(self.shared(), reads)
            with mock.patch("kvtier.vllm.lookups._both", lambda left, right: max(left, right)):
                self.assertEqual(self.serve(third, [text], outputs=1), [wanted])
            self.assertEqual(third.external_tokens, 20, self.told(third))

    def test_a_node_that_goes_on_to_say_that_it_is_held(self) -> None:
        """A load has failed, and the node is not told: it is not claimed again for that request."""
        shape, text = self.own(Shape(prefix_caching=False)), prompts(1)[0]
        wanted = self.filled(shape, text)
        engine = self.play(self.shared(), shape)
        half = engine.connector._scheduler
        real, claims = half._claims.allocated, []

        def spoilt(known: Any, blocks: Any, tokens: int) -> None:
            if tokens:
                claims.append(tokens)
                self.flip(engine)
            real(known, blocks, tokens)

        half._claims.allocated = spoilt
        release = leases.Load.release
        # Nor is it found before the claim.
        unchecked = mock.patch("kvtier.vllm.staging._Leased.sound", property(lambda one: one.load.ready))
        with unchecked, mock.patch.object(leases.Load, "release", lambda load, corrupt=(): release(load)):
            self.assertEqual(self.serve(engine, [text]), [wanted])
        self.assertEqual(claims, [40])
        self.assertGreater(half.counters["corrupt_blocks"], 0)

    def test_a_request_that_is_not_admitted(self) -> None:
        """Its lease ends by itself; it is asked about again when the engine comes to it."""
        shape, text = self.own(Shape(options={"lease_ms": 100})), prompts(1)[0]
        wanted = self.filled(shape, text)
        engine = self.play(self.shared(), shape)
        engine.add("waits", text)
        request, half = engine.waiting.pop(), engine.connector._scheduler
        until("it is staged", lambda: half.matched(request, 0) == (40, True))

        def expired() -> bool:
            engine.step()
            return "leases_expired" in half.counters

        until("the lease has ended", expired)
        self.no_leases(engine)
        self.assertEqual(half.counters["leases_expired"], 1)
        engine.waiting.append(request)
        engine.run()
        self.check(engine)
        self.assertEqual((engine.done["waits"].output_tokens(), engine.external_tokens), (wanted, 40))

    def test_short_hits(self) -> None:
        shape, text = self.own(Shape()), prompts(1)[0]
        self.filled(shape, text)
        for least, loaded in ((41, 0), (40, 40)):
            engine = self.play(self.shared(), Shape(options={**shape.options, "min_load_tokens": least}))
            self.serve(engine, [text])
            self.assertEqual(engine.external_tokens, loaded)

    def test_images(self) -> None:
        """Users may choose the names of images: where the operator says so, such requests are left alone."""
        shape, text = self.own(Shape()), prompts(1)[0]
        engine = self.play(self.shared(), Shape(options={**shape.options, "multimodal": False}))
        self.serve(engine, [text], mm_features=[object()])
        self.assertEqual(self.stored(engine), 0)
        self.filled(shape, text)
        for taken, loaded in ((False, 0), (True, 40)):
            engine = self.play(self.shared(), Shape(options={**shape.options, "multimodal": taken}))
            self.serve(engine, [text], mm_features=[object()])
            self.assertEqual(engine.external_tokens, loaded)

    def test_whose_names_depend_on_more_than_tokens_tells_none(self) -> None:
        engine = self.play(self.shared(), self.own(Shape()))
        cases: list[tuple[bool, dict[str, Any]]] = [(True, {}), (False, {"cache_salt": "a"}), (False, {"mm_features": [object()]})]
        for tells, more in cases:
            engine.add(f"{more}", prompts(1)[0], **more)
            self.assertEqual(engine.connector._scheduler._requests[f"{more}"].tokens is not None, tells, more)
        engine.run()


class Resets(EngineCase):
    """The engine resets its prefix cache, or sleeps, and takes no step more."""

    def stopped(self, shape: Shape) -> tuple[Engine, list[list[int]]]:
        """Right after its last request: blocks are offered, and others copied, which was not told."""
        engine = self.play(self.shared(), shape)
        with mock.patch.object(StoreJobs, "poll"):
            for number, text in enumerate(prompts(3)):
                engine.add(f"last-{number}", text, 9)
            stores = engine.connector._scheduler._stores
            while engine.requests:
                asked = [part.reservation for offer in stores._offers.values() for part in offer.parts]
                until("the node has answered", lambda asked=asked: all(one.done for one in asked))
                engine.step()
        self.assertEqual({offer.planned for offer in stores._offers.values()}, {False, True})
        self.assertFalse(engine.all_free())
        return engine, [engine.done[f"last-{number}"].output_tokens() for number in range(3)]

    def spoil(self, engine: Engine) -> None:
        """Whatever was in its blocks is somebody else's."""
        for layers in engine.workers[0].groups:
            for layer in layers.values():
                for block in range(1, engine.shape.blocks):
                    layer.poison(block)

    def test_what_was_copied_is_let_go_at_once(self) -> None:
        both = [GroupShape(), GroupShape("window", window=9)]
        for shape in map(self.own, (Shape(step_tokens=24), Shape(both, blocks=160, step_tokens=24))):
            wanted = self.serve(self.alone(shape), prompts(3), 9)
            engine, tokens = self.stopped(shape)
            self.assertTrue(engine.pool.reset_prefix_cache())
            self.assertTrue(engine.all_free())
            self.spoil(engine)
            self.assertEqual(tokens, wanted)
            engine.run()
            self.check(engine)
            self.assertGreater(self.stored(engine), 0)
            self.no_leases(engine)
            self.assertEqual(engine.connector._scheduler._stores.holder.held, 0)
            second = self.play(self.shared(), shape)
            until("what was copied is held", lambda: any(self.held(second, one) for one in engine.done.values()))
            self.assertEqual(self.serve(second, prompts(3), 9), wanted)
            self.assertEqual(self.serve(engine, prompts(3), 9), wanted)

    def test_resets_keep_nothing_aside_at_the_node(self) -> None:
        """Twenty rounds of a trainer: the last stores of each are planned, and not told yet, when it resets."""
        node = Node(disk_bytes=None)
        self.addCleanup(node.remove)
        node.start()
        engine = self.play(node, self.own(Shape()))

        def counted() -> dict[str, int]:
            (session,) = engine.connector._scheduler._node._sessions
            asked = session.stats(deadline_s=5)
            until("stats", lambda: asked.done)
            return asked.result()

        unsettled = 0
        for number in range(20):
            for one, text in enumerate(prompts(4, seed=number + 1)):
                engine.add(f"{number}-{one}", text, 4)
            while engine.requests:
                engine.step()
            unsettled += any(not one.drained(0) for one in engine.connector._scheduler._node.attached().attachments)
            engine.pool.reset_prefix_cache()
            self.assertTrue(engine.connector.reset_cache())
            engine.run()
            self.check(engine)
            self.attach(engine)
        self.assertGreater(unsettled, 0)
        until("one session is left", lambda: counted()["session.open"] == 1)
        self.assertEqual(counted().get("quarantine.sessions", 0), 0)

    def test_a_sleep_ends_sharing_in_one_line_but_where_it_is_said_that_weights_stay(self) -> None:
        node = self.shared()
        for keeps in (False, True):
            shape = self.own(Shape(options={"keep_on_reset": keeps}))
            engine = self.play(node, shape)
            wanted = self.serve(engine, prompts(3))
            named = [one.namespace for one in engine.connector._scheduler._node._shares]
            until("it is held", lambda engine=engine: all(self.held(engine, one) for one in engine.done.values()))
            self.assertTrue(engine.pool.reset_prefix_cache())
            with mock.patch("kvtier.vllm.scheduler.log.warning") as said:
                self.assertTrue(engine.connector.reset_cache())
            self.assertEqual([('"keep_on_reset": true' in call.args[0]) for call in said.call_args_list], [] if keeps else [True])
            self.attach(engine)
            self.assertEqual([one.namespace for one in engine.connector._scheduler._node._shares] == named, keeps)
            self.assertEqual(self.serve(engine, prompts(3)), wanted)
            self.assertEqual(engine.external_tokens > 0, keeps)

    def test_what_may_still_be_copied_stays_held(self) -> None:
        """Workers of other processes cannot be asked; and a copy that does not end is not waited for any longer than it may be.
        It would be waited for without an end."""
        for elsewhere in (True, False):
            engine, _ = self.stopped(self.own(Shape(step_tokens=24)))
            resets = engine.connector._scheduler._resets
            places = resets._places
            if elsewhere:
                resets._places = {rank: "elsewhere" for rank in places}
            with mock.patch.object(Job, "ended", return_value=False), mock.patch("kvtier.vllm.resets.WAIT_S", 0.2):
                self.assertFalse(engine.pool.reset_prefix_cache())
            stores = engine.connector._scheduler._stores
            self.assertEqual({offer.planned for offer in stores._offers.values()}, {True})
            self.assertGreater(stores.holder.held, 0)
            engine.run()
            self.check(engine)
            self.assertTrue(engine.pool.reset_prefix_cache())

    def test_nothing_is_raised_into_the_engine(self) -> None:
        engine, _ = self.stopped(self.own(Shape(step_tokens=24)))
        with mock.patch.object(Stores, "drop_unplanned", side_effect=RuntimeError("on purpose")), mock.patch("logging.Logger.error"):
            self.assertFalse(engine.pool.reset_prefix_cache())
        self.assertEqual(engine.connector.troubles.count, 1)
        self.assertTrue(engine.pool.reset_prefix_cache())


class Storing(EngineCase):
    def test_what_is_offered_in_a_step_is_copied_in_a_later_one(self) -> None:
        """Also where the node has answered before the step is put together."""
        for asynchronous in (False, True):
            engine = self.play(self.shared(), self.own(Shape(asynchronous=asynchronous, step_tokens=24)))
            real, build = Stores.offer, engine.connector.build_connector_meta
            offered: list[int] = []
            planned: list[int] = []

            def answered(stores: Stores, *args: Any) -> int:
                number = real(stores, *args)
                until("it is answered", lambda: all(part.reservation.done for part in stores._offers[number].parts))
                offered.append(number)
                return number

            def stepped(output: Any) -> KvtierMetadata:
                offered.clear()
                made = build(output)
                planned.extend(plan.number for plan in made.stores)
                self.assertFalse(set(offered) & {plan.number for plan in made.stores}, "this step computes its blocks")
                return made

            engine.connector.build_connector_meta = stepped
            with mock.patch.object(Stores, "offer", answered):
                self.serve(engine, prompts(3))
            self.assertGreater(len(planned), 2)

    def test_a_canary_that_is_found_elsewhere(self) -> None:
        """The worker writes one when its tensors are registered: its handshake refuses, and nothing is loaded or stored."""

        class Moved(Tensor):
            def narrow(self, dimension: int, first: int, count: int) -> Tensor:
                return super().narrow(dimension, first + 1, count)

        engine = self.alone()
        tensors = {}
        for layers in engine.workers[0].groups:
            for name, layer in layers.items():
                own = layer.tensor
                tensors[name] = Moved(own._storage, own.shape, own._strides, own._offset, own._item)
        half = WorkerHalf(options_module.parse({"socket": "/s"}), engine.vllm_config(0), engine.kv_cache_config(0), Troubles())
        half.register(tensors)
        self.assertIn("found elsewhere", half.handshake().refusal)
        half.shutdown()

    def test_where_digests_of_weights_are_kept(self) -> None:
        folder = Path(self.enterContext(tempfile.TemporaryDirectory()))
        (folder / "a.safetensors").write_bytes(b"weights" * 100)
        kept = folder / "kept" / "weights.json"
        options = {"weights_digest": "", "weights_cache": str(kept)}
        self.enterContext(mock.patch("kvtier.weights._SETTLED_NS", 0))
        with mock.patch.object(identity, "weight_folders", lambda _config: [folder]):
            engine = self.play(self.shared(), Shape(options=options))
        self.serve(engine, prompts(1))
        self.assertIn("a.safetensors", kept.read_text())


if __name__ == "__main__":
    unittest.main()
