"""Nodes of other versions: an older one offers less, and what only a newer one knows to say is skipped, counted, and ends nothing."""

from __future__ import annotations

import os
import select
import socket
import struct
import tempfile
import threading
import unittest
from typing import Any

import kvtier
from engine_case import EngineCase, prompts
from engine_parts import Shape
from fake_node import FakeNode, attached, frame
from kvtier.protocol import ServerFrame
from rig import chain, until

#: Field 60 of a frame, and within an answer, that nobody knows.
UNKNOWN = b"\xe2\x03\x02hi"


def unknown(request_id: int, epoch: int = 7) -> bytes:
    message = ServerFrame(id=request_id, boot_epoch=epoch).SerializeToString() + UNKNOWN
    return struct.pack("<I", len(message)) + message


class Sessions(unittest.TestCase):
    def session(self, answer: Any, **offers: Any) -> tuple[kvtier.Session, FakeNode]:
        node = FakeNode(lambda request: [attached(request, **offers)] if request.WhichOneof("body") == "attach" else answer(request))
        self.addCleanup(node.close)
        session = kvtier.Session(node.path, namespace=b"n" * 32, payload_bytes=1000, block_tokens=16)
        self.addCleanup(session.close)
        until("attached", lambda: session.attachment)
        return session, node

    def test_an_older_node_offers_less_and_that_is_all(self) -> None:
        session, _ = self.session(lambda request: [frame(request.id, "lookup", held=3)])
        attachment = session.attachment
        assert attachment is not None
        self.assertEqual((attachment.wants_token_ids, attachment.ends_pins, attachment.held), (False, False, None))
        self.assertEqual((attachment.arena.lock_byte, session.lacks(chain("a", 3))), (0, False))
        lookup = session.lookup(chain("a", 3), deadline_s=5)
        self.assertTrue(lookup.wait(5))
        self.assertEqual(lookup.result().blocks, 3)

    def test_what_only_a_newer_node_knows_is_skipped_and_counted(self) -> None:
        def answer(request: Any) -> list[bytes]:
            known = frame(request.id, "done", count=4)[4:]
            at = known.index(b"\x42\x02")  # the answer: its length follows, then it
            more = known[:at] + bytes([0x42, 2 + len(UNKNOWN)]) + known[at + 2 : at + 4] + UNKNOWN
            return [unknown(0), unknown(request.id), struct.pack("<I", len(more)) + more]

        session, node = self.session(answer)
        for asked in range(1, 4):
            request = session.pin(chain("a", 3), ttl_s=5)
            self.assertTrue(request.wait(5))
            self.assertEqual((request.result(), session.unknown_answers), (4, 2 * asked))
        self.assertEqual((session.sessions, node.connections), (1, 1))

    def test_what_is_answered_by_that_alone_ends_at_its_deadline(self) -> None:
        session, node = self.session(lambda request: [unknown(request.id)])
        lookup = session.lookup(chain("a", 3), deadline_s=0.05)
        until("its deadline", lambda: lookup.done)
        self.assertEqual((lookup.error and lookup.error.code, session.unknown_answers), ("DEADLINE", 1))
        self.assertFalse(session.suspended)  # it says something
        self.assertEqual((session.sessions, node.connections), (1, 1))


class NewerNode:
    """A way to a node that puts what nobody knows in front of each of its answers, and into it."""

    def __init__(self, socket_path: str) -> None:
        self._to = socket_path
        self._folder = tempfile.mkdtemp(prefix="kvtier-newer-")
        self.path = f"{self._folder}/node.sock"
        self._server = socket.socket(socket.AF_UNIX)
        self._server.bind(self.path)
        self._server.listen(8)
        self.connections = 0
        self._over, self._end = os.pipe()
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def _ready(self, *of: socket.socket) -> list[Any]:
        """Those that have something to say; none when it is over."""
        ready, _, _ = select.select([*of, self._over], [], [])
        return [] if self._over in ready else ready

    def _accept(self) -> None:
        while self._ready(self._server):
            engine, _ = self._server.accept()
            self.connections += 1
            self._threads.append(threading.Thread(target=self._carry, args=(engine,)))
            self._threads[-1].start()

    def _carry(self, engine: socket.socket) -> None:
        held = b""
        with engine, socket.socket(socket.AF_UNIX) as node:
            node.connect(self._to)
            while ready := self._ready(engine, node):
                for one in ready:
                    chunk = one.recv(1 << 16)
                    if not chunk:
                        return
                    if one is engine:
                        node.sendall(chunk)
                        continue
                    held += chunk
                    while len(held) >= 4 and len(held) >= 4 + struct.unpack_from("<I", held)[0]:
                        end = 4 + struct.unpack_from("<I", held)[0]
                        message, held = held[4:end], held[end:]
                        said = ServerFrame.FromString(message)
                        engine.sendall(unknown(said.id, said.boot_epoch) + struct.pack("<I", len(message + UNKNOWN)) + message + UNKNOWN)

    def close(self) -> None:
        os.close(self._end)
        for thread in self._threads:
            thread.join(10)
        self._server.close()
        os.close(self._over)
        os.unlink(self.path)
        os.rmdir(self._folder)


class Engines(EngineCase):
    def test_an_engine_beside_a_newer_node_stores_and_loads_and_says_what_it_skipped(self) -> None:
        newer, texts, shape = NewerNode(self.shared().socket_path), prompts(3), self.own(Shape())
        self.addCleanup(newer.close)
        wanted = self.serve(self.alone(shape), texts)
        first = self.play(None, shape, newer.path)
        self.assertEqual(self.serve(first, texts), wanted)
        for request in list(first.done.values()):
            until("all of it is held", lambda request=request: self.held(first, request) >= 40)
        second = self.play(None, shape, newer.path)
        self.assertEqual(self.serve(second, texts), wanted)
        self.assertGreaterEqual(second.external_tokens + second.local_tokens, 3 * 40)
        self.assertGreater(second.external_tokens, 0)
        for engine in (first, second):
            (session,) = engine.connector._scheduler._node._sessions
            self.assertEqual(session.sessions, 1)
            self.assertGreater(session.unknown_answers, 0)
            self.assertGreater(engine.connector._since._told["unknown_answers"], 0)  # to vLLM's metrics
        self.assertEqual(newer.connections, 2)
        # What former sessions counted stays counted.
        before = first.connector._scheduler.counted()["unknown_answers"]
        first.connector._scheduler.reset()
        self.assertGreaterEqual(first.connector._scheduler.counted()["unknown_answers"], before)


if __name__ == "__main__":
    unittest.main()
