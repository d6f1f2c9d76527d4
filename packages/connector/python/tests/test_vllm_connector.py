"""The connector for vLLM, played by an engine of our own against real cache nodes: every shape of an engine, and every fault of a node.

An engine that reads a byte which is not its token's says so (`wrong`); a test ends with all blocks free and no lease.
"""

from __future__ import annotations

import hashlib
import logging
import signal
import sys
import tempfile
import time
import types
import unittest
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

from rig import Node, until

from engine_case import EngineCase, prompts
from engine_memory import LAYOUTS
from engine_parts import ROOT, GroupShape, Shape
from engine_play import Engine
from kvtier.vllm import claims
from kvtier.vllm import node as node_module


class Shapes(EngineCase):
    """What one engine computed, another one loads; both give the tokens of an engine without a node."""

    def test_full_attention(self) -> None:
        for layout in (*LAYOUTS, "mapped"):
            with self.subTest(layout=layout):
                self.both(Shape([GroupShape(layout=layout)]))

    def test_more_requests_than_can_be_leased_at_once(self) -> None:
        """Those that wait for room have their blocks when others have given theirs back."""
        node = self.node(arena_bytes=2 << 20)
        texts = prompts(40, shared=0)
        shape = Shape(prefix_caching=False, max_running=2, dim=64)
        first = self.play(node, shape)

        def stored() -> bool:  # what finds no room is offered again
            for at in range(0, 40, 4):
                self.serve(first, texts[at : at + 4])
            return all(self.held(first, request) >= 40 for request in list(first.done.values())[-40:])

        until("all of it is held", stored, 60)
        wanted = self.serve(self.alone(shape), texts)
        second = self.play(node, shape)
        self.assertEqual(self.serve(second, texts), wanted)
        self.assertNotIn("denied_capacity", second.connector._scheduler.counters)
        # What the small arena gave away before it was written down is missing.
        self.assertGreater(second.external_tokens, 0.75 * 40 * 40, self.told(first, second))

    def test_no_prefix_caching(self) -> None:
        _, second = self.both(Shape(prefix_caching=False))
        self.assertEqual(second.local_tokens, 0)

    def test_tensor_parallel(self) -> None:
        self.both(Shape(tp=2))
        self.both(Shape(tp=2, heads=1))  # the same head in both ranks: one writes it

    def test_pipeline_parallel(self) -> None:
        self.both(Shape(pp=2, tp=2))

    def test_mla(self) -> None:
        first, second = self.both(Shape([GroupShape("mla")], tp=2, heads=1))
        self.assertEqual(len(second.connector._scheduler._node._sessions), 1)

    def test_windows_only(self) -> None:
        self.both(Shape([GroupShape("window", window=10)]), 44 / 48, prompts(5, tokens=48, shared=32))

    def test_a_window_leaves_no_tail_behind(self) -> None:
        """Whatever is left over after a prompt's last whole block: the tail before it is stored before it leaves the window."""
        for tokens in (45, 46, 47, 48):
            for step_tokens in (7, 64):
                with self.subTest(tokens=tokens, step_tokens=step_tokens):
                    node, shape = self.shared(), self.own(Shape([GroupShape("window", window=10)], step_tokens=step_tokens))
                    text = prompts(1, tokens=tokens)[0]
                    wanted = self.serve(self.play(node, shape), [text], outputs=1)
                    second = self.play(node, shape)
                    self.assertEqual(self.serve(second, [text], outputs=1), wanted)
                    # Where all is held, the last block is computed again.
                    self.assertEqual(second.external_tokens, 44)

    def test_hybrid(self) -> None:
        texts = [[n * 100 + i for i in range(48)] for n in range(4)]
        groups = [GroupShape("full"), GroupShape("window", window=9), GroupShape("window", window=14)]
        self.both(Shape(groups, blocks=160), 0.9, texts)

    def test_hybrid_of_block_sizes(self) -> None:
        texts = [[n * 100 + i for i in range(48)] for n in range(4)]
        groups = [GroupShape("full", block_tokens=8), GroupShape("window", window=9, block_tokens=4)]
        self.both(Shape(groups, blocks=160), 40 / 48, texts)  # where all is held, the last block is computed again

    def test_chunked_prefill(self) -> None:
        self.both(Shape(step_tokens=7))

    def test_speculation(self) -> None:
        self.both(Shape(drafts=3))

    def test_asynchronous(self) -> None:
        self.both(Shape(asynchronous=True))
        self.both(Shape(asynchronous=True, prefix_caching=False, drafts=2, step_tokens=24))

    def test_preemption(self) -> None:
        first, _ = self.both(Shape(blocks=24, step_tokens=48), 0.5)
        texts = prompts(6, 40, 8)
        for asynchronous in (False, True):
            engine = self.play(self.shared(), self.own(Shape(blocks=30, step_tokens=48, asynchronous=asynchronous)))
            self.serve(engine, texts, outputs=16)
            self.serve(engine, texts, outputs=16)
            self.assertGreater(engine.preemptions, 0)

    def test_output_blocks(self) -> None:
        """What an answer added is found by the next turn of the conversation."""
        node, shape = self.shared(), self.own(Shape())
        engine = self.play(node, shape)
        text = prompts(1)[0]
        (answer,) = self.serve(engine, [text], outputs=21)
        self.until_held(node, engine, 60)
        other = self.play(node, shape)
        self.serve(other, [text + answer + [5]])
        self.assertEqual(other.external_tokens, 60)  # the last token that was answered was never computed

    def test_two_models_share_nothing(self) -> None:
        node, shape = self.shared(), self.own(Shape())
        self.serve(self.play(node, shape), prompts(3))
        for other in (replace(shape, model="another"), Shape(options={"weights_digest": "cd" * 32}), replace(shape, tp=2)):
            engine = self.play(node, other)
            self.serve(engine, prompts(3))
            self.assertEqual(engine.external_tokens, 0)


