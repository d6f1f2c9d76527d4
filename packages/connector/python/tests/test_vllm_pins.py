"""The connector for vLLM: what a prefill pod pinned for a decode pod is let go as soon as that has loaded it, by whoever has the ticket and
by nobody else; and what is promised by a pod whose node is no peer is not waited for."""

from __future__ import annotations

import os
import time
import unittest
from typing import Any
from unittest import mock

from rig import until

from engine_case import EngineCase, prompts
from engine_parts import GroupShape, Shape
from engine_play import Engine
from kvtier.session import Session
from kvtier.vllm import promises
from kvtier.vllm.lookups import chains_of

TEXT = prompts(1, 41)[0]
LONG = {"pin_ms": 600_000}


class Pinned(EngineCase):
    def prefilled(self, shape: Shape) -> tuple[Engine, dict[str, Any]]:
        """All of it is committed and pinned."""
        engine, params = self.prefill(self.shared(), shape, TEXT)
        engine.run()
        until("it is pinned", lambda: not engine.connector._scheduler._node._pins)
        return engine, params

    def pinned(self, engine: Engine) -> int:
        """Blocks of all shares; afterwards none of them is."""
        half = engine.connector._scheduler
        attached = half._node.attached()
        chains = chains_of(engine.done["prefill"].block_hashes, half._groups, 40)
        asked = [session.unpin(chains[share.group.index]) for share, session in zip(attached.shares, attached.sessions)]
        until("they are answered", lambda: all(one.done for one in asked))
        return sum(one.result() for one in asked)

    def ended(self, engine: Engine) -> int:
        return int(engine.connector._scheduler.counters.get("pins_ended", 0))

    def heard(self, engine: Engine) -> None:
        """What was said before is heard: sessions are answered in order."""
        attached = engine.connector._scheduler._node.attached()
        asked = [session.stats() for session in attached.sessions]
        until("all is heard", lambda: all(one.done for one in asked))

    def decode(self, shape: Shape, params: dict[str, Any], outputs: int = 4) -> Engine:
        engine = self.play(self.shared(), shape)
        engine.add("decode", TEXT, outputs, kv_transfer_params=params)
        return engine

    def test_as_soon_as_all_ranks_have_it(self) -> None:
        for like in (Shape(), Shape(tp=2), Shape([GroupShape(), GroupShape("window", window=9)], blocks=160)):
            shape = self.own(Shape(like.groups, tp=like.tp, blocks=like.blocks, options=LONG))
            (wanted,) = self.serve(self.alone(shape), [TEXT], outputs=40)
            first, params = self.prefilled(shape)
            second = self.decode(shape, params, outputs=40)
            shown, show = [], Session.end_pin
            spy = lambda session, ticket, block: (shown.append((ticket.hex(), block)), show(session, ticket, block))[1]  # noqa: E731
            with mock.patch.object(Session, "end_pin", spy):
                until("its pins are ended", lambda: (second.step(), self.ended(second))[1])
            sessions = second.connector._scheduler._node.attached().sessions
            self.assertEqual(shown, [(params["kvtier"]["ticket"], first.done["prefill"].block_hashes[9])] * len(sessions))
            self.assertNotIn("decode", second.done)
            self.heard(second)
            self.assertEqual(self.pinned(first), 0)
            second.run()
            self.check(second)
            self.assertEqual((second.done["decode"].output_tokens(), self.ended(second)), (wanted, 1))
            self.assertEqual(second.external_tokens, 40)

    def test_without_its_ticket_it_is_pinned_for_its_time(self) -> None:
        shape = self.own(Shape(options=LONG))
        first, params = self.prefilled(shape)
        ours = params["kvtier"]
        for said in (None, "", 5, "zz" * 16, "ab" * 15, os.urandom(16).hex(), [ours["ticket"]]):
            second = self.decode(shape, {**params, "kvtier": {**ours, "ticket": said}})
            second.run()
            self.check(second)
            self.heard(second)
        # Nor does one who cannot have what it names: another model, whose names are others.
        other = self.decode(self.own(Shape()), params)
        other.run()
        self.check(other)
        self.heard(other)
        self.assertEqual(self.ended(other), 0)
        self.assertEqual(self.pinned(first), 10)

    def test_a_decode_pod_that_refuses_its_request_or_computes_it(self) -> None:
        shape = self.own(Shape(options=LONG))
        first, params = self.prefilled(shape)
        refuses = self.play(self.shared(), shape)
        refuses.add("refused", [0], 1, kv_transfer_params=params)
        refuses.abort("refused")
        refuses.run()
        self.check(refuses)
        self.heard(refuses)
        self.assertEqual((self.pinned(first), self.ended(refuses)), (0, 1))
        first, params = self.prefilled(self.own(Shape(options=LONG)))
        computes = self.decode(Shape(options={**first.shape.options, "load": False}), params)
        computes.run()
        self.heard(computes)
        self.assertEqual((computes.external_tokens, self.pinned(first)), (0, 0))

    def test_once_more_and_when_its_time_is_over(self) -> None:
        """The pin is of a millisecond: to start an engine takes longer."""
        shape = self.own(Shape(options={"pin_ms": 1}))
        (wanted,) = self.serve(self.alone(shape), [TEXT])
        first, params = self.prefilled(shape)
        engines = [self.play(self.shared(), shape) for _ in range(2)]
        self.assertEqual(self.pinned(first), 0)
        for engine in engines:
            engine.add("decode", TEXT, 4, kv_transfer_params=params)
            engine.run()
            self.check(engine)
            self.heard(engine)
            self.assertEqual((engine.done["decode"].output_tokens(), engine.external_tokens), (wanted, 40))
            self.assertEqual(self.ended(engine), 1)

    def test_before_the_prefill_pod_comes_to_pin_it(self) -> None:
        shape = self.own(Shape(options=LONG))
        engine, params = self.prefill(self.shared(), shape, TEXT)
        node = engine.connector._scheduler._node
        keep, node._keep_pins = node._keep_pins, lambda: None
        engine.run()
        self.until_held(self.shared(), engine, 40)
        second = self.decode(shape, params)
        second.run()
        self.heard(second)
        self.assertEqual(second.external_tokens, 40)
        node._keep_pins = keep
        until("it is through with them", lambda: not node._pins, 4)
        self.assertEqual(self.pinned(engine), 0)

    def test_no_pins_no_ticket(self) -> None:
        shape = self.own(Shape(options={"pin_ms": 0, "promise_deadline_ms": 400}))
        first, params = self.prefill(self.shared(), shape, TEXT)
        self.assertEqual(params["kvtier"].keys(), {"namespace", "tokens", "last_hash", "node"})
        self.assertEqual(promises.read(params).ticket, b"")  # type: ignore[union-attr]
        # What comes too late is computed, and what is there loaded: there is nothing to end either way.
        for loaded in (0, 40):
            second = self.decode(shape, params)
            second.run()
            self.heard(second)
            self.assertEqual((second.external_tokens, self.ended(second)), (loaded, 0))
            first.run()
            self.until_held(self.shared(), first, 40)


