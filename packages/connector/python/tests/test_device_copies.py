"""Copies of a GPU's memory by the library that ships, over CUDA's driver on the emulator."""

from __future__ import annotations

import ctypes
import os
import random
import subprocess
import sys
import threading
import unittest
from array import array

import kvtier
from device_case import BYTES, DRIVER, PAGE, DeviceCase
from rig import PROGRAM_S, numbers, until
from standin import NOT_SUPPORTED, OUT_OF_MEMORY


class Moving(DeviceCase):
    def test_every_layout_comes_back_as_it_was_pinned_and_over_the_buffer(self) -> None:
        """Against a naive copy: keys and values apart, packed, a run a layer, one for all; sizes mixed in one payload."""
        draw = random.Random(11)
        for refused in (0, NOT_SUPPORTED):
            DRIVER.refuse_pinning(refused)
            arena = self.copies.map(self.ref)
            for _ in range(12):
                blocks = draw.randint(1, 6)
                shapes = [(draw.randint(1, 4), draw.choice([16, 64, 256, 2048, 5008])) for _ in range(draw.randint(1, 4))]
                if sum(rows * size for rows, size in shapes) < 256:
                    shapes.append((1, 4096))
                sides: list[list[kvtier.Part]] = [[], []]
                naive = []
                for rows, row_bytes in shapes:
                    row_stride = row_bytes + 16 * draw.randint(0, 4)
                    stride = rows * row_stride + 16 * draw.randint(0, 9)
                    shift = 16 * draw.randint(0, 4)
                    data = draw.randbytes(blocks * stride + shift)
                    places = [self.memory(len(data), data), self.memory(len(data), bytes(len(data)))]
                    for side, place in zip(sides, places):
                        side.append(kvtier.Part(place + shift, stride, row_bytes, rows, row_stride))
                    naive.append((data, places[1], shift, stride, rows, row_stride, row_bytes))
                payload = sum(rows * row_bytes for rows, row_bytes in shapes)
                expected = [
                    b"".join(
                        data[shift + b * stride + r * row_stride :][:row_bytes]
                        for data, _, shift, stride, rows, row_stride, row_bytes in naive
                        for r in range(rows)
                    )
                    for b in range(blocks)
                ]
                layouts = [self.copies.layout(side, blocks, device=0) for side in sides]
                offsets = self.slots(blocks, payload)
                stored = self.done(self.copies.store(arena, layouts[0], numbers(blocks), offsets))
                self.assertEqual(stored.bad, [])
                self.assertEqual([self.in_slot(at, payload) for at in offsets], expected)
                # The checksums are those of a CPU's copies.
                checked = self.done(self.copies.check(arena, payload, offsets, stored.checksums))
                self.assertEqual(checked.bad, [])
                loaded = self.done(self.copies.load(arena, layouts[1], numbers(blocks), offsets, stored.checksums))
                self.assertEqual((loaded.bad, loaded.checksums), ([], stored.checksums))
                # What belongs to no block is as it was: zeros.
                for data, place, shift, stride, rows, row_stride, row_bytes in naive:
                    wanted = bytearray(len(data))
                    for b in range(blocks):
                        for r in range(rows):
                            at = shift + b * stride + r * row_stride
                            wanted[at : at + row_bytes] = data[at : at + row_bytes]
                    self.assertEqual(ctypes.string_at(place, len(data)), bytes(wanted))
                for layout in layouts:
                    layout.close()
            why = self.pinned(arena)
            self.assertEqual(why == "", refused == 0, why)
            arena.close()
            until("it is unmapped", lambda: self.copies.counts().arenas == 0)
        self.assertGreater(self.copies.counts().bounced_bytes, 0)

    def test_what_is_flipped_on_the_way_in_is_not_written(self) -> None:
        arena = self.copies.map(self.ref)
        place, content, layout, offsets = self.simple()
        sums = self.done(self.copies.store(arena, layout, numbers(6), offsets)).checksums
        with open(self.path, "r+b") as file:
            file.seek(offsets[2] + 4095)
            byte = file.read(1)
            file.seek(offsets[2] + 4095)
            file.write(bytes([byte[0] ^ 1]))
        sums[4] ^= 1 << 63
        ctypes.memset(place, 0, len(content))
        found = self.done(self.copies.load(arena, layout, numbers(6), offsets, sums))
        self.assertEqual((found.bad, found.corrupt), ([2, 4], [2, 4]))
        again = self.copies.load(arena, layout, numbers(6), offsets, sums)
        until("the copy ends", again.ended, 60)
        self.assertEqual(again.take_bad(), [2, 4])
        self.assertTrue(again.abandon())  # it is known no more
        expected = bytearray(content)
        for bad in (2, 4):
            expected[bad * 4096 : (bad + 1) * 4096] = bytes(4096)
        self.assertEqual(ctypes.string_at(place, len(content)), bytes(expected))
        self.assertEqual(self.copies.counts().bad_blocks, 4)

    def test_copies_wait_for_what_the_engine_has_enqueued(self) -> None:
        arena = self.copies.map(self.ref)
        place, content, layout, offsets = self.simple()
        held = DRIVER.held_stream()
        held.set(place, 0x77, len(content))  # the step that computes these blocks
        mark = self.copies.mark(0, held.stream)
        job = self.copies.store(arena, layout, numbers(6), offsets, mark)
        mark.close()
        other = self.copies.store(arena, layout, [0], self.slots(7, 4096)[6:])  # of before
        self.assertEqual(self.done(other).bad, [])
        self.assertEqual(self.in_slot(self.slots(7, 4096)[6], 4096), content[:4096])
        self.assertFalse(job.ended())
        held.let_go()
        self.assertEqual(self.done(job).bad, [])
        self.assertEqual(self.in_slot(offsets[5], 4096), b"\x77" * 4096)

    def test_payloads_larger_than_a_stage_and_more_blocks_than_one(self) -> None:
        arena = self.copies.map(self.ref)
        for blocks, size in ((2, 3 << 20), (400, 16 << 10)):
            content = random.Random(size).randbytes(blocks * size)
            place = self.memory(len(content), content)
            layout = self.copies.layout([kvtier.Part(place, size, size)], blocks, device=0)
            offsets = array("Q", [PAGE + i * size for i in range(blocks)])
            sums = self.done(self.copies.store(arena, layout, numbers(blocks), offsets)).checksums
            ctypes.memset(place, 0, len(content))
            self.assertEqual(self.done(self.copies.load(arena, layout, numbers(blocks), offsets, sums)).bad, [])
            self.assertEqual(ctypes.string_at(place, len(content)), content)
            layout.close()

    def test_the_engines_thread_is_left_as_it_was(self) -> None:
        _, _, layout, _ = self.simple()
        held = DRIVER.held_stream()
        held.let_go()
        seen: list[bool] = []

        def on_a_thread() -> None:
            seen.append(DRIVER.context_of_thread())
            self.copies.mark(0, held.stream).close()
            seen.append(DRIVER.context_of_thread())

        thread = threading.Thread(target=on_a_thread)
        thread.start()
        thread.join()
        self.assertEqual(seen, [False, False])
        layout.close()


