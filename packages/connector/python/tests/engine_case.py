"""What tests of the played engine have in common: prompts, engines that are closed, what must hold after each of them."""

from __future__ import annotations

import hashlib
import itertools
import unittest
from collections.abc import Iterable
from dataclasses import replace
from typing import Any
from unittest import mock

from rig import Node, NodeCase, until

from engine_parts import Shape
from engine_play import Engine
from kvtier.leases import Load


def prompts(count: int, tokens: int = 40, shared: int = 24, seed: int = 1) -> list[list[int]]:
    """With a prefix in common, and a tail of their own."""
    return [[seed * 7 + i for i in range(shared)] + [1000 * (n + 1) + i for i in range(tokens - shared)] for n in range(count)]


def record_releases(case: unittest.TestCase) -> list[list[int]]:
    """From now on: of each lease that ends, the blocks that the node is told to be corrupt."""
    said: list[list[int]] = []
    release = Load.release

    def recorded(load: Load, corrupt: Iterable[int] = ()) -> None:
        told = sorted(corrupt)
        if not load._released:
            said.append(told)
        release(load, told)

    case.enterContext(mock.patch.object(Load, "release", recorded))
    return said


_models = itertools.count()


class EngineCase(NodeCase):
    @staticmethod
    def own(shape: Shape) -> Shape:
        """The same of a model that nobody else has."""
        digest = hashlib.sha256(f"{next(_models)}".encode()).hexdigest()
        return replace(shape, options={**shape.options, "weights_digest": digest})

    def alone(self, shape: Shape | None = None) -> Engine:
        """An engine that has no node, and does not look for one."""
        shape = shape or Shape()
        options = {**shape.options, "load": False, "store": False}
        return self.play(None, replace(shape, options=options), socket="/nowhere/node.sock", attached=False)

    def play(self, node: Node | None, shape: Shape | None = None, socket: str = "", attached: bool = True) -> Engine:
        engine = Engine(shape or Shape(), node.socket_path if node else socket)
        self.addCleanup(engine.close)
        if attached:
            self.attach(engine)
        return engine

    def attach(self, engine: Engine) -> None:
        def ready() -> bool:
            engine.step()
            half = engine.connector._scheduler
            return half is not None and half._node is not None and half._node.attached() is not None

        until("the engine is attached", ready)

    def prefill(self, node: Node, shape: Shape, text: list[int]) -> tuple[Engine, dict[str, Any]]:
        """For another pod: its answer is out, its last blocks are not."""
        engine = self.play(node, shape)
        asked = {"do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None}
        engine.add("prefill", text, 1, kv_transfer_params=asked)
        while "prefill" not in engine.done:
            engine.step()
        return engine, engine.done["prefill"].answer or {}

    def serve(self, engine: Engine, texts: list[list[int]], outputs: int = 4, **more: Any) -> list[list[int]]:
        """Greedy tokens of all prompts; with nothing wrong and nothing left behind."""
        names = [f"{engine.steps}-{i}" for i in range(len(texts))]
        for name, text in zip(names, texts):
            engine.add(name, text, outputs, **more)
        engine.run()
        self.check(engine)
        return [engine.done[name].output_tokens() for name in names]

    def both(self, shape: Shape, least: float = 0.95, texts: list[list[int]] | None = None) -> tuple[Engine, Engine]:
        """What the first stored, the second loads; both give the tokens of an engine without a node."""
        texts, shape, node = texts or prompts(5), self.own(shape), self.shared()
        wanted = self.serve(self.alone(shape), texts)
        first = self.play(node, shape)
        self.assertEqual(self.serve(first, texts), wanted)
        self.assertEqual(self.serve(first, texts), wanted)
        enough = least * sum(len(text) // first.align * first.align for text in texts)
        until("what the first stored is held", lambda: sum(self.held(first, one) for one in list(first.done.values())[: len(texts)]) >= enough)
        second = self.play(node, shape)
        self.assertEqual(self.serve(second, texts), wanted)
        align = second.align
        whole = sum(len(text) // align * align for text in texts)
        found = second.external_tokens + second.local_tokens
        self.assertGreaterEqual(found, least * whole, self.told(first, second, whole))
        self.assertGreater(second.external_tokens, 0)
        return first, second

    def check(self, engine: Engine) -> None:
        self.assertEqual(engine.wrong, [])
        self.assertTrue(engine.all_free(), "blocks are still held")
        self.assertEqual(engine.connector.troubles.count, 0)
        for worker in engine.workers:
            self.assertEqual(worker.connector.troubles.count, 0)

    def told(self, *engines: Any) -> str:
        """What to look at when too little was found."""
        return str([(e.connector._scheduler.counters, e.external_tokens, e.local_tokens) if isinstance(e, Engine) else e for e in engines])

    def until_held(self, node: Node, engine: Engine, tokens: int) -> None:
        """Commits are confirmed by nobody: they are asked for."""
        last = max(engine.done.values(), key=lambda request: request.num_tokens)
        until(f"{tokens} tokens are held", lambda: self.held(engine, last) >= tokens)

    def held(self, engine: Engine, request: Any) -> int:
        """Tokens from the request's beginning that the node holds for each rank and group without a window; 0: it does not say so now."""
        attached = engine.connector._scheduler._node.attached()
        if attached is None:
            return 0
        least = request.num_tokens
        for share, session in zip(attached.shares, attached.sessions):
            if share.group.window_tokens:
                continue
            step = share.group.hash_step
            asked = session.lookup(b"".join(request.block_hashes[step - 1 :: step]), deadline_s=5)
            if not asked.wait(5) or asked.error is not None:
                return 0
            least = min(least, asked.result().blocks * share.group.block_tokens)
        return least

    def no_leases(self, engine: Engine) -> None:
        """All that was leased or reserved is given back."""
        attached = engine.connector._scheduler._node.attached()
        until("nothing is leased", lambda: all(one.drained(0) for one in attached.attachments), 5)

    def flip(self, engine: Engine) -> None:
        """A byte of every slot of the arena, each time another one: what is flipped twice would be whole again."""
        self._flips = getattr(self, "_flips", 0) + 1
        attached = engine.connector._scheduler._node.attached()
        size = -(-(attached.shares[0].payload_bytes + 256) // 4096) * 4096
        with open(attached.arena.ref.path, "r+b") as file:
            for at in range(4096 + 256 + self._flips, attached.arena.ref.bytes, size):
                file.seek(at)
                byte = file.read(1)
                file.seek(at)
                file.write(bytes([byte[0] ^ 0x10]))

    def flip_block(self, engine: Engine, request: Any, block: int) -> None:
        """A byte of one block of a request's chain, as every share has it."""
        attached = engine.connector._scheduler._node.attached()
        for share, session in zip(attached.shares, attached.sessions):
            step = share.group.hash_step
            load = session.load(b"".join(request.block_hashes[step - 1 :: step]), deadline_s=20)
            until("it lies in the arena", lambda load=load: load.done, 30)
            (offset,) = load.slots(block, block + 1).offsets
            with open(attached.arena.ref.path, "r+b") as file:
                file.seek(offset)
                byte = file.read(1)
                file.seek(offset)
                file.write(bytes([byte[0] ^ 0x10]))
            load.release()

    def stored(self, engine: Engine) -> int:
        return engine.connector._scheduler.counters.get("stored_blocks", 0)