class Places(EngineCase):
    """A promise says which node has its blocks."""

    def test_a_promise_of_a_node_from_which_nothing_comes(self) -> None:
        """The decode pod's node is no peer of the prefill pod's: it says so at once, and the prompt is computed."""
        shape = self.own(Shape(options={"promise_deadline_ms": 60_000}))
        (wanted,) = self.serve(self.alone(shape), [TEXT])
        _, params = self.prefill(self.shared(), shape, TEXT)
        second = self.play(self.node(), shape)
        began = time.monotonic()
        self.assertEqual(self.serve(second, [TEXT], kv_transfer_params=params), [wanted])
        self.assertLess(time.monotonic() - began, 20)
        counters = second.connector._scheduler.counters
        self.assertEqual((counters["promises"], counters["denied_missing"], second.external_tokens), (1, 1, 0))
        self.no_leases(second)

    def test_what_is_here_is_loaded_when_the_rest_cannot_come(self) -> None:
        """Of a window only blocks before the promised end are asked for: what is held before them is leased once more."""
        for groups in ([GroupShape()], [GroupShape(), GroupShape("window", window=9)]):
            shape = self.own(Shape(groups, blocks=160, options={"promise_deadline_ms": 60_000}))
            (wanted,) = self.serve(self.alone(shape), [TEXT])
            _, params = self.prefill(self.shared(), shape, TEXT)
            node = self.node()
            before = self.play(node, shape)
            self.serve(before, [TEXT[:24]], outputs=1)
            self.until_held(node, before, 24)
            second = self.play(node, shape)
            began = time.monotonic()
            self.assertEqual(self.serve(second, [TEXT], kv_transfer_params=params), [wanted])
            self.assertLess(time.monotonic() - began, 20)
            self.assertEqual((second.connector._scheduler.counters["promises"], second.external_tokens), (1, 24), groups)
            self.no_leases(second)

    def test_a_promise_that_does_not_say_its_node(self) -> None:
        """Of an older pod, or nonsense: it is waited for, wherever it may come from."""
        shape = self.own(Shape(options={"promise_deadline_ms": 1_500}))
        _, params = self.prefill(self.shared(), shape, TEXT)
        said = {key: value for key, value in params["kvtier"].items() if key != "node"}
        for node in ({}, {"node": 7}, {"node": "x" * 16}, {"node": "00"}):
            second = self.play(self.node(), shape)
            began = time.monotonic()
            self.serve(second, [TEXT], kv_transfer_params={**params, "kvtier": {**said, **node}})
            self.assertGreater(time.monotonic() - began, 1.5, node)
            self.assertEqual(second.connector._scheduler.counters["promises"], 1)


if __name__ == "__main__":
    unittest.main()
