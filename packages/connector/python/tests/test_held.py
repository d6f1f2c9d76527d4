"""The node's table of held blocks: what it lacks is not asked for, and what is held is never taken for missing."""

from __future__ import annotations

import os
import random
import signal
import struct
import tempfile
import unittest
from pathlib import Path
from typing import Any
from unittest import mock

import kvtier
from fake_node import FakeNode, attached, frame
from kvtier.held import MAX_LOOKS, HeldTable
from rig import Engine, NodeCase, chain, until


def table_bytes(flags: bytes, magic: bytes = b"kvheld1\0", zero: int = 0) -> bytes:
    return struct.pack("<8sII", magic, len(flags), zero) + flags


def words(*numbers: int, size: int = 32) -> bytes:
    return b"".join(struct.pack("<I", number) + bytes(size - 4) for number in numbers)


class Tables(unittest.TestCase):
    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.path = Path(folder.name) / "arena.lock"

    def table(self, data: bytes, tag: int = 0) -> HeldTable | None:
        self.path.write_bytes(data)
        with self.path.open("rb") as locked:
            return HeldTable.open(str(self.path), locked.fileno(), tag)

    def test_a_chain_is_lacking_where_its_first_block_is_or_none_of_its_blocks_is_held(self) -> None:
        table = self.table(table_bytes(bytes([0, 3, 0, 2, 0, 0, 0, 1])), tag=0xFFFF_FFF8)
        assert table is not None
        for size in (16, 32):
            # Of 0xF8 and the tag come 0, of 0xF9 1, and so on.
            name = lambda bucket: words(0xFFFF_FFF8 + bucket, size=size)
            self.assertEqual([table.lacks(name(bucket), size, False) for bucket in range(8)], [True, False, True, False, True, True, True, False])
            self.assertEqual([table.lacks(name(bucket), size, True) for bucket in range(8)], [True, False, True, False, True, True, True, False])
            self.assertTrue(table.lacks(name(0) + name(1), size, False))
            self.assertFalse(table.lacks(name(0) + name(2) + name(7), size, True))
            self.assertTrue(table.lacks(name(0) * MAX_LOOKS, size, True))
            self.assertFalse(table.lacks(name(0) * (MAX_LOOKS + 1), size, True))

    def test_what_lies_in_the_arena_is_read_where_all_that_is_held_does(self) -> None:
        # The arena and a disk; the arena alone; a disk; peers; nobody.
        table = self.table(table_bytes(bytes([7, 7, 3, 2, 0, 0, 0, 0])))
        assert table is not None
        for size in (16, 32):
            read = lambda gaps, *buckets: table.in_arena(words(*buckets, size=size), size, gaps)
            self.assertEqual((read(False, 0, 1, 0), read(True, 0, 1, 0)), (((0, 3),), ((0, 3),)))
            self.assertEqual((read(False, 0, 4, 1), read(True, 0, 4, 1)), (((0, 1),), ((0, 1), (2, 3))))
            self.assertEqual((read(False, 4, 1), read(True, 4, 1)), ((), ((1, 2),)))
            self.assertEqual((read(False, 4), read(True, 4, 4)), ((), ()))
            for elsewhere in (2, 3):
                self.assertEqual((read(False, 0, elsewhere), read(True, 0, elsewhere)), (None, None))
                self.assertEqual((read(False, 0, 4, elsewhere), read(True, 0, 4, elsewhere)), (((0, 1),), None))
            self.assertEqual(read(False, *[0] * MAX_LOOKS), ((0, MAX_LOOKS),))
            self.assertIsNone(read(False, *[0] * (MAX_LOOKS + 1)))

    def test_what_changes_in_the_file_is_seen(self) -> None:
        table = self.table(table_bytes(bytes(16)))
        assert table is not None
        self.assertTrue(table.lacks(words(5), 32, False))
        with self.path.open("r+b") as file:
            file.seek(16 + 5)
            file.write(b"\1")
        self.assertFalse(table.lacks(words(5), 32, False))

    def test_a_beat_of_the_node_behind_the_buckets_is_told_once(self) -> None:
        data = table_bytes(bytes(16))
        pulse = lambda beats, still_ms: struct.pack("<8sII", b"kvbeat1\0", beats, still_ms)
        for older in (data, data + bytes(16), data + pulse(1, 0)[:-1]):
            table = self.table(older)
            assert table is not None
            self.assertIsNone(table.pulse)
        table = self.table(data + pulse(0, 0))
        assert table is not None and table.pulse is not None
        self.assertIsNone(table.pulse.still_s())
        for beats, still_ms in ((1, 0), (7, 1250)):
            with self.path.open("r+b") as file:
                file.seek(len(data))
                file.write(pulse(beats, still_ms))
            self.assertEqual((table.pulse.still_s(), table.pulse.still_s()), (still_ms / 1e3, None))

    def test_what_is_not_one_is_none(self) -> None:
        for data in (
            b"",
            bytes(32),
            table_bytes(bytes(16), magic=b"kvheld2\0"),
            table_bytes(bytes(16), zero=1),
            table_bytes(bytes(12)),
            table_bytes(b""),
            table_bytes(bytes(16))[:-1],
        ):
            self.assertIsNone(self.table(data))
        self.assertIsNone(HeldTable.open(f"{self.path}.none", 0, 0))

    def test_another_file_than_the_one_that_is_locked_is_none(self) -> None:
        self.path.write_bytes(table_bytes(bytes(16)))
        with self.path.open("rb") as locked:
            os.rename(self.path, f"{self.path}.former")
            self.path.write_bytes(table_bytes(bytes(16)))
            self.assertIsNone(HeldTable.open(str(self.path), locked.fileno(), 0))
        os.remove(self.path)
        os.symlink(f"{self.path}.former", self.path)
        with self.path.open("rb") as locked:
            self.assertIsNone(HeldTable.open(str(self.path), locked.fileno(), 0))

    def session(self, hold: int, **changes: Any) -> kvtier.Session:
        """Of a node that says that so many find our lock."""
        self.path.write_bytes(table_bytes(bytes(16)))
        fields = {"arena_path": str(self.path).removesuffix(".lock"), "has_lock_file": True, "held_tag": 0, **changes}

        def answer(request: Any) -> list[bytes]:
            kind = request.WhichOneof("body")
            if kind == "attach":
                return [attached(request, **fields)]
            return [frame(request.id, "done", count=hold) if kind == "hold" else frame(request.id, "stats")]

        node = FakeNode(answer)
        self.addCleanup(node.close)
        session = kvtier.Session(node.path, namespace=b"n" * 32, payload_bytes=1000, block_tokens=16)
        self.addCleanup(session.close)
        until("attached", lambda: session.attachment)
        asked = session.stats()
        until("what came before it is answered", lambda: asked.done)
        return session

    def test_only_a_node_that_finds_our_lock_in_that_file_is_believed(self) -> None:
        self.assertTrue(self.session(hold=1).lacks(words(1)))
        self.assertFalse(self.session(hold=0).lacks(words(1)))
        self.assertFalse(self.session(hold=1, held_tag=None).lacks(words(1)))
        self.assertFalse(self.session(hold=1, has_lock_file=False).lacks(words(1)))

    def test_a_session_that_has_ended_says_nothing_nor_one_whose_node_is_silent(self) -> None:
        session = self.session(hold=1)
        self.assertTrue(session.lacks(words(1)))
        link = session.attachment._link  # type: ignore[union-attr]
        link.suspended = True
        self.assertFalse(session.lacks(words(1)))
        link.suspended = False
        self.assertTrue(session.lacks(words(1)))
        session.close()
        self.assertFalse(session.lacks(words(1)))


