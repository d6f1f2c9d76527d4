"""Copies of a GPU's memory where it stands still, hangs or is given up: nobody waits longer than told, and what it may touch is kept."""

from __future__ import annotations

import contextlib
import ctypes
import os
import subprocess
import sys
import threading
import time
import unittest
from collections.abc import Callable, Iterator
from pathlib import Path

import kvtier
from device_case import BYTES, DRIVER, ID, DeviceCase
from kvtier.hold import is_held
from rig import PROGRAM_S, numbers, until


def in_time(call: Callable[[], object]) -> object:
    """What it gives, of a call that does not wait for a GPU."""
    given: list[object] = []
    thread = threading.Thread(target=lambda: given.append(call()), daemon=True)
    thread.start()
    thread.join(20)
    assert given, "it waits for the GPU"
    return given[0]


class Standing(DeviceCase):
    deadline_s = 1.0

    def test_a_step_that_takes_longer_than_a_copy_may_keeps_copies_waiting(self) -> None:
        """It is the engine's own time: they are begun when it has ended, and meanwhile hold up no other copy."""
        arena = self.copies.map(self.ref)
        place, content, layout, offsets = self.simple()
        self.pinned(arena)
        sums = self.done(self.copies.store(arena, layout, numbers(6), offsets)).checksums
        other = self.slots(12, 4096)[6:]
        held = DRIVER.held_stream()
        self.addCleanup(held.let_go)
        held.set(place, 0x77, len(content))  # the step, which writes these blocks before they are the load's
        mark = self.copies.mark(0, held.stream)
        jobs = [self.copies.store(arena, layout, numbers(6), other, mark)]
        jobs += [self.copies.load(arena, layout, [block], offsets[block : block + 1], sums[block : block + 1], mark) for block in range(6)]
        unwanted = self.copies.load(arena, layout, [0], offsets[:1], sums[:1], mark)
        mark.close()
        until("they stand", lambda: self.copies.counts().standing == 8, 30)
        ctypes.memset(place, 0x33, len(content))
        self.assertEqual(self.done(self.copies.load(arena, layout, [5], offsets[5:], sums[5:])).bad, [])
        self.assertEqual(ctypes.string_at(place, len(content)), b"\x33" * 5 * 4096 + content[5 * 4096 :])
        unwanted.abandon()
        until("it is free", unwanted.ended)
        self.assertEqual([job.ended() for job in jobs], [False] * 7)
        held.let_go()
        self.assertEqual([self.done(job).bad for job in jobs[1:]], [[]] * 6)
        self.assertEqual(self.done(jobs[0]).bad, [])
        self.assertEqual(ctypes.string_at(place, len(content)), content)
        counts = self.copies.counts()
        self.assertEqual((counts.jobs, counts.standing, counts.hung, counts.late_blocks, counts.quarantined), (0, 0, 0, 0, 0))


