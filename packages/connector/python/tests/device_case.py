"""What the tests of copies of a GPU's memory are made of: an arena, CUDA's driver on the emulator, and memory of it."""

from __future__ import annotations

import ctypes
import os
import random
import struct
import tempfile
import unittest
from array import array

import kvtier
from rig import until
from standin import Driver

DRIVER = Driver()
ID = 0x1234_5678_9ABC_DEF0
BYTES = 8 << 20
PAGE = 4096


class DeviceCase(unittest.TestCase):
    deadline_s = 60.0

    def setUp(self) -> None:
        handle, self.path = tempfile.mkstemp(prefix="kvtier-arena-", dir="/dev/shm")
        self.addCleanup(os.unlink, self.path)
        os.write(handle, struct.pack("<8sIIQQ", b"KVTIERAR", 1, PAGE, BYTES, ID))
        os.truncate(self.path, BYTES)
        os.close(handle)
        self.addCleanup(DRIVER.refuse_pinning, 0)
        self.copies = kvtier.Copies(store_threads=2, device_deadline_s=self.deadline_s)
        self.ref = kvtier.ArenaRef(self.path, BYTES, ID)

    def tearDown(self) -> None:
        DRIVER.heal()  # before anything is freed, which waits for what hangs
        self.assertTrue(self.copies.close(30))

    def slots(self, count: int, bytes_each: int) -> array[int]:
        step = -(-(256 + bytes_each) // PAGE) * PAGE
        return array("Q", [PAGE + 256 + i * step for i in range(count)])

    def memory(self, size: int, fill: bytes | None = None) -> int:
        place = DRIVER.allocate(size)
        if fill is not None:
            ctypes.memmove(place, fill, size)
        self.addCleanup(DRIVER.free, place)
        return place

    def simple(self, blocks: int = 6, block_bytes: int = 4096) -> tuple[int, bytes, kvtier.Layout, array[int]]:
        """One run a block: where it lies, what lies there, and slots for it."""
        content = random.Random(blocks).randbytes(blocks * block_bytes)
        place = self.memory(len(content), content)
        layout = self.copies.layout([kvtier.Part(place, block_bytes, block_bytes)], blocks, device=0)
        return place, content, layout, self.slots(blocks, block_bytes)

    def done(self, job: kvtier.Job) -> kvtier.Copied:
        until("the copy ends", job.ended, 60)
        return job.take()

    def in_slot(self, offset: int, size: int) -> bytes:
        with open(self.path, "rb") as file:
            file.seek(offset)
            return file.read(size)

    def pinned(self, arena: kvtier.Arena) -> str:
        until("pinning is decided", lambda: arena.refusal(0) is not None, 30)
        return arena.refusal(0) or ""