class Sessions(NodeCase):
    def confirmed(self, engine: Engine) -> kvtier.Attachment:
        return until("the table is read", lambda: (now := engine.session.attachment) and now.held and now)

    def test_what_is_committed_is_not_lacking_from_then_on_and_others_namespaces_are_apart(self) -> None:
        node = self.node()
        engine, other = self.engine(node), self.engine(node, namespace=bytes(32))
        self.confirmed(engine), self.confirmed(other)
        hashes = chain("held", 40)
        self.assertTrue(engine.session.lacks(hashes))
        self.assertTrue(engine.session.lacks(hashes, gaps=True))
        for end in range(1, 41):
            self.assertEqual(engine.store(hashes[: end * 32], list(range(end))), 1)
            self.assertFalse(engine.session.lacks(hashes))
            self.assertFalse(engine.session.lacks(hashes[(end - 1) * 32 :], gaps=True))
        self.assertTrue(other.session.lacks(hashes))

    def test_whatever_a_lookup_finds_is_not_lacking(self) -> None:
        """In any tier, while blocks are evicted, and after a restart of the node."""
        node = self.node(arena_bytes=4 << 20, disk_bytes=64 << 20)
        engine = self.engine(node, blocks=32)
        self.confirmed(engine)
        draw = random.Random(3)
        chains = [chain(f"tier {n}", 8) for n in range(40)]
        blank = [chain(f"never {n}", 8) for n in range(40)]

        def agree() -> int:
            found = 0
            for hashes in chains:
                first = draw.randrange(8)
                part = hashes[first * 32 :]
                lacking = [engine.session.lacks(part), engine.session.lacks(part, gaps=True)]
                answers = [engine.session.lookup(part, gaps=gaps, deadline_s=5) for gaps in (False, True)]
                for gaps, asked in enumerate(answers):
                    until("answered", lambda asked=asked: asked.done)
                    blocks = asked.result().blocks
                    found += blocks > 0
                    if blocks:
                        self.assertFalse(lacking[gaps])
            return found

        def on_disk() -> int:
            asked = engine.session.stats()
            until("counted", lambda: asked.done)
            return asked.result().get("writedown.disk.stored", 0)

        for number, hashes in enumerate(chains):
            engine.store(hashes, list(range(8)))
            # Of the others the arena may evict what a slow disk has not taken yet; these are there after a restart.
            if number < 5:
                until("written down", lambda number=number: on_disk() == 8 * (number + 1))
        self.assertGreaterEqual(agree(), 10)
        self.assertGreater(sum(engine.session.lacks(one) for one in blank), 30)
        epoch = engine.attached().boot_epoch
        node.end()
        node.start()
        until("another life", lambda: (now := engine.session.attachment) and now.boot_epoch != epoch)
        self.confirmed(engine)
        self.assertGreaterEqual(agree(), 10)
        self.assertGreater(sum(engine.session.lacks(one) for one in blank), 30)

    def test_a_lookup_finds_what_the_table_says_of_the_arena_or_less(self) -> None:
        """While blocks come and are evicted: where it says something, what a lookup finds lies within it, and lies in the arena."""
        node = self.node(arena_bytes=4 << 20, disk_bytes=None)
        engine = self.engine(node, blocks=32)
        self.confirmed(engine)
        chains = [chain(f"read {n}", 8) for n in range(12)]
        told = exact = 0
        for stored, hashes in enumerate(chains):
            engine.store(hashes, list(range(8)))
            for other in chains[: stored + 2]:
                for gaps in (False, True):
                    ranges = engine.session.in_arena(other, gaps=gaps)
                    asked = engine.session.lookup(other, gaps=gaps, deadline_s=5)
                    until("answered", lambda asked=asked: asked.done)
                    self.assertIsNotNone(ranges)  # there is no other tier
                    found = {at for first, end in asked.result().ranges for at in range(first, end)}
                    said = {at for first, end in ranges for at in range(first, end)}
                    self.assertLessEqual(found, said)
                    told, exact = told + 1, exact + (found == said)
        self.assertGreater(exact, 0.9 * told)

    def test_no_table_beside_the_arena_and_all_is_asked_for(self) -> None:
        node = self.node()
        with mock.patch("kvtier.attachment.HeldTable.open", lambda *_: None):
            engine = self.engine(node)
        self.assertFalse(engine.session.lacks(chain("a", 1)))
        self.assertEqual(engine.held(chain("a", 1)), 0)

    def test_the_lock_ends_with_the_session_though_the_table_is_still_read(self) -> None:
        """The node's quarantine waits for it."""
        node = self.node()
        engine = self.engine(node)
        attachment = self.confirmed(engine)
        byte, path = attachment.arena.lock_byte, attachment.arena.lock_path
        self.assertTrue(locked(path, byte))
        engine.session.close()
        self.assertIsNotNone(attachment.held)
        self.assertFalse(locked(path, byte))

    def test_a_killed_nodes_table_is_not_believed(self) -> None:
        node = self.node()
        engine = self.engine(node)
        self.confirmed(engine)
        self.assertTrue(engine.session.lacks(chain("z", 1)))
        node.end(signal.SIGKILL)
        until("it is known", lambda: engine.session.attachment is None)
        self.assertFalse(engine.session.lacks(chain("z", 1)))


def locked(path: str, byte: int) -> bool:
    import fcntl

    with open(path, "r+b") as file:
        asked = struct.pack("@hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, byte, 1, 0)
        return struct.unpack("@hhqqi4x", fcntl.fcntl(file, fcntl.F_OFD_GETLK, asked))[0] != fcntl.F_UNLCK


if __name__ == "__main__":
    unittest.main()