class Requests(EngineCase):
    """Single requests that are special."""

    def test_what_is_not_loaded(self) -> None:
        node, shape = self.shared(), self.own(Shape())
        first = self.play(node, shape)
        self.serve(first, prompts(2))
        self.until_held(node, first, 40)
        engine = self.play(node, shape)
        cases: list[dict[str, Any]] = [
            {"skip_reading": True},
            {"lora_request": object()},
            {"cache_salt": "another tenant"},
            {"kv_transfer_params": {"kvtier": {"load": False}}},
        ]
        for more in cases:
            self.serve(engine, [prompts(1)[0]], **more)
            self.assertEqual(engine.external_tokens, 0, more)
            engine.pool.cached.clear()
        self.serve(engine, [prompts(1)[0]])
        self.assertEqual(engine.external_tokens, 40)

    def test_less_than_a_block(self) -> None:
        """No node has any of it: it is held up by nothing."""
        engine = self.play(self.shared(), self.own(Shape()))
        self.serve(engine, [[5, 6]])
        self.assertEqual((engine.most_nones, engine.external_tokens), (0, 0))

    def test_what_is_not_stored(self) -> None:
        engine = self.play(self.shared(), self.own(Shape()))
        self.serve(engine, prompts(2), lora_request=object())
        self.serve(engine, prompts(2, seed=2), kv_transfer_params={"kvtier": {"store": False}})
        self.assertEqual(self.stored(engine), 0)

    def test_unknown_kinds(self) -> None:
        with self.assertLogs("kvtier.vllm", "WARNING") as logs:
            engine = self.play(self.shared(), self.own(Shape([GroupShape("full"), GroupShape("mamba")])), attached=False)
        self.assertEqual(len([line for line in logs.output if "MambaSpec" in line]), 1)
        self.serve(engine, prompts(3))
        self.assertEqual((self.stored(engine), engine.external_tokens), (0, 0))

    def test_context_parallel_is_refused(self) -> None:
        engine = self.play(self.shared(), self.own(Shape(dcp=2)), attached=False)
        self.serve(engine, prompts(3))
        self.assertEqual(engine.connector._scheduler.refusal[:28], "decode_context_parallel_size")

    def test_a_root_that_is_drawn_is_told(self) -> None:
        utils = types.ModuleType("vllm.v1.core.kv_cache_utils")
        hashing = types.ModuleType("vllm.utils.hashing")
        hashing.get_hash_fn_by_name = {"sha256": lambda value: hashlib.sha256(value).digest()}.__getitem__  # type: ignore[attr-defined]
        made = {
            "drawn": ("NONE_HASH = __import__('os').urandom(32)", 1),
            "fixed": ("NONE_HASH = hash_fn(b'0')", 0),
            "not understood": ("raise ValueError('another way')", 0),
        }
        for name, (how, lines) in made.items():
            exec(f"def init_none_hash(hash_fn):\n    global NONE_HASH\n    {how}", vars(utils))
            utils.NONE_HASH = ROOT  # type: ignore[attr-defined]
            with (
                self.subTest(name),
                # From the first moment on: a thread looks for the root as soon as it can, and would find that of the test before.
                mock.patch.dict(sys.modules, {hashing.__name__: hashing, utils.__name__: utils}),
                mock.patch("engine_play._utils", utils),
                self.assertLogs("kvtier.vllm", "INFO") as logs,
            ):
                self.play(self.shared(), self.own(Shape()))
                logging.getLogger("kvtier.vllm").info("there are logs")
                self.assertEqual(len([line for line in logs.output if "PYTHONHASHSEED" in line]), lines)
                self.assertEqual(utils.NONE_HASH, ROOT)

    def test_nothing_turns_often_beside_an_engine_that_needs_nothing(self) -> None:
        engine = self.play(self.shared(), self.own(Shape()))
        self.attach(engine)
        pauses: list[float] = []
        node = engine.connector._scheduler._node
        real = node._poked

        def wait(pause_s: float) -> bool:
            pauses.append(pause_s)
            return real.wait(pause_s)

        node._poked = types.SimpleNamespace(wait=wait, clear=real.clear, set=real.set)
        until("it has turned", lambda: len(pauses) > 3)
        self.assertEqual(pauses[-1], 0.2)
        node.pin(node.attached(), {0: b"p" * 32}, 1.0)
        until("it is awake", lambda: 0.05 in pauses[3:])

    def test_abort_at_every_step(self) -> None:
        node, shape = self.shared(), self.own(Shape(prefix_caching=False))
        first = self.play(node, replace(shape, prefix_caching=True))
        self.serve(first, prompts(2))
        self.until_held(node, first, 40)
        engine = self.play(node, shape)
        for after in range(8):
            engine.add(f"aborted {after}", prompts(2)[after % 2], 6)
            for _ in range(after):
                engine.step()
            engine.abort(f"aborted {after}")
            engine.run()
            self.check(engine)
            self.no_leases(engine)

    def test_the_local_hit_shrinks(self) -> None:
        """What was staged behind a local hit does not serve a request that has lost it."""
        node, shape = self.shared(), self.own(Shape())
        first = self.play(node, shape)
        (wanted,) = self.serve(first, [prompts(1)[0]])
        self.until_held(node, first, 40)
        engine = self.play(node, shape)
        self.serve(engine, [prompts(1)[0][:16] + [9] * 5])
        engine.waiting.clear()
        engine.add("shrinks", prompts(1)[0])
        half = engine.connector._scheduler
        request = engine.requests["shrinks"]
        until("it is staged", lambda: half.matched(request, 16)[0] is not None)
        self.assertEqual(half.matched(request, 16), (24, True))
        engine.pool.cached.clear()
        engine.run()
        self.check(engine)
        self.assertEqual(engine.done["shrinks"].output_tokens(), wanted)
        self.assertEqual(half.counters["restaged"], 1)

    def test_reset_is_another_generation(self) -> None:
        node, shape = self.shared(), self.own(Shape())
        engine = self.play(node, shape)
        self.serve(engine, prompts(3))
        before = self.stored(engine)
        self.assertTrue(engine.connector.reset_cache())
        engine.pool.cached.clear()
        self.attach(engine)
        self.serve(engine, prompts(3))
        self.assertEqual(engine.external_tokens, 0)
        self.assertEqual(self.stored(engine), 2 * before)
        again = self.play(node, shape)  # from disk, the weights are those of before
        self.serve(again, prompts(3))
        self.assertGreater(again.external_tokens, 0)


