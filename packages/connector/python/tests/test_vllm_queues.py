"""Queues that are longer than what an engine admits: who waits in them for long, or beside many, loses no hit by that."""

from __future__ import annotations

import itertools
import time
import types
import unittest
from typing import Any
from unittest import mock

from rig import until

from engine_case import EngineCase, prompts
from engine_parts import Shape
from kvtier.attachment import NONE
from kvtier.errors import KvError
from kvtier.leases import Load
from kvtier.vllm import options as options_module
from kvtier.vllm.claims import MAX_ANEW, Claims
from kvtier.vllm.known import Known
from kvtier.vllm.room import Room
from kvtier.vllm.standing import Standing


def refused(code: str) -> Any:
    """In place of `Session.load`: as a node, or its link, answers that has no room."""

    def load(_session: Any, hashes: bytes, **_more: Any) -> Load:
        made = Load(NONE, 1, len(hashes) // 32, {}, 1.0)
        made.on_failure(KvError(code, "on purpose", retry=True))  # type: ignore[arg-type]
        return made

    return mock.patch("kvtier.session.Session.load", load)


class Queues(EngineCase):
    def begun(self, **options: Any) -> tuple[Any, Any, list[int]]:
        """An engine whose one request it does not come to by itself, and whose prompt the arena holds."""
        shape, text = self.own(Shape(options=options)), prompts(1)[0]
        first = self.play(self.shared(), shape)
        (wanted,) = self.serve(first, [text])
        self.until_held(self.shared(), first, 40)
        engine = self.play(self.shared(), shape)
        attached = engine.connector._scheduler._node.attached()
        until("the tables are read", lambda: all(one.held for one in attached.attachments))
        engine.add("waits", text)
        return engine, engine.waiting.pop(), wanted

    def ends(self, engine: Any, request: Any, wanted: list[int]) -> None:
        engine.waiting.append(request)
        engine.run()
        self.check(engine)
        self.assertEqual((engine.done["waits"].output_tokens(), engine.external_tokens), (wanted, 40), self.told(engine))

    def test_leases_that_end_again_and_again_before_it_is_admitted(self) -> None:
        engine, request, wanted = self.begun(lease_ms=100)
        half = engine.connector._scheduler
        for wave in range(1, 6):
            until("it is staged", lambda: half.matched(request, 0) == (40, True), seen=lambda: self.told(engine))

            def expired(wave: int = wave) -> bool:
                engine.step()
                return half.counters.get("leases_expired", 0) == wave

            until("the lease has ended", expired)
            self.no_leases(engine)
        self.ends(engine, request, wanted)

    def test_more_requests_than_a_link_takes_at_once(self) -> None:
        """Lookups and loads alike: what found no place is asked again, and no oftener than others end."""
        node, shape, count = self.node(), self.own(Shape(blocks=200, max_running=4, step_tokens=256)), 30
        texts = prompts(count, tokens=20, shared=0)
        first = self.play(node, shape)

        def stored() -> bool:
            for at in range(0, count, 10):
                self.serve(first, texts[at : at + 10], 1)
            return all(self.held(first, request) >= 20 for request in list(first.done.values())[-count:])

        until("all of it is held", stored)
        wanted = self.serve(self.alone(shape), texts, 1)
        first.close()
        node.end()
        node.start()
        engine = self.play(node, shape)
        half = engine.connector._scheduler
        with mock.patch("kvtier.attachment.MAX_OUTSTANDING", 8):
            self.assertEqual(self.serve(engine, texts, 1), wanted)
        self.assertEqual([name for name in half.counters if name.startswith("denied")], [], self.told(engine))
        self.assertGreaterEqual(engine.external_tokens, 16 * count, self.told(engine))
        # Each lease that ends, and each try that has room, lets one try; and each step may one, where nothing is leased.
        self.assertLess(half.counters["loads"], 4 * count + engine.steps, self.told(engine))

    def test_a_load_that_ended_while_the_engine_did_not_come(self) -> None:
        for passes, answer in ((1, (0, False)), (2, (None, False))):
            engine, request, wanted = self.begun(load_deadline_ms=400)
            half = engine.connector._scheduler
            known = half._requests["waits"]
            with refused("DEADLINE"):
                with mock.patch("kvtier.vllm.staging.Stage.poll", return_value=False):
                    self.assertEqual(half.matched(request, 0), (None, False))
                since = time.monotonic()
                until("half of the deadline is over", lambda since=since: time.monotonic() - since > 0.2)
                for _ in range(passes):
                    half._claims.take_plans()
                with mock.patch("kvtier.vllm.standing.Standing.wait", return_value=False):
                    self.assertEqual(half.matched(request, 0), answer)
            if answer[0] is None:
                known.stage.release()
                self.assertEqual((known.denied, known.anew), ("", 1))
                half._claims.leave(known)
                known.lookups = None
                self.ends(engine, request, wanted)
            else:
                self.assertEqual(known.denied, "deadline")

    def test_room_that_is_waited_for_while_the_engine_does_not_come(self) -> None:
        for code, (passes, denied) in itertools.product(("CAPACITY", "BUSY"), ((1, True), (2, False))):
            with self.subTest(code=code, passes=passes):
                engine, request, wanted = self.begun(load_deadline_ms=200)
                half = engine.connector._scheduler
                known = half._requests["waits"]
                with refused(code):
                    self.assertEqual(half.matched(request, 0), (None, False))
                    self.assertGreater(known.room_until, 0)
                    until("its time is over", lambda known=known: time.monotonic() > known.room_until)
                    for _ in range(passes):
                        half._claims.take_plans()
                    self.assertEqual(half.matched(request, 0), (0, False) if denied else (None, False))
                self.assertEqual(known.denied, code.lower() if denied else "")
                if not denied:
                    self.ends(engine, request, wanted)

    def test_what_ends_while_nobody_comes_is_begun_anew_so_often_and_no_oftener(self) -> None:
        engine, request, _ = self.begun(load_deadline_ms=1)
        half = engine.connector._scheduler
        known = half._requests["waits"]
        with refused("CAPACITY"):
            for _ in range(MAX_ANEW + 1):
                self.assertEqual(half.matched(request, 0), (None, False))
                until("its time is over", lambda: time.monotonic() > known.room_until)
                half._claims.take_plans()
                half._claims.take_plans()
            self.assertEqual(half.matched(request, 0), (0, False))
        self.assertEqual(known.denied, "capacity")


class Asked(unittest.TestCase):
    """A node that did not answer in time is asked once more, in each life of a request."""

    def test_how_often_a_request_is_asked_about(self) -> None:
        claims = Claims(options_module.parse({"socket": "/s"}), [], 4, mock.Mock(), {})
        unheard = mock.Mock(done=True, busy=False, spared=False, held=None)
        request: Any = types.SimpleNamespace(num_tokens=33)

        def twice(known: Known) -> None:
            with mock.patch("kvtier.vllm.claims.Lookups", return_value=unheard) as asked:
                self.assertEqual(claims.matched(known, request, 0), (None, False))
                self.assertEqual(asked.call_count, 2)
                self.assertEqual(known.denied, "")

        def again(known: Known) -> None:
            known.lookups = None
            claims.allocated(known, None, 0)

        def expired(known: Known) -> None:
            known.stage, known.stages = mock.Mock(claimed=False, asked_at=0.0), 1
            claims.expire([known], 1e9)

        for life in (again, expired):
            known = Known("a", [b"a" * 32] * 8, True, True, None)
            twice(known)
            life(known)
            twice(known)
            self.assertEqual(claims.matched(known, request, 0), (0, False))
            self.assertEqual(known.denied, "lookup")


class Waiting(unittest.TestCase):
    """Who waits for room tries as often as there may be some."""

    def test_one_tries_for_each_lease_that_ends(self) -> None:
        room = Room()
        waiting = [Known(f"{i}", [], True, True, None) for i in range(5)]
        tried = lambda: [known.name for known in waiting if room.may_try(known, 1.0, 1)]  # noqa: E731
        room.leased = 3
        for known in waiting:
            room.leased += 1
            room.waits(known, 9.0)
        self.assertEqual(tried(), [])
        room.ended()
        self.assertEqual(tried(), ["0"])
        room.leased += 1
        room.waits(waiting[0], 9.0)  # in vain: nobody else tries for it
        self.assertEqual(tried(), [])
        room.ended()
        self.assertEqual(tried(), ["0"])
        room.leased += 1
        room.has(waiting.pop(0))  # there may be more
        self.assertEqual(tried(), ["1"])
        room.leased += 1
        room.waits(waiting[0], 9.0)
        self.assertEqual(tried(), [])

    def test_where_nothing_is_leased_one_tries_in_each_step(self) -> None:
        room = Room()
        waiting = [Known(f"{i}", [], True, True, None) for i in range(2)]
        for known in waiting:
            room.leased += 1
            room.waits(known, 9.0)
        for step in (1, 2):
            self.assertEqual([room.may_try(known, 1.0, step) for known in waiting], [True, False])
        self.assertEqual([room.may_try(known, 9.0, 2) for known in waiting], [True, True])  # no longer than told


class Stood(unittest.TestCase):
    """However many requests come at once, the engine's loop stands for an answer no longer than for one."""

    def test_a_burst(self) -> None:
        clock = [0.0]

        class Silent:
            began_at = asked_at = 0.0

            def wait(self, wait_s: float) -> bool:
                clock[0] += wait_s
                return False

        with mock.patch("kvtier.vllm.standing.time", types.SimpleNamespace(monotonic=lambda: clock[0])):
            for alone, patiences in ((False, 2), (True, 4)):
                standing = Standing(1.0)
                standing.alone = alone
                for _ in range(3):
                    began = clock[0]
                    for _ in range(60):
                        standing.wait(Silent())
                        standing.wait_soon(Silent())
                    self.assertEqual(clock[0] - began, patiences)
                    standing.step()


if __name__ == "__main__":
    unittest.main()
