"""A node that lies: nothing that it says raises into the engine, makes it wait beyond a deadline, or names memory that is not the arena's."""

from __future__ import annotations

import logging
import os
import random
import select
import socket
import struct
import tracemalloc
import unittest
import unittest.mock
from typing import Any, Callable

import kvtier
import kvtier.link
import kvtier.requests
from fake_node import ARENA_BYTES, FakeNode, attached, frame
from kvtier.protocol import ClientFrame
from rig import chain, until


class Lies(unittest.TestCase):
    def session(self, answer: Callable[[Any], list[bytes]]) -> tuple[kvtier.Session, FakeNode]:
        node = FakeNode(lambda request: [attached(request)] if request.WhichOneof("body") == "attach" else answer(request))
        self.addCleanup(node.close)
        session = kvtier.Session(node.path, namespace=b"n" * 32, payload_bytes=1000, block_tokens=16)
        self.addCleanup(session.close)
        until("attached", lambda: session.attachment)
        return session, node

    def code_of_load(self, answers: Callable[[int], list[bytes]]) -> tuple[str, int]:
        """What becomes of a load of three blocks, and how many of them were taken for ready. The session comes back."""
        session, node = self.session(lambda request: answers(request.id))
        load = session.load(chain("a", 3), deadline_s=0.5)
        until("the load ends", lambda: load.done)
        code, ready = (load.error.code if load.error else load.reason), load.ready
        load.release()
        if code in ("PROTOCOL", "DISCONNECTED"):
            until("it comes back", lambda: node.connections >= 2 and session.attachment)
        return code, ready

    def test_offsets_outside_of_the_arena(self) -> None:
        for offset in (0, 4096, 4351, ARENA_BYTES - 999, ARENA_BYTES, 1 << 53, (1 << 64) - 1):
            with self.subTest(offset=offset):
                answer = lambda i, offset=offset: [frame(i, "ready", first=0, offsets=[offset], checksums=[1])]
                self.assertEqual(self.code_of_load(answer), ("PROTOCOL", 0))
        edge = lambda i: [frame(i, "ready", first=0, offsets=[4352, ARENA_BYTES - 1000], checksums=[1, 2])]
        self.assertEqual(self.code_of_load(lambda i: [*edge(i), frame(i, "load_done", loaded=2, reason="missing")]), ("missing", 2))

    def test_all_blocks_are_ready_and_its_end_comes_late(self) -> None:
        whole = lambda i: frame(i, "ready", first=0, offsets=[4352, 8448, 12544], checksums=[1, 2, 3])
        late = lambda i: [whole(i), frame(i, "load_done", loaded=3, reason="")]
        for name, answers in {"never": lambda i: [whole(i)], "later": late}.items():
            with self.subTest(name):
                self.assertEqual(self.code_of_load(answers), ("", 3))

    def test_ready_ranges_out_of_order(self) -> None:
        good = lambda i: frame(i, "ready", first=0, offsets=[4352], checksums=[1])
        for name, then in {
            "a gap": lambda i: frame(i, "ready", first=2, offsets=[8448], checksums=[1]),
            "again": good,
            "too many": lambda i: frame(i, "ready", first=1, offsets=[8448] * 3, checksums=[1] * 3),
            "no checksum": lambda i: frame(i, "ready", first=1, offsets=[8448], checksums=[]),
            "another answer": lambda i: frame(i, "done", count=1),
        }.items():
            with self.subTest(name):
                self.assertEqual(self.code_of_load(lambda i: [good(i), then(i)]), ("PROTOCOL", 1))

    def test_frames_that_are_none(self) -> None:
        for name, answer in {
            "length 0": struct.pack("<I", 0),
            "too long": struct.pack("<I", (16 << 20) + 1),
            "no message": struct.pack("<I", 4) + b"\xff\xff\xff\xff",
            "no body": struct.pack("<I", 2) + b"\x08\x01",
        }.items():
            with self.subTest(name):
                self.assertEqual(self.code_of_load(lambda _: [answer]), ("PROTOCOL", 0))
        self.assertEqual(self.code_of_load(lambda i: [frame(i, "load_done", epoch=8)]), ("PROTOCOL", 0))
        self.assertEqual(self.code_of_load(lambda _: []), ("DISCONNECTED", 0))

    def test_a_reserve_with_another_number_of_answers(self) -> None:
        for fields in (
            {"status": [1], "offsets": [4352]},
            {"status": [1, 1, 1], "offsets": [4352, 8448]},
            {"status": [1, 1, 1], "offsets": [4352, 8448, ARENA_BYTES]},
        ):
            with self.subTest(fields=fields):
                session, node = self.session(lambda request: [frame(request.id, "reserved", **fields)])
                reservation = session.reserve(b"", chain("b", 3))
                until("it ends", lambda: reservation.done)
                self.assertEqual((reservation.error and reservation.error.code, reservation.open), ("PROTOCOL", []))
                until("it comes back", lambda: node.connections >= 2)

    def test_more_is_held_than_was_asked_for(self) -> None:
        session, node = self.session(lambda request: [frame(request.id, "lookup", held=4)])
        asked = session.lookup(chain("a", 3), deadline_s=0.5)
        until("it ends", lambda: asked.done)
        self.assertEqual((asked.error and asked.error.code, asked.value), ("PROTOCOL", None))
        until("it comes back", lambda: node.connections >= 2)

    def test_an_arena_that_cannot_be(self) -> None:
        for changes in ({"session": b"s"}, {"arena_bytes": 4096}, {"arena_bytes": 1 << 53}, {"header_bytes": ARENA_BYTES}):
            with self.subTest(changes=changes):
                node = FakeNode(lambda request: [attached(request, **changes)])
                session = kvtier.Session(node.path, namespace=b"n" * 32, payload_bytes=1000, block_tokens=16)
                until("it tries again", lambda: node.connections >= 2)
                self.assertIsNone(session.attachment)
                self.assertTrue(session.close())
                node.close()

    def test_any_bytes_end_every_request(self) -> None:
        def noise(seed: int) -> Callable[[Any], list[bytes]]:
            draw = random.Random(seed)

            def answer(request: Any) -> list[bytes]:
                sound = frame(request.id, draw.choice(["ready", "load_done", "reserved", "done", "lookup", "failure"]))
                spoilt = bytearray(sound)
                for _ in range(draw.randint(0, 3)):
                    spoilt[draw.randrange(len(spoilt))] = draw.randrange(256)
                return [bytes(spoilt) + draw.randbytes(draw.choice([0, 0, 5, 300]))]

            return answer

        probes = unittest.mock.patch("kvtier.link.Probe.deadline_s", 0.3)  # what comes may be the beginning of a frame
        probes.start()
        self.addCleanup(probes.stop)
        logging.getLogger("kvtier").setLevel(logging.CRITICAL)
        self.addCleanup(logging.getLogger("kvtier").setLevel, logging.NOTSET)
        sessions = [self.session(noise(seed))[0] for seed in range(11, 15)]  # they mostly wait, and do it together
        for _ in range(4):
            asked = []
            for session in sessions:
                until("attached", lambda: session.attachment)
                load = session.load(chain("c", 2), deadline_s=0.3)
                reservation = session.reserve(b"", chain("c", 2), deadline_s=0.3)
                asked.append((load, reservation, session.lookup(chain("c", 2), deadline_s=0.3)))
            for load, reservation, lookup in asked:
                until("all end", lambda: load.done and reservation.done and lookup.done)
                load.release()
                reservation.abort()
        for session in sessions:
            self.assertTrue(session.close())

    def test_anothers_folder_is_not_trusted(self) -> None:
        node = FakeNode(lambda request: [attached(request)])
        self.addCleanup(node.close)
        os.chmod(node.folder, 0o777)
        with self.assertLogs("kvtier", "WARNING") as logs:
            session = kvtier.Session(node.path, namespace=b"n" * 32, payload_bytes=1000, block_tokens=16)
            until("it says so", lambda: logs.output)
            session.close()
        self.assertIn("others may write there", logs.output[0])


