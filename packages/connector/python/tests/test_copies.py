"""The library by itself, on an arena file made by hand."""

from __future__ import annotations

import ctypes
import fcntl
import os
import platform
import random
import struct
import subprocess
import sys
import tempfile
import threading
import time
import unittest
import zipfile
from array import array
from pathlib import Path
from unittest import mock

import kvtier
from kvtier import hold, native
from rig import PROGRAM_S, numbers, until

ID = 0x1234_5678_9ABC_DEF0
BYTES = 4 << 20
PAGE = 4096


class CopiesCase(unittest.TestCase):
    def setUp(self) -> None:
        handle, self.path = tempfile.mkstemp(prefix="kvtier-arena-", dir="/dev/shm")
        self.addCleanup(os.unlink, self.path)
        header = struct.pack("<8sIIQQ", b"KVTIERAR", 1, PAGE, BYTES, ID)
        os.write(handle, header)
        os.truncate(self.path, BYTES)
        os.close(handle)
        self.copies = kvtier.Copies()
        self.addCleanup(self.copies.close)
        self.ref = kvtier.ArenaRef(self.path, BYTES, ID)

    def code_of(self, call: object) -> str:
        with self.assertRaises(kvtier.KvError) as caught:
            call()  # type: ignore[operator]
        return caught.exception.code

    def slots(self, count: int, bytes_each: int) -> array[int]:
        step = -(-(256 + bytes_each) // PAGE) * PAGE
        return array("Q", [PAGE + 256 + i * step for i in range(count)])


class Mapping(CopiesCase):
    def test_another_arena_is_refused(self) -> None:
        for ref in (
            kvtier.ArenaRef(self.path, BYTES, ID + 1),
            kvtier.ArenaRef(self.path, BYTES + PAGE, ID),
        ):
            self.assertEqual(self.code_of(lambda ref=ref: self.copies.map(ref)), "PROTOCOL")
        self.assertEqual(self.code_of(lambda: self.copies.map(kvtier.ArenaRef("/nowhere/x", BYTES, ID))), "SETUP")
        with open(self.path, "r+b") as file:
            file.write(b"KVTIERXX")
        self.assertEqual(self.code_of(lambda: self.copies.map(self.ref)), "PROTOCOL")

    def test_a_folder_may_be_mounted_elsewhere(self) -> None:
        away = kvtier.ArenaRef("/elsewhere/" + os.path.basename(self.path), BYTES, ID)
        self.assertTrue(self.copies.map(away, "/dev/shm").close())

    def test_an_arena_stays_mapped_as_long_as_a_job_uses_it(self) -> None:
        arena = self.copies.map(self.ref)
        memory = ctypes.create_string_buffer(3 << 20)
        layout = self.copies.layout([kvtier.Part(ctypes.addressof(memory), 0, 3 << 20)], 1)
        jobs = [self.copies.store(arena, layout, [0], [PAGE + 256]) for _ in range(20)]
        arena.close()
        self.assertEqual(self.copies.counts().arenas, 1)
        for job in jobs:
            until("it ends", job.ended)
            job.take()
        until("it is unmapped", lambda: self.copies.counts().arenas == 0)
        self.assertEqual(self.code_of(lambda: self.copies.store(arena, layout, [0], [PAGE + 256])), "UNKNOWN")

    def test_who_has_it_mapped_holds_its_byte_until_the_last_copy_has_ended(self) -> None:
        byte = 1 << 40
        ref = kvtier.ArenaRef(self.path, BYTES, ID, byte)
        self.assertEqual(self.code_of(lambda: self.copies.map(ref)), "SETUP")  # no lock file
        with open(ref.lock_path, "x+b") as lock:
            self.addCleanup(os.unlink, ref.lock_path)

            def held(at: int = byte) -> bool:
                asked = struct.pack("@hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, at, 1, 0)
                return struct.unpack("@hhqqi4x", fcntl.fcntl(lock, fcntl.F_OFD_GETLK, asked))[0] != fcntl.F_UNLCK

            arena = self.copies.map(ref)
            self.assertEqual((held(), held(byte + 1)), (True, False))
            memory = ctypes.create_string_buffer(3 << 20)
            layout = self.copies.layout([kvtier.Part(ctypes.addressof(memory), 0, 3 << 20)], 1)
            job = self.copies.store(arena, layout, [0] * 200, [PAGE + 256] * 200)
            self.assertFalse(arena.close())
            self.assertTrue(held())
            until("the copy ends", job.ended)
            job.take()
            until("the lock has ended", lambda: not held())

    def test_a_forked_child_holds_no_byte(self) -> None:
        """Of those that its parent held: they would seem held for as long as it lives."""
        byte = 1 << 40
        ref = kvtier.ArenaRef(self.path, BYTES, ID, byte)
        with open(ref.lock_path, "x+b") as lock:
            self.addCleanup(os.unlink, ref.lock_path)
            arena = self.copies.map(ref)
            beside = hold.hold(ref.lock_path, byte + 1)
            gone = hold.hold(ref.lock_path, byte + 2)
            assert beside is not None and gone is not None
            os.close(gone)
            said, says = os.pipe()
            self.addCleanup(os.close, said)
            with open(self.path, "rb") as other:  # has the number of what is gone
                ends, end = os.pipe()
                child = os.fork()
                if child == 0:
                    try:
                        os.fstat(beside)  # it can be closed, as whoever holds it would
                        os.write(says, other.read(8))
                        os.close(end)
                        os.read(ends, 1)
                    finally:
                        os._exit(0)
                os.close(says)
                os.close(ends)
            try:
                self.assertEqual(os.read(said, 8), b"KVTIERAR")
                self.assertEqual([hold.is_held(lock.fileno(), byte + i) for i in range(3)], [True, True, False])
                os.close(beside)
                arena.close()
                until("it is unmapped", lambda: self.copies.counts().arenas == 0)
                self.assertEqual([hold.is_held(lock.fileno(), byte + i) for i in range(3)], [False] * 3)
            finally:
                os.close(end)
                os.waitpid(child, 0)


class Moving(CopiesCase):
    def test_what_is_waited_for_is_shared_by_all_threads(self) -> None:
        """Also where one of them could take all of it at once."""
        arena = self.copies.map(self.ref)
        count, size = 24, 128 << 10
        offsets, sums = self.slots(count, size), array("Q", [0] * count)
        memory = ctypes.create_string_buffer(count * size)
        # Of short rows, so that copying takes longer than waking.
        rows = kvtier.Part(ctypes.addressof(memory), size, 16, size // 16, 16)
        layout = self.copies.layout([rows], count)

        def name(thread: Path) -> str:
            try:
                return (thread / "comm").read_text()
            except OSError:
                return ""  # it has ended since it was listed

        def threads() -> list[Path]:
            return [one for one in Path("/proc/self/task").iterdir() if name(one) == "kvtier-load\n"]

        until("both are there", lambda: len(threads()) == 2)

        def shared() -> bool:
            def ran() -> list[int]:
                return [int((one / "schedstat").read_text().split()[0]) for one in sorted(threads())]

            before = ran()
            job = self.copies.load(arena, layout, numbers(count), offsets, sums)
            until("it ends", job.ended)
            job.take_bad()
            each = [after - was for was, after in zip(before, ran())]
            return min(each) > 0.3 * max(each)

        # On a busy machine one may be through with all before the other has its turn: sooner or later it has.
        until("both copied a part", shared)

    def test_every_layout_comes_back_as_it_was(self) -> None:
        """Against a naive copy: rows, strides and unaligned places drawn at random."""
        draw = random.Random(7)
        arena = self.copies.map(self.ref)
        for _ in range(60):
            blocks = draw.randint(1, 6)
            shapes = [(draw.randint(1, 5), draw.choice([1, 7, 64, 256, 2048, 2049, 5000])) for _ in range(draw.randint(1, 4))]
            source, target, naive = [], [], []
            for rows, row_bytes in shapes:
                row_stride = row_bytes + draw.randint(0, 70)
                stride = rows * row_stride + draw.randint(0, 100)
                shift = draw.randint(0, 64)
                buffers = [ctypes.create_string_buffer(draw.randbytes(blocks * stride + shift)) for _ in range(2)]
                for side, buffer in zip((source, target), buffers):
                    side.append((kvtier.Part(ctypes.addressof(buffer) + shift, stride, row_bytes, rows, row_stride), buffer))
                naive.append((buffers[0].raw, shift, stride, rows, row_stride, row_bytes))
            payload_bytes = sum(rows * row_bytes for rows, row_bytes in shapes)
            payloads = [
                b"".join(
                    raw[shift + b * stride + r * row_stride :][:row_bytes]
                    for raw, shift, stride, rows, row_stride, row_bytes in naive
                    for r in range(rows)
                )
                for b in range(blocks)
            ]
            layouts = [self.copies.layout([part for part, _ in side], blocks) for side in (source, target)]
            self.assertEqual(layouts[0].payload_bytes, payload_bytes)
            offsets = self.slots(blocks, payload_bytes)
            stored = self.copies.store(arena, layouts[0], numbers(blocks), offsets)
            until("stored", stored.ended)
            sums = stored.take().checksums
            with open(self.path, "rb") as file:
                for offset, payload in zip(offsets, payloads):
                    file.seek(offset)
                    self.assertEqual(file.read(payload_bytes), payload)
            loaded = self.copies.load(arena, layouts[1], numbers(blocks), offsets, sums)
            until("loaded", loaded.ended)
            found = loaded.take()
            self.assertEqual((found.bad, found.checksums), ([], sums))
            again = self.copies.store(arena, layouts[1], numbers(blocks), offsets)
            until("stored again", again.ended)
            self.assertEqual(again.take().checksums, sums)
            for layout in layouts:
                layout.close()

    def test_a_flipped_bit_is_bad_wherever_it_is(self) -> None:
        arena = self.copies.map(self.ref)
        memory = ctypes.create_string_buffer(os.urandom(3 * 5000))
        layout = self.copies.layout([kvtier.Part(ctypes.addressof(memory), 5000, 5000)], 3)
        offsets = self.slots(3, 5000)
        job = self.copies.store(arena, layout, numbers(3), offsets)
        until("stored", job.ended)
        sums = job.take().checksums
        for at in (0, 1, 2047, 2048, 4999):
            with open(self.path, "r+b") as file:
                file.seek(offsets[1] + at)
                byte = file.read(1)
                file.seek(-1, 1)
                file.write(bytes([byte[0] ^ 0x10]))
                file.flush()
                for job in (
                    self.copies.check(arena, 5000, offsets, sums),
                    self.copies.load(arena, layout, numbers(3), offsets, sums),
                ):
                    until("ended", job.ended)
                    self.assertEqual(job.take().bad, [1])
                file.seek(-1, 1)
                file.write(byte)
        check = self.copies.check(arena, 5000, offsets, sums)
        until("ended", check.ended)
        self.assertEqual(check.take().bad, [])
        self.assertEqual(self.copies.counts().bad_blocks, 10)

    def test_the_checksum_is_xxh3(self) -> None:
        """A chunk of one byte, and what the node computes of the same (KVTIER_TEST_SUMS: bytes in hex, sum)."""
        arena = self.copies.map(self.ref)
        for pair in filter(None, os.environ.get("KVTIER_TEST_SUMS", "").split(",")):
            data, _, wanted = pair.partition("=")
            memory = ctypes.create_string_buffer(bytes.fromhex(data), len(data) // 2)
            layout = self.copies.layout([kvtier.Part(ctypes.addressof(memory), 0, len(data) // 2)], 1)
            job = self.copies.store(arena, layout, [0], [PAGE + 256])
            until("stored", job.ended)
            self.assertEqual(list(job.take().checksums), [int(wanted)])


class Bounds(CopiesCase):
    def test_nothing_outside_of_the_arena_or_the_layout(self) -> None:
        arena = self.copies.map(self.ref)
        memory = ctypes.create_string_buffer(2 * 1000)
        layout = self.copies.layout([kvtier.Part(ctypes.addressof(memory), 1000, 1000)], 2)
        for offset in (0, 4095, BYTES - 999, BYTES, (1 << 64) - 1):
            self.assertEqual(self.code_of(lambda: self.copies.store(arena, layout, [0], [offset])), "PROTOCOL")
        self.assertEqual(self.code_of(lambda: self.copies.store(arena, layout, [2], [PAGE])), "CONFIG")
        self.assertEqual(self.code_of(lambda: self.copies.store(arena, layout, [], [])), "CONFIG")
        self.assertEqual(self.code_of(lambda: self.copies.load(arena, layout, [0], [PAGE], [])), "CONFIG")
        self.assertEqual(self.code_of(lambda: self.copies.check(arena, 0, [PAGE], [1])), "PROTOCOL")
        until("the last bytes may be used", self.copies.store(arena, layout, [1], [BYTES - 1000]).ended)

    def test_layouts_that_cannot_be(self) -> None:
        for parts, blocks in (
            ([], 1),
            ([kvtier.Part(0, 1, 1)], 1),
            ([kvtier.Part(4096, 1, 0)], 1),
            ([kvtier.Part(4096, 1, 1)], 0),
            ([kvtier.Part(4096, 1 << 40, 1)], 1 << 40),
            ([kvtier.Part(4096, 1, 1 << 30, rows=1 << 30)], 1),
        ):
            self.assertEqual(self.code_of(lambda: self.copies.layout(parts, blocks)), "CONFIG")

    def test_jobs_that_nobody_takes_are_bounded(self) -> None:
        copies = kvtier.Copies(max_jobs=3)
        self.addCleanup(copies.close)
        arena = copies.map(self.ref)
        jobs = [copies.check(arena, 100, [PAGE], [0]) for _ in range(3)]
        self.assertEqual(self.code_of(lambda: copies.check(arena, 100, [PAGE], [0])), "BUSY")
        until("ended", jobs[0].ended)
        jobs[0].take()
        copies.check(arena, 100, [PAGE], [0])


class Abandoning(CopiesCase):
    def test_what_was_abandoned_ends_and_is_forgotten(self) -> None:
        copies = kvtier.Copies(store_threads=1, store_niceness=19)
        self.addCleanup(copies.close)
        arena = copies.map(self.ref)
        memory = ctypes.create_string_buffer(3 << 20)
        layout = copies.layout([kvtier.Part(ctypes.addressof(memory), 0, 3 << 20)], 1)
        jobs = [copies.store(arena, layout, [0] * 50, [PAGE + 256] * 50) for _ in range(4)]
        last = jobs[-1].abandon()  # the others are before it: none of it was begun
        self.assertTrue(last)
        for job in jobs[:-1]:
            job.abandon()
        for job in jobs:
            until("it is settled", job.ended)
        until("all are forgotten", lambda: copies.counts().jobs == 0)
        self.assertEqual(copies.counts().quarantined, 0)
        self.assertEqual(self.code_of(jobs[0].take), "UNKNOWN")

    def test_taking_what_runs_is_refused_and_waiting_is_bounded(self) -> None:
        copies = kvtier.Copies(store_threads=1)
        self.addCleanup(copies.close)
        arena = copies.map(self.ref)
        memory = ctypes.create_string_buffer(3 << 20)
        layout = copies.layout([kvtier.Part(ctypes.addressof(memory), 0, 3 << 20)], 1)
        job = copies.store(arena, layout, [0] * 2000, [PAGE + 256] * 2000)
        self.assertFalse(job.ended(0.001))
        self.assertEqual(self.code_of(job.take), "BUSY")
        job.abandon()
        until("it is settled", job.ended)

    def test_closing_drops_what_waits(self) -> None:
        copies = kvtier.Copies(store_threads=1)
        arena = copies.map(self.ref)
        memory = ctypes.create_string_buffer(3 << 20)
        layout = copies.layout([kvtier.Part(ctypes.addressof(memory), 0, 3 << 20)], 1)
        for _ in range(100):
            copies.store(arena, layout, [0] * 20, [PAGE + 256] * 20)
        self.assertTrue(copies.close())
        self.assertTrue(copies.close())
        self.assertEqual(self.code_of(lambda: copies.map(self.ref)), "CANCELLED")

    def test_many_threads_at_once(self) -> None:
        arena = self.copies.map(self.ref)
        memory = ctypes.create_string_buffer(os.urandom(16 * 4000))
        layout = self.copies.layout([kvtier.Part(ctypes.addressof(memory), 4000, 4000)], 16)
        offsets = self.slots(16, 4000)
        wrong: list[object] = []

        def run(block: int) -> None:
            for _ in range(50):
                stored = self.copies.store(arena, layout, [block], [offsets[block]])
                until("stored", stored.ended)
                sums = stored.take().checksums
                checked = self.copies.check(arena, 4000, [offsets[block]], sums)
                if block % 4 == 0:
                    checked.abandon()
                    continue
                until("checked", checked.ended)
                wrong.extend(checked.take().bad)

        threads = [threading.Thread(target=run, args=(block,)) for block in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.assertEqual(wrong, [])


class Processes(CopiesCase):
    def test_a_fork_opens_its_own(self) -> None:
        arena = self.copies.map(self.ref)
        child = os.fork()
        if child == 0:
            try:
                self.copies.check(arena, 100, [PAGE], [0])
            except kvtier.KvError as error:
                os._exit(0 if error.code == "CONFIG" else 1)
            os._exit(2)
        self.assertEqual(os.waitpid(child, 0)[1], 0)


class Package(unittest.TestCase):
    """What an operator sees who has another library, or none; and what is in a wheel."""

    def said(self, **env: str) -> str:
        program = "import kvtier\ntry: kvtier.Copies()\nexcept kvtier.KvError as error: print(error.code, error)"
        plain = {key: value for key, value in os.environ.items() if key != "KVTIER_LIBRARY"}
        done = subprocess.run([sys.executable, "-O", "-c", program], env={**plain, **env}, capture_output=True, text=True, timeout=PROGRAM_S)
        self.assertEqual(done.returncode, 0, done.stderr)
        return done.stdout

    def test_a_library_that_is_missing_or_of_another_machine_is_one_line(self) -> None:
        folder = Path(self.enterContext(tempfile.TemporaryDirectory()))
        self.assertEqual(self.said(KVTIER_LIBRARY=str(native._path())), "")
        self.assertIn("/nowhere/x.so: the library is not there; KVTIER_LIBRARY names it", self.said(KVTIER_LIBRARY="/nowhere/x.so"))
        library = bytearray(native._path().read_bytes())
        library[18:20] = (183).to_bytes(2, "little")
        foreign = folder / "libkvtier.so"
        foreign.write_bytes(library)
        said = self.said(KVTIER_LIBRARY=str(foreign))
        self.assertIn(f"SETUP: {foreign}: is not the library of this version, or not for {platform.machine()} (", said)
        # A package alone, in a folder near the root: no checkout lies above it.
        with mock.patch.object(native, "__file__", "/app/kvtier/native.py"), mock.patch.dict(os.environ, {"KVTIER_LIBRARY": ""}):
            self.assertEqual(native._path(), Path("/app/kvtier/libkvtier.so"))

    def test_a_wheel_is_for_the_librarys_machine_and_has_the_license(self) -> None:
        folder = Path(self.enterContext(tempfile.TemporaryDirectory()))
        backend = Path(__file__).resolve().parent.with_name("build_backend.py")
        library = bytearray(native._path().read_bytes())
        for number, machine in ((62, "x86_64"), (183, "aarch64"), (243, "")):
            library[18:20] = number.to_bytes(2, "little")
            other = folder / "libkvtier.so"
            other.write_bytes(library)
            program = f"import sys; sys.path.insert(0, {str(backend.parent)!r}); import build_backend as b; print(b.build_wheel({str(folder)!r}))"
            env = {**os.environ, "KVTIER_LIBRARY": str(other)}
            done = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, timeout=PROGRAM_S)
            if not machine:
                self.assertIn("is not a library for any of x86_64, aarch64", done.stderr)
                continue
            self.assertRegex(done.stdout, rf"^kvtier-[0-9.]+-py3-none-manylinux_2_\d+_{machine}\.whl$")
            with zipfile.ZipFile(folder / done.stdout.strip()) as wheel:
                (about,) = (name for name in wheel.namelist() if name.endswith(".dist-info/LICENSE"))
                self.assertIn(b"Apache License", wheel.read(about))
                self.assertIn("kvtier/py.typed", wheel.namelist())
                (points,) = (name for name in wheel.namelist() if name.endswith(".dist-info/entry_points.txt"))
                self.assertEqual(wheel.read(points), b"[vllm.general_plugins]\nkvtier = kvtier.vllm.naming:register\n")


if __name__ == "__main__":
    unittest.main()
