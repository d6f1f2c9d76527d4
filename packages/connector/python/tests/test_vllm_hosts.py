"""The connector for vLLM, engines on two hosts: each with a cache node of its own, which are peers over a network."""

from __future__ import annotations

import json
import os
import signal
import unittest
from pathlib import Path
from typing import Any

from kvtier.vllm.lookups import hashes_of
from rig import Node, until

from engine_case import EngineCase, prompts
from engine_parts import GroupShape, Shape
from engine_play import Engine

#: Of each host, by what a command is started there, and its address: from test/e2e/vllm-contract.slow.test.ts.
HOSTS = json.loads(os.environ.get("KVTIER_TEST_HOSTS", "[]"))
PORT = 7411


class Hosts(EngineCase):
    def setUp(self) -> None:
        super().setUp()
        if len(HOSTS) != 2:
            self.skipTest("KVTIER_TEST_HOSTS names two hosts: run test/e2e/vllm-contract.slow.test.ts")
        self.nodes = [Node(disk_bytes=None) for _ in HOSTS]
        for node in self.nodes:
            self.addCleanup(node.remove)
        secret = Path(self.nodes[0].folder, "secret")
        secret.write_text("x" * 48)
        secret.chmod(0o600)
        security = {"encryption": "none", "secretFile": str(secret), "trustedNetwork": True}
        for own, other, node in zip(HOSTS, reversed(HOSTS), self.nodes):
            node.host = own["prefix"]
            peers = [{"host": other["address"], "port": PORT}]
            node.config["peers"] = {"listen": {"host": own["address"], "port": PORT}, "peers": peers, "security": security}
            node.start()

    def until_known(self, engine: Engine, other: Engine, texts: list[list[int]]) -> None:
        """The node of `other` holds, and that of `engine` has heard of, all whole blocks of each prompt."""
        unanswered = 0
        for _ in range(10):  # by a node that a busy machine kept waiting: what comes again is offered again
            before, unanswered = unanswered, other.connector._scheduler.counters.get("store_unanswered_blocks", 0)
            if unanswered == before:
                break
            self.serve(other, texts)
        for request in list(other.done.values())[-len(texts) :]:
            tokens = request.num_prompt_tokens // other.align * other.align
            for one, what in ((other, "are held by the node of who computed them"), (engine, "are known to the other node")):
                until(
                    f"{tokens} tokens {what}",
                    lambda one=one, request=request, tokens=tokens: self.held(one, request) >= tokens and self.tails_held(one, request, tokens),
                    seen=lambda request=request: [self.looked(each, request) for each in (other, engine)],
                )

    def tails_held(self, engine: Engine, request: Any, tokens: int) -> bool:
        """Of each window, the blocks that a token after so many looks at: they are told by themselves, and may be later than the others."""
        attached = engine.connector._scheduler._node.attached()
        if attached is None:
            return False
        for share, session in zip(attached.shares, attached.sessions):
            group = share.group
            if not group.window_tokens:
                continue
            end = tokens // group.block_tokens
            first = group.first_needed(0, end)
            asked = session.lookup(hashes_of(request.block_hashes, group, 0, end), gaps=True, deadline_s=5)
            if not asked.wait(5) or asked.error is not None:
                return False
            if not any(begin <= first and end <= last for begin, last in asked.result().ranges):
                return False
        return True

    def looked(self, engine: Engine, request: Any) -> list[Any]:
        """What an engine and its node say of a request's blocks, each session by itself."""
        attached = engine.connector._scheduler._node.attached()
        found: list[Any] = [self.told(engine)]
        if attached is None:
            return [*found, "its node does not answer"]
        for share, session in zip(attached.shares, attached.sessions):
            step = share.group.hash_step
            asked = session.lookup(b"".join(request.block_hashes[step - 1 :: step]), gaps=True, deadline_s=5)
            counters = session.stats(deadline_s=5)
            for one in (asked, counters):
                one.wait(5)
            found.append((share.number, asked.value, counters.value))
        return found

    def test_what_one_computed_the_other_loads(self) -> None:
        """Both ways; of ranks and groups, too."""
        near, far = self.nodes
        for shape in (Shape(), Shape(tp=2, model="of two ranks")):
            first, second = self.play(near, shape), self.play(far, shape)
            for seed, (one, other) in enumerate(((first, second), (second, first))):
                texts = prompts(5, seed=seed + 2)
                alone = self.alone(shape)
                wanted = self.serve(alone, texts)
                self.assertEqual(self.serve(one, texts), wanted)
                self.until_known(other, one, texts)
                before = other.external_tokens + other.local_tokens
                self.assertEqual(self.serve(other, texts), wanted)
                found = other.external_tokens + other.local_tokens - before
                self.assertEqual(found, sum(len(text) // other.align * other.align for text in texts), self.told(other))

    def test_windows(self) -> None:
        near, far = self.nodes
        shape = Shape([GroupShape(), GroupShape("window", window=9)], blocks=160)
        text = prompts(1, 41)[0]
        first, second = self.play(near, shape), self.play(far, shape)
        wanted = self.serve(first, [text])
        self.until_known(second, first, [text])
        self.assertEqual(self.serve(second, [text]), wanted)
        self.assertEqual(second.external_tokens, 40, self.told(second))

    def test_the_other_host_dies(self) -> None:
        """What it alone held is computed; no request fails, none differs."""
        near, far = self.nodes
        texts = prompts(5)
        first, second = self.play(near), self.play(far)
        wanted = self.serve(first, texts)
        self.until_known(second, first, texts)
        near.end(signal.SIGKILL)
        self.assertEqual(self.serve(second, texts), wanted)
        self.no_leases(second)
        self.assertEqual(self.serve(self.play(far), texts), wanted)


if __name__ == "__main__":
    unittest.main()