class Hanging(DeviceCase):
    deadline_s = 0.3

    def setUp(self) -> None:
        super().setUp()
        self.steps = [(DRIVER.held_stream(), self.memory(16, bytes(16))) for _ in range(2)]
        for stream, _ in self.steps:
            stream.let_go()

    def test_a_load_that_hangs_is_bad_and_its_blocks_are_free(self) -> None:
        arena = self.copies.map(self.ref)
        place, content, layout, offsets = self.simple()
        self.pinned(arena)
        sums = self.done(self.copies.store(arena, layout, numbers(6), offsets)).checksums
        ctypes.memset(place, 0x33, len(content))
        DRIVER.hang()
        found = self.done(self.copies.load(arena, layout, numbers(6), offsets, sums))
        self.assertEqual((found.bad, found.corrupt), (list(range(6)), []))  # nobody has seen its bytes
        self.assertEqual((self.copies.counts().hung, self.copies.counts().bad_blocks), (1, 0))
        # One deadline, and not one a copy: all of them would take twice as long.
        start, more = time.monotonic(), 30
        for _ in range(more):
            self.assertEqual(self.done(self.copies.load(arena, layout, numbers(6), offsets, sums)).bad, list(range(6)))
        self.assertLess(time.monotonic() - start, more * self.deadline_s / 2)
        DRIVER.heal()
        until("it settles", lambda: self.copies.counts().hung == 0)
        self.assertEqual(ctypes.string_at(place, len(content)), b"\x33" * len(content))
        self.assertEqual(self.done(self.copies.load(arena, layout, numbers(6), offsets, sums)).bad, [])
        self.assertEqual(ctypes.string_at(place, len(content)), content)
        self.assertEqual(self.copies.counts().late_blocks, 6 * (1 + more))

    def test_a_store_that_hangs_keeps_its_slots_until_it_has_ended(self) -> None:
        arena = self.copies.map(self.ref)
        _, _, layout, offsets = self.simple()
        self.pinned(arena)
        DRIVER.hang()
        job = self.copies.store(arena, layout, numbers(6), offsets)
        until("it is late", lambda: self.copies.counts().hung == 1, 30)
        self.assertFalse(job.ended(0.1))
        arena.close()
        self.assertEqual(self.copies.counts().arenas, 1)  # mapped as long as it may be written
        DRIVER.heal()
        self.assertEqual(self.done(job).bad, list(range(6)))
        self.assertEqual(self.copies.counts().stored_blocks, 0)
        until("it is unmapped", lambda: self.copies.counts().arenas == 0)

    def test_behind_a_step_that_does_not_end_nothing_is_begun(self) -> None:
        arena = self.copies.map(self.ref)
        place, content, layout, offsets = self.simple()
        self.pinned(arena)
        sums = self.done(self.copies.store(arena, layout, numbers(6), offsets)).checksums
        held = DRIVER.held_stream()
        self.addCleanup(held.let_go)
        mark, began = self.copies.mark(0, held.stream), time.monotonic()
        jobs = [
            self.copies.store(arena, layout, numbers(6), offsets, mark),
            self.copies.load(arena, layout, numbers(6), offsets, sums, mark),
        ]
        mark.close()
        for found in [self.done(job) for job in jobs]:
            self.assertEqual((found.bad, found.corrupt), (list(range(6)), []))
        self.assertGreater(time.monotonic() - began, 12 * self.deadline_s)
        counts = self.copies.counts()
        self.assertEqual((counts.hung, counts.standing, counts.bad_blocks), (2, 0, 0))
        held.let_go()
        until("it settles", lambda: self.copies.counts().hung == 0)
        self.assertEqual(ctypes.string_at(place, len(content)), content)
        self.assertEqual(self.done(self.copies.load(arena, layout, numbers(6), offsets, sums)).bad, [])
        self.assertEqual(self.copies.counts().late_blocks, 2 * 6)

    def test_to_forget_a_layout_waits_for_nothing(self) -> None:
        """Its memory is free when the GPU has ended what it does; who forgets it, or its last job, may be the engine's loop."""
        arena = self.copies.map(self.ref)
        place, free = self.memory(6 * 4096), DRIVER.free_bytes
        layout, other = [self.copies.layout([kvtier.Part(place, 4096, 4096)], 6, device=0) for _ in range(2)]
        self.pinned(arena)
        job = self.copies.store(arena, layout, numbers(6), self.slots(6, 4096))
        until("it has ended", job.ended)
        with self.hanging():
            for each in (layout, other):
                self.assertIsNone(in_time(each.close))
            in_time(job.take)
            self.assertEqual(self.copies.counts().layouts, 0)
            self.assertLess(DRIVER.free_bytes, free)
        until("it is freed", lambda: DRIVER.free_bytes == free)

    def test_to_close_waits_no_longer_than_it_is_told(self) -> None:
        """Behind a kernel of the engine that never ends a GPU gives nothing back, and the engine wants to end."""
        arena = self.copies.map(self.ref)
        place, before = self.memory(4096), DRIVER.registered_bytes
        free = DRIVER.free_bytes
        self.copies.layout([kvtier.Part(place, 4096, 4096)], 1, device=0)
        self.pinned(arena)
        with self.hanging():
            self.assertIs(in_time(lambda: self.copies.close(0.5)), False)
            self.assertLess(DRIVER.free_bytes, free)
        until("all is freed", lambda: DRIVER.free_bytes == free and DRIVER.registered_bytes == before)

    def test_to_close_while_a_layout_is_freed_keeps_nothing(self) -> None:
        self.closed_while(lambda arena, layout: layout.close())

    def test_to_close_while_an_arena_is_unpinned_keeps_nothing(self) -> None:
        self.closed_while(lambda arena, layout: arena.close())

    def closed_while(self, left: Callable[[kvtier.Arena, kvtier.Layout], object]) -> None:
        """The thread that gives it back stands behind the engine's kernel, and ends when that does."""
        arena = self.copies.map(self.ref)
        place, before = self.memory(4096), DRIVER.registered_bytes
        free = DRIVER.free_bytes
        layout = self.copies.layout([kvtier.Part(place, 4096, 4096)], 1, device=0)
        self.pinned(arena)
        with self.hanging():
            left(arena, layout)
            until("it waits for the GPU", lambda: DRIVER.giving_back == 1)
            self.assertIs(in_time(lambda: self.copies.close(0.5)), False)
        until("all is freed", lambda: DRIVER.free_bytes == free and DRIVER.registered_bytes == before)
        until("it is unmapped", lambda: self.path not in Path("/proc/self/maps").read_text())

    def test_to_close_after_a_look_that_hangs_keeps_nothing(self) -> None:
        place = self.memory(4096)
        free, buffers = DRIVER.free_bytes, DRIVER.pinned_buffers
        self.copies.layout([kvtier.Part(place, 4096, 4096)], 1, device=0)
        DRIVER.hang()
        with self.assertRaisesRegex(kvtier.KvError, "has not ended a small copy"):
            self.copies.peek(0, place, 16)
        self.assertIs(in_time(lambda: self.copies.close(0.5)), False)
        DRIVER.heal()
        until("all is freed", lambda: DRIVER.free_bytes == free and DRIVER.pinned_buffers == buffers)

    def test_a_look_that_hangs_does_not_give_up_the_device(self) -> None:
        arena = self.copies.map(self.ref)
        before = DRIVER.registered_bytes
        place, content, _, _ = self.simple()
        self.pinned(arena)
        DRIVER.hang()
        with self.assertRaisesRegex(kvtier.KvError, "has not ended a small copy"):
            self.copies.peek(0, place, 16)
        self.assertEqual(self.copies.counts().hung, 1)
        DRIVER.heal()
        until("it settles", lambda: self.copies.counts().hung == 0)
        self.assertEqual(self.copies.peek(0, place, 16), content[:16])
        arena.close()
        until("it is let go", lambda: DRIVER.registered_bytes == before and self.copies.counts().arenas == 0)
        self.assertEqual(self.pinned(self.copies.map(self.ref)), "")

    @contextlib.contextmanager
    def hanging(self) -> Iterator[None]:
        """A kernel of the engine's own hangs: the first of two. When one of them has ended, the other does."""
        DRIVER.hang()
        try:
            for stream, place in self.steps:
                stream.set(place, 1, 16)
            until("one hangs", lambda: any(ctypes.string_at(place, 1) != bytes(1) for _, place in self.steps))
            yield
        finally:
            DRIVER.heal()

    def test_abandoned_while_it_hangs(self) -> None:
        arena = self.copies.map(self.ref)
        _, _, layout, offsets = self.simple()
        DRIVER.hang()
        job = self.copies.store(arena, layout, numbers(6), offsets)
        until("it hangs", lambda: self.copies.counts().hung == 1, 30)
        self.assertFalse(job.abandon())
        self.assertEqual(self.copies.counts().quarantined, 1)
        DRIVER.heal()
        until("the quarantine is over", lambda: self.copies.counts().quarantined == 0)
        self.assertTrue(job.ended())


