"""A real cache node as a process, and an engine's memory of plain bytes: what the tests of this package are made of."""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import json
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
import types
import unittest
from array import array
from typing import Any, Callable, Iterator
from unittest import mock

import kvtier
from kvtier import session as session_module

PAYLOAD_BYTES = 100_000
BLOCK_TOKENS = 16
NAMESPACE = hashlib.sha256(b"the tests of the Python package").digest()
#: How a cache node is started: a command as JSON, from test/e2e/python.slow.test.ts.
NODE = json.loads(os.environ.get("KVTIER_TEST_NODE", "[]"))
#: So long a program may take to start, to say its line or to end: on a machine that stands still for a minute that is no defect of it.
PROGRAM_S = 180.0


def until(what: str, happens: Callable[[], Any], limit_s: float = 30.0, seen: Callable[[], object] | None = None) -> Any:
    """What ``happens`` gives, once that is true. ``seen``: what to look at where it is not."""
    end = time.monotonic() + limit_s
    while True:
        found = happens()
        if found:
            return found
        if time.monotonic() > end:
            raise AssertionError(f"{what}: not within {limit_s} s" + ("" if seen is None else f"; {seen()}"))
        time.sleep(0.002)


@contextlib.contextmanager
def slow_sessions(count: int) -> Iterator[tuple[list[Any], list[float]]]:
    """Sessions that do not end while they are waited for, and how long they were: by a clock that goes only then."""
    clock = [0.0]

    class Slow:
        unknown_answers = 0

        def close(self, wait_s: float) -> bool:
            clock[0] += wait_s
            return False

    with mock.patch.object(session_module, "time", types.SimpleNamespace(monotonic=lambda: clock[0])):
        yield [Slow() for _ in range(count)], clock


def chain(name: str, count: int) -> bytes:
    """Packed hashes of a chain, 32 bytes each."""
    return b"".join(hashlib.sha256(f"{name} {i}".encode()).digest() for i in range(count))


def child_of(pid: int) -> int:
    """The one child of a process."""
    with open(f"/proc/{pid}/task/{pid}/children") as children:
        return int(children.read().split()[0])


class Node:
    """One data folder and one socket; nodes come and go."""

    def __init__(self, *, arena_bytes: int = 16 << 20, disk_bytes: int | None = 64 << 20, **config: Any) -> None:
        self.folder = tempfile.mkdtemp(prefix="kvtier-python-")
        self.socket_path = f"{self.folder}/run/node.sock"
        #: Of its own, so that nothing is left of a node that was killed.
        self.arena_folder = tempfile.mkdtemp(prefix="kvtier-python-", dir="/dev/shm")
        self.config: dict[str, Any] = {
            "socketPath": self.socket_path,
            "dataDir": f"{self.folder}/data",
            "arena": {"bytes": arena_bytes, "dir": self.arena_folder},
            "disk": None if disk_bytes is None else {"bytes": disk_bytes},
            "logLevel": "warn",
            **config,
        }
        self.process: subprocess.Popen[bytes] | None = None
        #: What the command is started by, and stays the parent of.
        self.prefix: list[str] = []
        #: What it is started by, and becomes: a host's namespace.
        self.host: list[str] = []

    def start(self) -> None:
        environment = {**os.environ, "KVTIER_CONFIG": json.dumps(self.config)}
        environment.pop("NODE_CHANNEL_FD", None)
        self.process = subprocess.Popen([*self.host, *self.prefix, *NODE], env=environment, stdin=subprocess.DEVNULL)
        until("the node serves", self._serves, PROGRAM_S)

    def _serves(self) -> bool:
        assert self.process is not None
        if self.process.poll() is not None:
            raise AssertionError(f"the node ended with {self.process.returncode}")
        try:
            with socket.socket(socket.AF_UNIX) as probe:
                probe.connect(self.socket_path)
                return True
        except OSError:
            return False

    def send(self, number: signal.Signals) -> None:
        assert self.process is not None
        os.kill(child_of(self.process.pid) if self.prefix else self.process.pid, number)

    def end(self, number: signal.Signals = signal.SIGTERM) -> None:
        if self.process is not None:
            if self.process.poll() is None:
                self.send(number)
                if self.process.poll() is None and number != signal.SIGKILL:
                    self.send(signal.SIGCONT)
            self.process.wait(PROGRAM_S)
            self.process = None

    def remove(self) -> None:
        self.end(signal.SIGKILL)
        for folder in (self.folder, self.arena_folder):
            shutil.rmtree(folder, ignore_errors=True)