class Capturing(DeviceCase):
    def test_no_thread_ends_a_capture_of_the_engine(self) -> None:
        """Pinned, stored, loaded, unmapped and forgotten while a graph is captured, with marks made by the engine's own thread."""
        place, content, before, offsets = self.simple()
        held = DRIVER.held_stream()
        held.let_go()
        self.addCleanup(DRIVER.captured)
        DRIVER.capture()
        arena = self.copies.map(self.ref)
        layout = self.copies.layout([kvtier.Part(place, 4096, 4096)], 6, device=0)
        self.assertEqual(self.pinned(arena), "")
        mark = self.copies.mark(0, held.stream)
        stored = self.done(self.copies.store(arena, layout, numbers(6), offsets, mark))
        self.assertEqual(stored.bad, [])
        ctypes.memset(place, 0, len(content))
        self.assertEqual(self.done(self.copies.load(arena, layout, numbers(6), offsets, stored.checksums, mark)).bad, [])
        self.assertEqual(ctypes.string_at(place, len(content)), content)
        mark.close()
        arena.close()
        until("it is unmapped", lambda: self.copies.counts().arenas == 0)
        for each in (layout, before):
            each.close()
        self.assertEqual(DRIVER.capture_mode(), 0)
        self.assertEqual(DRIVER.captured(), 0)


