"""The session against a real cache node: what is stored comes back, and whatever dies costs time and never truth."""

from __future__ import annotations

import errno
import os
import signal
import time
import unittest
from unittest import mock

import kvtier
from rig import NAMESPACE, PAYLOAD_BYTES, Engine, NodeCase, chain, until


class StoresAndLoads(NodeCase):
    def test_what_one_engine_stored_another_loads(self) -> None:
        node = self.shared()
        hashes = chain("a", 20)
        first = self.engine(node)
        for block in range(20):
            first.memory.fill(block, b"payload %d" % block)
        self.assertEqual(first.held(hashes), 0)
        self.assertEqual(first.store(hashes, list(range(20))), 20)
        self.assertEqual(first.held(hashes), 20)
        wanted = [first.memory.read(block) for block in range(20)]
        first.close()

        second = self.engine(node)
        self.assertEqual(second.load(hashes, list(range(30, 50))), (20, []))
        self.assertEqual([second.memory.read(block) for block in range(30, 50)], wanted)

    def test_after_a_restart_of_the_node_blocks_come_from_disk(self) -> None:
        node = self.node()
        hashes = chain("b", 8)
        engine = self.engine(node)
        for block in range(8):
            engine.memory.fill(block, b"disk %d" % block)
        self.assertEqual(engine.store(hashes, list(range(8))), 8)
        epoch = engine.attached().boot_epoch
        node.end()
        node.start()
        after = until("another epoch", lambda: (now := engine.session.attachment) and now.boot_epoch != epoch and now)
        self.assertEqual(engine.session.sessions, 2)
        self.assertEqual(engine.load(hashes, list(range(20, 28))), (8, []))
        self.assertEqual(engine.memory.read(27), engine.memory.read(7))
        self.assertNotEqual(after.arena.id, 0)

    def test_a_flipped_byte_is_found_released_as_corrupt_and_a_miss(self) -> None:
        node = self.node(disk_bytes=None)
        hashes = chain("c", 4)
        engine = self.engine(node)
        for block in range(4):
            engine.memory.fill(block, b"flip %d" % block)
        engine.store(hashes, [0, 1, 2, 3])
        load = engine.session.load(hashes, deadline_s=5)
        until("the load ends", lambda: load.done)
        offset = load.slots().offsets[2]
        load.release()
        with open(engine.attached().arena.path, "r+b") as arena:
            arena.seek(offset + PAYLOAD_BYTES // 2)
            byte = arena.read(1)
            arena.seek(-1, 1)
            arena.write(bytes([byte[0] ^ 1]))
        self.assertEqual(engine.load(hashes, [10, 11, 12, 13]), (4, [2]))
        until("the node dropped it", lambda: engine.held(hashes) == 2)

    def test_lookup_tells_tiers_and_gaps(self) -> None:
        node = self.node(disk_bytes=None)
        engine = self.engine(node)
        hashes = chain("d", 4)
        engine.store(hashes[:64], [0, 1])
        request = engine.session.lookup(hashes, deadline_s=5)
        until("an answer", lambda: request.done)
        self.assertEqual((request.result().blocks, request.result().spans), (2, (("arena", 2),)))

    def test_pins_and_prefetches_are_answered(self) -> None:
        node = self.node()
        engine = self.engine(node)
        hashes = chain("e", 3)
        engine.store(hashes, [0, 1, 2])
        pin, prefetch = engine.session.pin(hashes, ttl_s=5), engine.session.prefetch(hashes)
        stats = engine.session.stats()
        until("answers", lambda: pin.done and prefetch.done and stats.done)
        self.assertEqual((pin.result(), prefetch.result()), (3, ""))
        self.assertEqual(stats.result()["session.attached"], 1)

    def test_a_pin_is_ended_by_who_has_its_ticket(self) -> None:
        node = self.shared()
        engine, other, stranger = self.engine(node), self.engine(node), self.engine(node, namespace=bytes(32))
        hashes, ticket = chain("t", 3), os.urandom(16)
        engine.store(hashes, [0, 1, 2])

        def count(request: kvtier.Request[int]) -> int:
            until("an answer", lambda: request.done)
            return request.result()

        self.assertEqual(count(engine.session.pin(hashes, ttl_s=60, ticket=ticket)), 3)
        self.assertEqual(count(stranger.session.end_pin(ticket)), 0)
        self.assertEqual(count(other.session.end_pin(os.urandom(16), hashes[:32])), 0)
        self.assertEqual(count(other.session.end_pin(ticket, hashes[:32])), 3)
        self.assertEqual([count(one.session.end_pin(ticket)) for one in (other, engine)], [0, 0])
        self.assertEqual(count(engine.session.unpin(hashes)), 0)
        self.assertEqual(count(engine.session.pin(hashes, ttl_s=60, ticket=ticket)), 3)  # it was shown: nothing is kept
        self.assertEqual(count(engine.session.unpin(hashes)), 0)

    def test_a_node_that_knows_no_tickets_is_not_told(self) -> None:
        node = self.shared()
        engine = self.engine(node)
        engine.attached().ends_pins = False
        request = engine.session.end_pin(os.urandom(16))
        self.assertEqual((request.done, request.error and request.error.code), (True, "DISCONNECTED"))
        self.assertEqual((engine.held(chain("u", 1)), engine.session.sessions), (0, 1))


class Refused(unittest.TestCase):
    def test_without_a_thread_it_is_the_systems_refusal_and_nothing_is_left(self) -> None:
        made: list[int] = []

        def eventfd(*args: int) -> int:
            made.append(real(*args))
            return made[-1]

        real = os.eventfd
        none_left = mock.patch("threading.Thread.start", side_effect=RuntimeError("can't start new thread"))
        with none_left, mock.patch("os.eventfd", eventfd), mock.patch("os.close", wraps=os.close) as closed:
            with self.assertRaisesRegex(OSError, "can't start new thread") as caught:
                kvtier.Session("/s", namespace=NAMESPACE, payload_bytes=1, block_tokens=1)
        self.assertEqual(caught.exception.errno, errno.EAGAIN)
        self.assertEqual(len(made), 1)
        closed.assert_any_call(made[0])


class Reservations(NodeCase):
    def test_what_is_aborted_was_never_there_and_another_may_write_it(self) -> None:
        node = self.shared()
        engine, other = self.engine(node), self.engine(node)
        hashes = chain("f", 2)
        reservation = engine.reserve(b"", hashes)
        self.assertEqual(reservation.status, [kvtier.RESERVED] * 2)
        self.assertEqual(other.reserve(b"", hashes).status, [kvtier.BUSY] * 2)
        reservation.abort()
        reservation.abort()
        self.assertEqual(reservation.open, [])
        until("free again", lambda: other.store(hashes, [0, 1]) == 2)

    def test_a_full_arena_refuses_with_its_reason(self) -> None:
        node = self.node(arena_bytes=4 << 20, disk_bytes=None)
        engine = self.engine(node)
        first = engine.reserve(b"", chain("g", 60))
        self.assertEqual((first.status[0], first.status[-1]), (kvtier.RESERVED, kvtier.REFUSED))
        self.assertIn(first.reason, ("no_space", "session_limit"))
        first.abort()

    def test_one_that_nobody_wants_any_more_is_undone_when_its_answer_comes(self) -> None:
        node = self.node()
        engine, other = self.engine(node), self.engine(node)
        hashes = chain("h", 2)
        node.send(signal.SIGSTOP)
        reservation = engine.session.reserve(b"", hashes, deadline_s=0.1)
        until("it fails", lambda: reservation.done)
        self.assertEqual(reservation.error and reservation.error.code, "DEADLINE")
        node.send(signal.SIGCONT)
        until("its slots are free", lambda: other.session.attachment and other.store(hashes, [0, 1]) == 2)


class Closing(NodeCase):
    """One of several sessions of a process is closed: all of them hold one lock, and it ends with the process."""

    def free(self, engine: Engine) -> bool:
        """Nothing is in use, nor in quarantine, nor was it."""
        stats = engine.session.stats(deadline_s=5)
        until("stats", lambda: stats.done)
        counted = stats.result()
        self.assertEqual(counted.get("quarantine.sessions", 0), 0)
        return counted["session.open"] == 1

    def test_what_is_settled_after_a_close_is_given_back_and_nothing_is_committed(self) -> None:
        node = self.node(disk_bytes=None)
        other = self.engine(node)
        ways = {"a commit": lambda one: one.commit(one.open, [1] * len(one.open)), "an abort": lambda one: one.abort()}
        for name, settle in ways.items():
            hashes = chain(name, 20)
            engine = self.engine(node)
            attachment = engine.attached()
            reservation = engine.reserve(b"", hashes)
            self.assertEqual(reservation.status, [kvtier.RESERVED] * 20)
            self.assertFalse(engine.session.close(0.0))
            self.assertIsNone(engine.session.attachment)
            self.assertEqual((attachment.alive, attachment.usable), (False, False))
            late = engine.session.lookup(hashes)
            self.assertEqual((late.done, late.error and late.error.code), (True, "DISCONNECTED"))
            self.assertEqual(other.reserve(b"", hashes).status, [kvtier.BUSY] * 20)
            settle(reservation)
            self.assertEqual(reservation.open, [])
            until("its session ends", lambda engine=engine: engine.session.close(0.1), 2)
            until("nothing is left of it", lambda: self.free(other), 2)
            again = other.reserve(b"", hashes)
            self.assertEqual(again.status, [kvtier.RESERVED] * 20, name)
            again.abort()

    def test_a_lease_is_given_back_after_a_close(self) -> None:
        node = self.node(disk_bytes=None)
        other, engine = self.engine(node), self.engine(node)
        hashes = chain("z", 3)
        engine.store(hashes, [0, 1, 2])
        load = engine.session.load(hashes, deadline_s=5)
        until("the load ends", lambda: load.done)
        self.assertFalse(engine.session.close(0.0))
        self.assertFalse(self.free(other))
        load.release()
        until("its session ends", lambda: engine.session.close(0.1), 2)
        until("nothing is left of it", lambda: self.free(other), 2)

    def test_what_is_never_settled_is_waited_for_no_longer_than_that(self) -> None:
        node = self.node(disk_bytes=None)
        other, engine = self.engine(node), self.engine(node)
        engine.reserve(b"", chain("y", 3))
        drained, waits = kvtier.Attachment.drained, []

        def told(attachment: kvtier.Attachment, wait_s: float) -> bool:
            waits.append(wait_s)
            return drained(attachment, wait_s)

        with mock.patch("kvtier.session.DRAIN_LIMIT_S", 0.2), mock.patch.object(kvtier.Attachment, "drained", told):
            until("its session ends", lambda: engine.session.close(0.1))
        self.assertEqual(set(waits), {0.0})  # all of the limit has passed while the connection was kept

        def kept() -> bool:
            stats = other.session.stats(deadline_s=5)
            until("stats", lambda: stats.done)
            return stats.result().get("quarantine.sessions") == 1

        until("the node keeps its slots aside", kept)


class Deaths(NodeCase):
    def test_a_killed_node_fails_what_waits_and_comes_back_by_itself(self) -> None:
        node = self.node()
        engine = self.engine(node)
        hashes = chain("i", 6)
        engine.store(hashes, list(range(6)))
        load = engine.session.load(hashes, deadline_s=5)
        until("ready", lambda: load.done)
        attachment = load.attachment
        node.end(signal.SIGKILL)
        until("it is known", lambda: engine.session.attachment is None)
        lost = engine.session.lookup(hashes)
        self.assertEqual((lost.done, lost.error and lost.error.code), (True, "DISCONNECTED"))
        # What was mapped outlives the node: a copy that was begun still ends well.
        slots = load.slots()
        job = engine.copies.load(engine.arena(attachment), engine.memory.layout, list(range(20, 26)), slots.offsets, slots.checksums)
        until("the copies end", job.ended)
        self.assertEqual(job.take().bad, [])
        node.start()
        self.assertIsNone(engine.session.attachment)  # the load is not settled: its slots may not be given away
        load.release()
        self.assertNotEqual(engine.attached().arena.id, attachment.arena.id)
        self.assertEqual(engine.copies.counts().arenas, 1)
        self.assertTrue(engine.arenas.pop(attachment.arena.id).close())

    def test_a_silent_node_costs_one_deadline_and_not_one_a_request(self) -> None:
        node = self.node()
        engine = self.engine(node)
        hashes = chain("j", 2)
        node.send(signal.SIGSTOP)
        began = time.monotonic()
        first = engine.session.lookup(hashes, deadline_s=0.2)
        until("its deadline", lambda: first.done)
        self.assertEqual(first.error and first.error.code, "DEADLINE")
        self.assertTrue(engine.session.suspended)
        for _ in range(100):
            later = engine.session.lookup(hashes, deadline_s=0.2)
            self.assertTrue(later.done)
        self.assertLess(time.monotonic() - began, 10)  # half of a hundred deadlines
        node.send(signal.SIGCONT)
        until("it answers again", lambda: engine.session.attachment)
        self.assertEqual(engine.held(hashes), 0)
        self.assertEqual(engine.session.sessions, 1)

    def test_what_waits_for_a_stopped_node_does_not_wait_for_its_own_deadline(self) -> None:
        node = self.node()
        engine = self.engine(node)
        engine.attached()
        load = engine.session.load(chain("l", 2), deadline_s=300, await_s=300)
        self.assertEqual(engine.held(chain("l", 2)), 0)  # the node has both
        node.send(signal.SIGSTOP)
        until("it is given up", lambda: load.done)
        self.assertEqual((load.error and load.error.code, load.reason, load.ready), ("DEADLINE", "deadline", 0))
        self.assertTrue(engine.session.suspended)
        load.release()
        node.send(signal.SIGCONT)
        until("it answers again", lambda: engine.session.attachment)
        self.assertEqual((engine.held(chain("l", 2)), engine.session.sessions), (0, 1))

    def test_no_node_at_the_start_is_a_miss_at_once(self) -> None:
        session = kvtier.Session("/tmp/kvtier-nobody.sock", namespace=NAMESPACE, payload_bytes=1, block_tokens=1)
        self.addCleanup(session.close)
        load = session.load(chain("k", 1), deadline_s=1)
        reservation = session.reserve(b"", chain("k", 1))
        self.assertEqual((load.done, load.ready, load.reason), (True, 0, "disconnected"))
        self.assertEqual((reservation.done, reservation.open), (True, []))
        load.release()
        self.assertTrue(session.close())


if __name__ == "__main__":
    unittest.main()