class GivenUp(DeviceCase):
    """Of a device that was given up nothing is unpinned any more, in all of the process: so this is one of its own."""

    def in_its_process(self) -> None:
        Path(self.path + ".lock").touch()
        self.addCleanup(os.unlink, self.path + ".lock")
        before = DRIVER.registered_bytes
        arena = self.copies.map(kvtier.ArenaRef(self.path, BYTES, ID, 1))
        place, _, _, _ = self.simple()
        self.assertEqual(self.pinned(arena), "")
        DRIVER.break_down()
        with self.assertRaises(kvtier.KvError):
            self.copies.layout([kvtier.Part(place, 4096, 4096)], 1, device=0)
        DRIVER.heal()
        arena.close()
        until("it is left", lambda: self.copies.counts().arenas == 0)
        # Unmapped, it would leave its place to the next one, which could not be pinned there.
        self.assertEqual(self.pinned(self.copies.map(self.ref)), "")
        self.assertEqual(DRIVER.registered_bytes - before, 2 * BYTES)
        self.assertEqual(sum(self.path in line for line in Path("/proc/self/maps").read_text().splitlines()), 2)
        fd = os.open(self.path + ".lock", os.O_RDONLY | os.O_CLOEXEC)
        self.addCleanup(os.close, fd)
        self.assertTrue(is_held(fd, 1))

    def test_what_stays_pinned_stays_mapped_and_held(self) -> None:
        command = [sys.executable, "-m", "unittest", "test_device_hangs.GivenUp.in_its_process"]
        here = Path(__file__).parent
        run = subprocess.run(command, cwd=here, capture_output=True, text=True, timeout=PROGRAM_S)
        self.assertEqual(run.returncode, 0, run.stderr)


if __name__ == "__main__":
    unittest.main()