class Memory:
    """An engine's KV memory: ``blocks`` blocks of two parts in places of their own, as layers lie."""

    def __init__(self, copies: kvtier.Copies, blocks: int, payload_bytes: int = PAYLOAD_BYTES) -> None:
        self.half = payload_bytes // 2
        self.blocks = blocks
        self.layers = [ctypes.create_string_buffer(blocks * self.half) for _ in range(2)]
        parts = [kvtier.Part(ctypes.addressof(layer), self.half, self.half) for layer in self.layers]
        self.layout = copies.layout(parts, blocks)

    def fill(self, block: int, seed: bytes) -> None:
        data = hashlib.shake_128(seed).digest(2 * self.half)
        for number, layer in enumerate(self.layers):
            address = ctypes.addressof(layer) + block * self.half
            ctypes.memmove(address, data[number * self.half : (number + 1) * self.half], self.half)

    def read(self, block: int) -> bytes:
        return b"".join(layer.raw[block * self.half : (block + 1) * self.half] for layer in self.layers)


class Engine:
    """A session, copies and memory, used as a plug-in would, but waiting for everything."""

    def __init__(self, socket_path: str, *, blocks: int = 64, namespace: bytes = NAMESPACE, **session: Any) -> None:
        self.copies = kvtier.Copies()
        self.memory = Memory(self.copies, blocks)
        self.session = kvtier.Session(
            socket_path, namespace=namespace, payload_bytes=PAYLOAD_BYTES, block_tokens=BLOCK_TOKENS, **session
        )
        self.arenas: dict[int, kvtier.Arena] = {}

    def attached(self) -> kvtier.Attachment:
        return until("the session is attached", lambda: self.session.attachment)

    def arena(self, attachment: kvtier.Attachment) -> kvtier.Arena:
        found = self.arenas.get(attachment.arena.id)
        if found is None:
            found = self.arenas[attachment.arena.id] = self.copies.map(attachment.arena)
        return found

    def reserve(self, parent: bytes, hashes: bytes) -> kvtier.Reservation:
        reservation = self.session.reserve(parent, hashes)
        until("reserve is answered", lambda: reservation.done)
        return reservation

    def store(self, hashes: bytes, blocks: list[int]) -> int:
        """Of the blocks of a chain from its root, how many became visible."""
        reservation = self.reserve(b"", hashes)
        indexes = reservation.open
        if not indexes:
            return 0
        arena = self.arena(reservation.attachment)
        job = self.copies.store(arena, self.memory.layout, [blocks[i] for i in indexes], [reservation.offsets[i] for i in indexes])
        until("the copies end", job.ended)
        commit = reservation.commit(indexes, job.take().checksums)
        until("commit is answered", lambda: commit.done)
        return commit.result()

    def load(self, hashes: bytes, blocks: list[int], deadline_s: float = 10.0) -> tuple[int, list[int]]:
        """How many blocks came, and which of these were bad."""
        load = self.session.load(hashes, deadline_s=deadline_s)
        until("the load ends", lambda: load.done, deadline_s + 5)
        if load.ready == 0:
            load.release()
            return 0, []
        slots = load.slots()
        arena = self.arena(load.attachment)
        job = self.copies.load(arena, self.memory.layout, blocks[: load.ready], slots.offsets, slots.checksums)
        until("the copies end", job.ended)
        bad = job.take().bad
        load.release(corrupt=bad)
        return load.ready, bad

    def held(self, hashes: bytes) -> int:
        request = self.session.lookup(hashes, deadline_s=5)
        until("lookup is answered", lambda: request.done)
        return request.result().blocks

    def close(self) -> None:
        self.session.close()
        self.copies.close()


class NodeCase(unittest.TestCase):
    """A test with a node, and engines that are closed."""

    _shared: Node | None = None

    def setUp(self) -> None:
        if not NODE:
            self.fail("KVTIER_TEST_NODE says how a cache node is started: run test/e2e/python.slow.test.ts")

    def node(self, **options: Any) -> Node:
        node = Node(**options)
        self.addCleanup(node.remove)
        node.start()
        return node

    @staticmethod
    def shared() -> Node:
        """One node for all tests of a file that do it no harm: a start costs more than most of them. Each has a namespace or a model of its own."""
        if NodeCase._shared is None:
            node = Node()
            unittest.addModuleCleanup(NodeCase._unshare)
            unittest.addModuleCleanup(node.remove)
            node.start()
            NodeCase._shared = node
        return NodeCase._shared

    @staticmethod
    def _unshare() -> None:
        NodeCase._shared = None

    def engine(self, node: Node, **options: Any) -> Engine:
        engine = Engine(node.socket_path, **options)
        self.addCleanup(engine.close)
        engine.attached()
        return engine


def numbers(count: int) -> array[int]:
    return array("Q", range(count))