class Waited(unittest.TestCase):
    """Of a node that answers in time, and of one that has nothing to say."""

    def link(self) -> tuple[kvtier.link.Link, socket.socket]:
        ours, theirs = socket.socketpair()
        self.addCleanup(theirs.close)
        ours.setblocking(False)
        wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self.addCleanup(os.close, wake_fd)
        link = kvtier.link.Link(ours, wake_fd)
        self.addCleanup(link.end, kvtier.KvError("DISCONNECTED", "the test ends"))
        return link, theirs

    def test_an_answer_is_read_into_memory_that_is_there(self) -> None:
        """Whatever is mapped and unmapped for it costs all cores of the engine."""
        link, theirs = self.link()
        answers = []
        for _ in range(2):
            request = kvtier.requests.Request("stats", {}, 5.0, "stats", lambda body: body)
            link.post(3 + len(answers), request)
            link.turn(0)
            theirs.sendall(frame(3 + len(answers), "stats"))
            tracemalloc.start()
            try:
                link.turn(0)
                answers.append(tracemalloc.get_traced_memory()[1])
            finally:
                tracemalloc.stop()
            self.assertTrue(request.done)
        self.assertLess(max(answers), 1 << 15)

    def silent(self, turn_s: float, turns: int, answers: bool, pulse: Any = None) -> tuple[bool, int, list[int]]:
        """A request that waits while turns of such a length pass: whether it still does, of how many suspensions, and at which turns a
        sign of life was asked for."""
        now = 1_000.0
        clock = unittest.mock.Mock(monotonic=lambda: now)
        with unittest.mock.patch.object(kvtier.link, "time", clock):
            link, theirs = self.link()
            theirs.setblocking(False)
            link.pulse = pulse
            link._poll = unittest.mock.Mock(poll=lambda _ms: [(link._socket.fileno(), select.POLLIN)])
            request = kvtier.requests.Request("stats", {}, 1e6, "stats", lambda body: body)
            theirs.sendall(frame(1, "done"))  # it has answered before
            link.turn(0)
            link.post(3, request)
            link.turn(0)
            theirs.recv(1 << 16)
            asked, suspensions = [], 0
            for turn in range(turns):
                now += turn_s
                before = link.suspended
                link.turn(0)
                link.turn(0)  # sends what was posted
                suspensions += link.suspended and not before
                try:
                    sent = ClientFrame.FromString(theirs.recv(1 << 16)[4:])
                except BlockingIOError:
                    continue
                asked.append(turn)
                if answers:
                    theirs.sendall(frame(sent.id, "stats"))
                    link.turn(0)
        return not request.done, suspensions, asked

    def test_a_node_that_has_nothing_to_say_is_asked_every_half_second_and_waited_for(self) -> None:
        waits, suspensions, asked = self.silent(0.0625, 160, answers=True)
        self.assertEqual((waits, suspensions, len(asked)), (True, 0, 20))

    def test_a_node_that_gives_no_sign_is_given_up(self) -> None:
        self.assertEqual(self.silent(0.0625, 19, answers=False)[:2], (True, 0))
        waits, suspensions, asked = self.silent(0.0625, 20, answers=False)
        self.assertEqual((waits, suspensions, len(asked)), (False, 1, 1))

    def test_a_node_whose_pulse_beats_is_slow_and_not_silent(self) -> None:
        pulse = unittest.mock.Mock(still_s=lambda: 0.4)
        self.assertEqual(self.silent(0.0625, 1_000, answers=False, pulse=pulse), (True, 0, []))

    def test_a_turn_of_the_node_that_does_not_end_is_its_silence(self) -> None:
        still = iter(0.03125 * turn for turn in range(1_000))  # beside one that waits, it gets half of a processor
        pulse = unittest.mock.Mock(still_s=lambda: next(still))
        self.assertEqual(self.silent(0.0625, 16, answers=False, pulse=pulse)[:2], (True, 0))
        still = iter(0.03125 * turn for turn in range(1_000))
        self.assertEqual(self.silent(0.0625, 100, answers=False, pulse=pulse)[:2], (False, 1))

    def test_a_node_without_a_beat_is_silent(self) -> None:
        pulse = unittest.mock.Mock(still_s=lambda: None)
        self.assertEqual(self.silent(0.0625, 19, answers=False, pulse=pulse)[:2], (True, 0))
        self.assertEqual(self.silent(0.0625, 20, answers=False, pulse=pulse)[:2], (False, 1))

    def late(self, beats: Any, asks: list[float], deadline_s: float, until_s: float) -> tuple[list[float], list[float], list[float]]:
        """Requests that no frame answers: when each of them ended, when a sign of life was asked for, and when the link was suspended. A
        turn is 10 ms. ``beats``: at which of them the pulse is told, as by ``still_s``."""
        at = 0
        clock = unittest.mock.Mock(monotonic=lambda: 1_000.0 + at / 100)
        with unittest.mock.patch.object(kvtier.link, "time", clock):
            link, theirs = self.link()
            theirs.setblocking(False)
            link.pulse = unittest.mock.Mock(still_s=lambda: beats(at / 100))
            link._poll = unittest.mock.Mock(poll=lambda _ms: [(link._socket.fileno(), select.POLLIN)])
            theirs.sendall(frame(1, "done"))  # it has answered before
            link.turn(0)
            ended: dict[int, float] = {}
            probed, suspended = [], []
            requests = []
            for at in range(round(until_s * 100)):
                if asks and at >= round(asks[0] * 100):
                    asks = asks[1:]
                    requests.append(kvtier.requests.Request("lookup", {}, deadline_s, "lookup", lambda body: body))
                    link.post(3 + len(requests), requests[-1])
                before = link.suspended
                link.turn(0)
                if link.suspended and not before:
                    suspended.append(at / 100)
                for number, request in enumerate(requests):
                    if request.done:
                        ended.setdefault(number, at / 100)
                try:
                    said = kvtier.protocol.FrameReader()
                    said._held += theirs.recv(1 << 16)
                    probed += [at / 100] * bytes(said._held).count(ClientFrame(stats={}).SerializeToString())
                except BlockingIOError:
                    pass
        return list(ended.values()), probed, suspended

    def test_a_deadline_beside_a_pulse_that_beats_is_no_standstill(self) -> None:
        beats = lambda at: 0.0 if at * 100 % 5 == 0 else None
        asks = [0.02, 0.1, 0.3]
        self.assertEqual(self.late(beats, asks, 0.05, 1.0), ([0.07, 0.15, 0.35], [0.08], []))
        # It beats and does not answer what it is asked for: it costs no deadline after 1.2 s.
        self.assertEqual(self.late(beats, [0.02, 0.9, 1.21, 1.3], 0.05, 2.0), ([0.07, 0.95, 1.26, 1.35], [0.08], [1.35]))

    def test_a_deadline_beside_a_turn_that_does_not_end_is_a_standstill(self) -> None:
        self.assertEqual(self.late(lambda at: 0.6 + at, [0.02], 0.3, 1.0), ([0.32], [0.33], [0.32]))

    def test_a_deadline_that_is_shorter_than_a_few_beats(self) -> None:
        """A node that is stopped is found 150 ms after the request, whose own deadline stands."""
        self.assertEqual(self.late(lambda at: 0.0 if at <= 0.02 else None, [0.02], 0.05, 1.0), ([0.07], [0.18], [0.17]))
        self.assertEqual(self.late(lambda at: None, [0.02], 0.3, 1.0), ([0.32], [0.33], [0.32]))
        self.assertEqual(self.late(lambda at: 0.0 if at == 0.14 else None, [0.02], 0.05, 1.0), ([0.07], [0.15], []))

    def test_time_without_a_turn_is_not_the_nodes_silence(self) -> None:
        self.assertEqual(self.silent(60.0, 11, answers=False)[:2], (True, 0))

    def test_an_answer_that_lies_there_when_its_deadline_is_looked_at(self) -> None:
        """The session's thread was kept from running in between: that is not the node's silence."""
        link, theirs = self.link()
        request = kvtier.requests.Request("stats", {}, 5.0, "stats", lambda body: body)
        link.post(3, request)
        link.turn(0)
        theirs.sendall(frame(3, "stats"))
        late = unittest.mock.Mock(monotonic=lambda began=kvtier.link.time.monotonic(): began + 60)
        with unittest.mock.patch.object(kvtier.link, "time", late):
            # What was ready was asked before it came.
            link._poll = unittest.mock.Mock(poll=lambda _ms: [])
            link.turn(0)
        self.assertIsNone(request.error)
        self.assertTrue(request.done)
        self.assertFalse(link.suspended)


if __name__ == "__main__":
    unittest.main()
