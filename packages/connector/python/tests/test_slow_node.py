"""A node that gets little of a processor: it is slow and not silent, and what it was asked is waited for."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
import types
import unittest
from typing import Any
from unittest import mock

import kvtier
from fake_node import FakeNode, attached
from kvtier.link import SILENT_AFTER_S
from rig import BLOCK_TOKENS, Memory, Node, NodeCase, chain, until

PAYLOAD_BYTES = 8192
CHAINS, BLOCKS = 20, 40
RIVALS = 3


class SlowNode(NodeCase):
    def session(self, node: Node, number: int) -> kvtier.Session:
        namespace = bytes([number]) * 32
        session = kvtier.Session(node.socket_path, namespace=namespace, payload_bytes=PAYLOAD_BYTES, block_tokens=BLOCK_TOKENS)
        self.addCleanup(session.close)
        until("the pulse is read", lambda: (now := session.attachment) and now._link.pulse)
        return session

    def store(self, session: kvtier.Session) -> None:
        copies = kvtier.Copies()
        memory = Memory(copies, BLOCKS, PAYLOAD_BYTES)
        arena = None
        for number in range(CHAINS):
            reservation = session.reserve(b"", chain(f"slow {number}", BLOCKS))
            until("reserve is answered", lambda: reservation.done)
            arena = arena or copies.map(reservation.attachment.arena)
            job = copies.store(arena, memory.layout, reservation.open, [reservation.offsets[i] for i in reservation.open])
            until("the copies end", job.ended)
            commit = reservation.commit(reservation.open, job.take().checksums)
            until("commit is answered", lambda: commit.done)
            self.assertEqual(commit.result(), BLOCKS)
        copies.close()

    def rivals(self, node: Node) -> list[subprocess.Popen[bytes]]:
        """On one processor with it, of which they leave its event loop one part in 200."""
        rivals = []
        processors = sorted(os.sched_getaffinity(0))
        others = set(processors[:-1]) or set(processors)
        for thread in os.listdir("/proc/self/task"):
            os.sched_setaffinity(int(thread), others)
            self.addCleanup(os.sched_setaffinity, int(thread), set(processors))
        assert node.process is not None
        for thread in os.listdir(f"/proc/{node.process.pid}/task"):
            os.sched_setaffinity(int(thread), {processors[-1]})
        os.setpriority(os.PRIO_PROCESS, node.process.pid, 19)  # of its first thread alone
        for _ in range(RIVALS):
            rival = subprocess.Popen(["sh", "-c", "while :; do :; done"])
            self.addCleanup(rival.wait)
            self.addCleanup(rival.kill)
            os.sched_setaffinity(rival.pid, {processors[-1]})
            rivals.append(rival)
        return rivals

    def test_a_burst_of_loads_after_a_restart_on_a_busy_machine(self) -> None:
        node = self.node(arena_bytes=64 << 20, disk_bytes=256 << 20)
        for number in (1, 2):
            self.store(self.session(node, number))
        node.end(signal.SIGTERM)
        node.start()
        sessions = [self.session(node, number) for number in (1, 2)]
        links = [session.attachment._link for session in sessions]  # type: ignore[union-attr]
        rivals = self.rivals(node)
        chains = [chain(f"slow {number}", BLOCKS) for number in range(CHAINS)]
        lookups = [session.lookup(hashes, deadline_s=300) for hashes in chains for session in sessions]
        loads = [session.load(hashes, deadline_s=300) for hashes in chains for session in sessions]
        asked_at, longest_s, suspended = time.monotonic(), 0.0, 0

        def all_done() -> bool:
            nonlocal longest_s, suspended
            longest_s = max(longest_s, *(time.monotonic() - max(asked_at, link._heard_at) for link in links))
            suspended += any(session.suspended for session in sessions)
            if longest_s > 2 * SILENT_AFTER_S:  # seen; without them the rest is soon there
                for rival in rivals:
                    rival.kill()
            return all(one.done for one in (*lookups, *loads))

        until("all is answered", all_done, 200)
        self.assertEqual([one.error for one in (*lookups, *loads) if one.error is not None], [])
        self.assertEqual([lookup.result().blocks for lookup in lookups], [BLOCKS] * len(lookups))
        self.assertEqual([(load.ready, load.reason) for load in loads], [(BLOCKS, "")] * len(loads))
        self.assertEqual((suspended, [session.sessions for session in sessions]), (0, [1, 1]))
        # It would have been taken for a node that stands still.
        self.assertGreater(longest_s, 2 * SILENT_AFTER_S)
        for load in loads:
            load.release()


class Attaching(unittest.TestCase):
    """A node that does not answer an Attach is given up after what the session itself has waited, not after what the clock has gone on."""

    def setUp(self) -> None:
        self.asked, self.may_answer = threading.Semaphore(0), threading.Event()
        self.node = FakeNode(self.answer)
        self.addCleanup(self.node.close)
        self.addCleanup(self.may_answer.set)

    def answer(self, request: Any) -> list[bytes]:
        self.asked.release()
        self.may_answer.wait()
        return [attached(request)]

    def session(self) -> kvtier.Session:
        session = kvtier.Session(self.node.path, namespace=b"n" * 32, payload_bytes=1000, block_tokens=16)
        self.addCleanup(session.close)
        self.assertTrue(self.asked.acquire(timeout=30))
        return session

    def test_time_in_which_neither_side_ran_is_not_waited(self) -> None:
        ahead, looks = [0.0], [0]

        def monotonic() -> float:
            looks[0] += 1
            return time.monotonic() + ahead[0]

        clock = types.SimpleNamespace(monotonic=monotonic)
        with mock.patch("kvtier.session.time", clock), mock.patch("kvtier.link.time", clock):
            session = self.session()
            ahead[0] = 6.0
            before = looks[0]
            until("it has turned", lambda: looks[0] > before + 20)
            self.may_answer.set()
            until("it is attached", lambda: session.attachment)
            self.assertEqual((session.failing, session.sessions, self.node.connections), (False, 1, 1))
            session.close()

    def test_a_node_that_says_nothing_is_given_up(self) -> None:
        with mock.patch("kvtier.session.ATTACH_DEADLINE_S", 0.3), self.assertLogs("kvtier", "WARNING") as logs:
            session = self.session()
            until("it has given up", lambda: session.failing)
        self.assertIn("did not answer in time", logs.output[0])
        self.may_answer.set()
        until("it is attached", lambda: session.attachment)


if __name__ == "__main__":
    unittest.main()