class Pinning(DeviceCase):
    def test_an_arena_is_pinned_beside_and_let_go_before_it_is_unmapped(self) -> None:
        before = DRIVER.registered_bytes
        arena = self.copies.map(self.ref)
        self.assertEqual(DRIVER.registered_bytes, before)
        self.simple()
        self.assertEqual(self.pinned(arena), "")
        self.assertEqual(self.copies.counts().pinned_bytes, BYTES)
        self.assertEqual(DRIVER.registered_bytes - before, BYTES)
        arena.close()
        until("it is let go", lambda: DRIVER.registered_bytes == before and self.copies.counts().arenas == 0)

    def test_an_arena_is_pinned_once_for_two_gpus(self) -> None:
        before = DRIVER.registered_bytes
        arena = self.copies.map(self.ref)
        _, content, layout, offsets = self.simple()
        place = self.memory(len(content))
        other = self.copies.layout([kvtier.Part(place, 4096, 4096)], 6, device=1)
        until("pinning is decided", lambda: None not in (arena.refusal(0), arena.refusal(1)), 30)
        self.assertEqual((arena.refusal(0), arena.refusal(1)), ("", ""))
        self.assertEqual(DRIVER.registered_bytes - before, BYTES)
        sums = self.done(self.copies.store(arena, layout, numbers(6), offsets)).checksums
        self.assertEqual(self.done(self.copies.load(arena, other, numbers(6), offsets, sums)).bad, [])
        self.assertEqual(ctypes.string_at(place, len(content)), content)
        self.assertEqual((self.copies.counts().pinned_bytes, self.copies.counts().bounced_bytes), (2 * BYTES, 0))
        arena.close()
        until("it is let go", lambda: DRIVER.registered_bytes == before and self.copies.counts().arenas == 0)

    def test_refused_it_is_said_and_copies_go_on(self) -> None:
        DRIVER.refuse_pinning(NOT_SUPPORTED)
        arena = self.copies.map(self.ref)
        _, content, layout, offsets = self.simple()
        why = self.pinned(arena)
        said = r"^GPU: pinning \d+ bytes of host memory: operation not supported \(CUDA_ERROR_NOT_SUPPORTED\); .*confidential computing"
        self.assertRegex(why, said)
        self.assertEqual(self.done(self.copies.store(arena, layout, numbers(6), offsets)).bad, [])
        self.assertEqual(self.in_slot(offsets[1], 4096), content[4096:8192])
        counts = self.copies.counts()
        self.assertEqual((counts.pinned_bytes, counts.pins_refused, counts.bounced_bytes), (0, 1, 6 * 4096))

    def test_memory_that_lacks_for_once_costs_that_copy_alone(self) -> None:
        """Neither the arena nor a stage of its own can be pinned: as under a container's limit."""
        DRIVER.refuse_pinning(OUT_OF_MEMORY)
        self.addCleanup(DRIVER.refuse_memory, 0)
        arena = self.copies.map(self.ref)
        _, content, layout, offsets = self.simple()
        self.pinned(arena)
        DRIVER.refuse_memory(OUT_OF_MEMORY)
        self.assertEqual(self.done(self.copies.store(arena, layout, numbers(6), offsets)).bad, list(range(6)))
        DRIVER.refuse_memory(0)
        sums = self.done(self.copies.store(arena, layout, numbers(6), offsets)).checksums
        DRIVER.refuse_memory(OUT_OF_MEMORY)
        self.assertEqual(self.done(self.copies.load(arena, layout, numbers(6), offsets, sums)).bad, list(range(6)))
        DRIVER.refuse_memory(0)
        self.assertEqual(self.done(self.copies.load(arena, layout, numbers(6), offsets, sums)).bad, [])
        self.assertEqual(self.copies.counts().hung, 0)


class Refusing(DeviceCase):
    def code_of(self, call: object) -> str:
        with self.assertRaises(kvtier.KvError) as caught:
            call()  # type: ignore[operator]
        return f"{caught.exception.code} {caught.exception}"

    def test_layouts_that_kernels_cannot_move(self) -> None:
        place = self.memory(4096)
        part = kvtier.Part
        for odd in (part(place + 8, 512, 512), part(place, 520, 512), part(place, 512, 504), part(place, 128, 128)):
            self.assertIn("SETUP", self.code_of(lambda odd=odd: self.copies.layout([odd], 1, device=0)))
        self.assertIn("SETUP", self.code_of(lambda: self.copies.layout([part(place, 512, 512)], 1, device=3)))

    def test_marks_are_of_the_layouts_device(self) -> None:
        arena = self.copies.map(self.ref)
        memory = ctypes.create_string_buffer(4096)
        layout = self.copies.layout([kvtier.Part(ctypes.addressof(memory), 4096, 4096)], 1)
        held = DRIVER.held_stream()
        held.let_go()
        mark = self.copies.mark(0, held.stream)
        self.assertIn("CONFIG", self.code_of(lambda: self.copies.store(arena, layout, [0], [PAGE], mark)))
        mark.close()

    def test_without_a_driver_the_same_file_says_so_in_one_line(self) -> None:
        code = (
            "import kvtier\n"
            "copies = kvtier.Copies()\n"
            "try:\n copies.layout([kvtier.Part(4096, 512, 512)], 1, device=0)\n"
            "except kvtier.KvError as error: print(error.code, error)\n"
        )
        env = {**os.environ, "KVTIER_CUDA_DRIVER": "libkvtier-no-such-driver.so.1"}
        said = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True, timeout=PROGRAM_S).stdout
        self.assertRegex(said, r"^SETUP .*no NVIDIA driver \(libkvtier-no-such-driver.so.1\) on this machine; install one\n$")


if __name__ == "__main__":
    unittest.main()