class Faults(EngineCase):
    """Whatever the node does: no request fails, no token differs, and it is found again by itself."""

    def setUp(self) -> None:
        super().setUp()
        self.texts = prompts(5)
        self.wanted = self.serve(self.alone(), self.texts)

    def until_stored(self, engine: Engine) -> None:
        """What a busy node gives no room in time is offered again."""

        def are_held() -> bool:
            if all(self.held(engine, one) >= 40 for one in engine.done.values()):
                return True
            self.assertEqual(self.serve(engine, self.texts), self.wanted)
            return False

        until("all are held", are_held)

    def until_found(self, engine: Engine) -> None:
        """A busy node may answer a lookup late, or an offer when the engine's last step is over."""
        found = engine.external_tokens

        def is_found() -> bool:
            self.assertEqual(self.serve(engine, self.texts), self.wanted)
            return engine.external_tokens > found

        until("what is stored is found", is_found)

    def test_no_node_at_the_start(self) -> None:
        node = Node()
        self.addCleanup(node.remove)
        engine = self.play(node, attached=False)
        began = time.monotonic()
        self.assertEqual(self.serve(engine, self.texts), self.wanted)  # the first wait a moment for their session
        self.assertLess(time.monotonic() - began, 10)
        engine.most_nones = 0
        self.assertEqual(self.serve(engine, self.texts), self.wanted)
        self.assertEqual(engine.most_nones, 0)
        node.start()
        self.attach(engine)
        self.assertEqual(self.serve(engine, self.texts), self.wanted)

    def test_a_node_that_takes_its_time_at_the_start(self) -> None:
        """The first requests wait for their sessions as long as for an answer."""
        node = self.node()
        first = self.play(node)
        self.serve(first, self.texts)
        self.until_stored(first)
        node.send(signal.SIGSTOP)  # it accepts who comes, and says nothing
        for where, name, of in ((node_module, "_FIRST_S", 0.02), (claims.Claims, "_answer_s", lambda *_: 60.0)):
            self.enterContext(mock.patch.object(where, name, of))
        engine = self.play(node, attached=False)
        for i, text in enumerate(self.texts):
            engine.add(f"{i}", text)
        began = time.monotonic()
        while time.monotonic() - began < 0.1:  # more than is waited for where there is no node
            engine.step()
        node.send(signal.SIGCONT)
        engine.run()
        self.check(engine)
        self.assertEqual([engine.done[f"{i}"].output_tokens() for i in range(len(self.texts))], self.wanted)
        self.assertNotIn("denied_not_attached", engine.connector._scheduler.counters)
        self.assertGreater(engine.external_tokens, 0)

    def test_an_arena_that_cannot_be_seen(self) -> None:
        """Another mount in this container: misses, told once; found as soon as it is there."""
        node = self.node()
        folder = self.enterContext(tempfile.TemporaryDirectory(dir="/dev/shm"))
        with self.assertLogs("kvtier.vllm", "WARNING") as logs:
            engine = self.play(node, Shape(options={"arena_dir": folder, "lookup_deadline_ms": 300}), attached=False)
            until("it is told", lambda: logs.records)
            self.assertEqual(self.serve(engine, self.texts), self.wanted)
        self.assertEqual(len(logs.records), 1, logs.output)
        seen = Path(engine.connector._scheduler._node._sessions[0].attachment.arena.path)
        for name in (seen.name, f"{seen.name}.lock"):
            (seen.parent / name).hardlink_to(Path(node.arena_folder) / name)
        self.attach(engine)
        engine.pool.cached.clear()
        self.assertEqual(self.serve(engine, self.texts), self.wanted)
        self.assertGreater(self.stored(engine), 0)

    def test_killed_and_back(self) -> None:
        node = self.node()
        engine = self.play(node, Shape(prefix_caching=False))
        self.assertEqual(self.serve(engine, self.texts), self.wanted)
        for after in (0, 1, 2, 3):
            names = [f"killed {after} {i}" for i in range(5)]
            for name, text in zip(names, self.texts):
                engine.add(name, text)
            for _ in range(after):
                engine.step()
            node.end(signal.SIGKILL)
            engine.run()
            self.check(engine)
            self.assertEqual([engine.done[name].output_tokens() for name in names], self.wanted)
            node.start()
            self.attach(engine)
        self.assertEqual(self.serve(engine, self.texts), self.wanted)
        self.until_found(engine)

    def test_silent(self) -> None:
        """SIGSTOP: one deadline, not one a request."""
        node = self.node()
        options = {"lookup_deadline_ms": 300, "load_deadline_ms": 500}
        engine = self.play(node, Shape(prefix_caching=False, options=options))
        self.assertEqual(self.serve(engine, self.texts), self.wanted)
        self.until_stored(engine)
        asked = engine.connector._scheduler.counters.get("denied_lookup", 0)
        node.send(signal.SIGSTOP)
        began = time.monotonic()
        for _ in range(4):
            self.assertEqual(self.serve(engine, self.texts), self.wanted)
        asked = engine.connector._scheduler.counters.get("denied_lookup", 0) - asked
        self.assertLessEqual(asked, len(self.texts))
        self.assertLess(time.monotonic() - began, 12)
        node.send(signal.SIGCONT)
        self.attach(engine)
        self.until_found(engine)

    def test_slow_to_answer(self) -> None:
        """The node answers after the deadline, before the engine comes to these requests: they are asked again, and loaded."""
        node = self.node()
        engine = self.play(node, Shape(prefix_caching=False, options={"lookup_deadline_ms": 100}))
        self.assertEqual(self.serve(engine, self.texts), self.wanted)
        self.until_stored(engine)
        half = engine.connector._scheduler
        found = engine.external_tokens
        node.send(signal.SIGSTOP)
        names = [f"slow {i}" for i in range(5)]
        with mock.patch("kvtier.session.Session.in_arena", return_value=None):
            for name, text in zip(names, self.texts):
                engine.add(name, text)
        until("no answer came in time", lambda: all(half._requests[name].lookups.done for name in names))
        node.send(signal.SIGCONT)
        until("the node has answered since", lambda: half._node.attached())
        engine.run()
        self.check(engine)
        self.assertEqual([engine.done[name].output_tokens() for name in names], self.wanted)
        self.assertEqual(engine.external_tokens - found, 5 * 40, self.told(engine))

    def test_full(self) -> None:
        """An arena for a few blocks: the rest is refused, and computed."""
        node = self.node(arena_bytes=1 << 20, disk_bytes=None)
        engine = self.play(node, Shape(prefix_caching=False))
        for seed in range(20):
            self.serve(engine, prompts(5, seed=seed + 2))
        self.assertGreater(engine.connector._scheduler.counters["stored_blocks"], 256)  # slots of 4 KiB
        self.assertEqual(self.serve(engine, self.texts), self.wanted)

    def test_corrupt(self) -> None:
        """Bytes of the arena are flipped: found before they are claimed, and told to the node."""
        node = self.node(disk_bytes=None)
        engine = self.play(node, Shape(prefix_caching=False))
        self.assertEqual(self.serve(engine, self.texts), self.wanted)
        self.until_held(node, engine, 40)
        self.flip(engine)
        found = engine.external_tokens
        self.assertEqual(self.serve(engine, self.texts), self.wanted)
        self.assertEqual(engine.external_tokens, found)
        self.assertGreaterEqual(engine.connector._scheduler.counters["bad_blocks"], 10)
        self.until_held(node, engine, 4)
        self.assertEqual(self.serve(engine, self.texts), self.wanted)
        self.assertGreater(engine.external_tokens, found)

    def test_corrupt_in_the_middle(self) -> None:
        """One block of a chain is spoilt: what is before it is loaded, and the chain is whole again after that request."""
        text = prompts(1)[0]
        node = self.node(disk_bytes=None)
        engine = self.play(node, Shape(prefix_caching=False))
        (wanted,) = self.serve(engine, [text])
        for spoilt in (6, 3):
            self.until_held(node, engine, 40)
            self.flip_block(engine, next(iter(engine.done.values())), spoilt)
            for loaded in (4 * spoilt, 40):
                found = engine.external_tokens
                self.assertEqual(self.serve(engine, [text]), [wanted])
                self.assertEqual(engine.external_tokens - found, loaded)
                self.until_held(node, engine, 40)

    def test_corrupt_behind_the_check(self) -> None:
        """Flipped between claim and copy: reported, recomputed, never claimed again for that request."""
        node = self.node(disk_bytes=None)
        for shape in (Shape(prefix_caching=False), Shape([GroupShape(), GroupShape("window", window=9)], prefix_caching=False)):
            engine = self.play(node, shape)
            self.assertEqual(self.serve(engine, self.texts), self.wanted)
            self.until_held(node, engine, 40)
            half = engine.connector._scheduler
            real = half.allocated

            def flipped(request: Any, blocks: Any, tokens: int) -> None:
                real(request, blocks, tokens)
                if tokens:
                    self.flip(engine)

            half.allocated = flipped
            self.assertEqual(self.serve(engine, self.texts), self.wanted)
            self.assertGreater(half.counters["corrupt_blocks"], 0)

    def test_a_callback_that_raises(self) -> None:
        """Whatever goes wrong in here, requests end with their tokens, also those that wait for a load."""
        node, shape = self.shared(), self.own(Shape(prefix_caching=False))
        first = self.play(node, shape)
        self.serve(first, self.texts)
        self.until_held(node, first, 40)
        for broken in ("scheduler.SchedulerHalf.matched", "scheduler.SchedulerHalf.new_request", "staging.Stage.parts"):
            engine = self.play(node, shape)
            names = [f"{broken} {i}" for i in range(5)]
            with mock.patch(f"kvtier.vllm.{broken}", side_effect=RuntimeError("on purpose")):
                with self.assertLogs("kvtier.vllm", "ERROR") as logs:
                    for name, text in zip(names, self.texts):
                        engine.add(name, text)
                    engine.run()
            self.assertLessEqual(len(logs.records), 2, "told once for each callback, and counted")
            self.assertEqual([engine.done[name].output_tokens() for name in names], self.wanted)
            self.assertEqual(engine.wrong, [])
            self.assertTrue(engine.all_free())
            self.no_leases(engine)


if __name__ == "__main__":
    unittest.main()
