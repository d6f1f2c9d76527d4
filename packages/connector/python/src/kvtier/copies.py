"""Copies between an engine's memory, a CPU's or a GPU's, and the arena, on threads of the library: begun here, ended by polling.

Invariants: no call waits but those that are given a time; a job's blocks and slots are its own until it has ended, abandoned or not;
an arena stays mapped as long as a job uses it.
"""

from __future__ import annotations

import ctypes
import os
import weakref
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from . import native
from .errors import KvError


@dataclass(frozen=True)
class ArenaRef:
    """What the node says of its arena: plain data, that may travel to other processes."""

    path: str
    bytes: int
    id: int
    #: Who maps it holds this byte of the file beside it, so that the node sees the end of all copies. 0: there is no such file.
    lock_byte: int = 0

    @property
    def lock_path(self) -> str:
        return f"{self.path}.lock"

    def within(self, folder: str | None) -> ArenaRef:
        """The same file where this process sees its folder: in another container that may be another place."""
        return self if folder is None else replace(self, path=str(Path(folder) / Path(self.path).name))


@dataclass(frozen=True)
class Part:
    """A run of a payload in the engine's memory: of block b, row r, ``[base + b * stride + r * row_stride, + row_bytes)``."""

    base: int
    stride: int
    row_bytes: int
    rows: int = 1
    row_stride: int = 0


@dataclass(frozen=True)
class Copied:
    """What an ended job found, block by block."""

    #: XXH3-64 of what was read.
    checksums: array[int]
    #: GOOD, BAD or MISSED of `native`: copied, and of a load what was expected; other bytes; not copied, by a GPU that was late.
    good: bytes

    @property
    def bad(self) -> list[int]:
        """Indexes of the blocks that may not be used."""
        return unfit(self.good)

    @property
    def corrupt(self) -> list[int]:
        """Of these, the blocks whose bytes were read and are others. Of what a GPU has not copied nothing is known."""
        return [i for i, flag in enumerate(self.good) if flag == native.BAD] if native.BAD in self.good else []


@dataclass(frozen=True)
class CopyCounts:
    arenas: int
    layouts: int
    jobs: int
    quarantined: int
    loaded_blocks: int
    loaded_bytes: int
    stored_blocks: int
    stored_bytes: int
    checked_blocks: int
    bad_blocks: int
    pinned_bytes: int
    pins_refused: int
    bounced_bytes: int
    late_blocks: int
    hung: int
    standing: int


def _u64s(values: Sequence[int]) -> tuple[object, array[int]]:
    """For the duration of a call: the second keeps the first alive."""
    held = values if isinstance(values, array) and values.typecode == "Q" else array("Q", values)
    return (ctypes.c_uint64 * len(held)).from_buffer(held), held


class Arena:
    """A mapped arena. Close it when its session has ended: it is unmapped when the last copy has."""

    def __init__(self, copies: Copies, ref: ArenaRef, number: int) -> None:
        self.ref = ref
        self.number = number
        self._copies = copies

    def refusal(self, device: int) -> str | None:
        """None: not pinned for that GPU yet, copies go over a buffer. "": it is. Else why it will not be."""
        state = self._copies._call("kvtier_pinning", self.number, device)
        return None if state == 0 else "" if state == 1 else self._copies._line()

    def close(self) -> bool:
        """True when it is unmapped now, and not later. Idempotent."""
        number, self.number = self.number, 0
        return number == 0 or self._copies._unmap(number)


class Layout:
    """Where a block's payload lies in the engine's memory, which stays as long as this."""

    def __init__(self, copies: Copies, number: int, payload_bytes: int, blocks: int) -> None:
        self.number = number
        self.payload_bytes = payload_bytes
        self.blocks = blocks
        self._copies = copies

    def close(self) -> None:
        number, self.number = self.number, 0
        if number:
            self._copies._call("kvtier_forget_layout", number)


class Mark:
    """Where a stream of the engine stood. Close it when the copies that wait for it have begun."""

    def __init__(self, copies: Copies, number: int) -> None:
        self.number = number
        self._copies = copies

    def close(self) -> None:
        number, self.number = self.number, 0
        if number:
            self._copies._call("kvtier_forget_mark", number)


class Job:
    """A copy under way. Take it or abandon it."""

    def __init__(self, copies: Copies, number: int, count: int) -> None:
        self._copies = copies
        self._number = number
        self.count = count

    def ended(self, wait_s: float = 0.0) -> bool:
        """Whether nothing of it is under way any more; waits no longer than it is told. Once true it stays true."""
        try:
            if wait_s <= 0:
                return self._copies._at_once("kvtier_wait", self._number, 0) == 1
            return self._copies._call("kvtier_wait", self._number, int(wait_s * 1e6)) == 1
        except KvError as error:
            if error.code == "UNKNOWN":  # an abandoned one that has ended, or a taken one
                return True
            raise

    def take(self) -> Copied:
        """Its result, once. KvError BUSY while it runs."""
        sums = array("Q", bytes(8 * self.count))
        good = bytearray(self.count)
        c_sums, _ = _u64s(sums)
        c_good = (ctypes.c_uint8 * self.count).from_buffer(good)
        self._copies._call("kvtier_take", self._number, c_sums, c_good, self.count)
        del c_sums, c_good
        return Copied(sums, bytes(good))

    def take_good(self) -> bytearray:
        """As `take`, for those who need no checksums: it is called on the loop of the engine."""
        good = bytearray(self.count)
        place = ctypes.c_uint8.from_buffer(good)
        self._copies._at_once("kvtier_take", self._number, None, ctypes.byref(place), self.count)
        return good

    def take_bad(self) -> list[int]:
        return unfit(self.take_good())

    def abandon(self) -> bool:
        """Nobody wants it. True: blocks and slots are free now. False: when ``ended`` says so."""
        try:
            return self._copies._call("kvtier_abandon", self._number) == 1
        except KvError as error:
            if error.code == "UNKNOWN":
                return True
            raise


class Copies:
    """The library's threads, arenas and layouts, of this process. Not of its forks: each opens its own."""

    def __init__(
        self,
        *,
        load_threads: int = 2,
        store_threads: int = 1,
        store_niceness: int = 10,
        max_jobs: int = 4096,
        device_deadline_s: float = 5.0,
    ) -> None:
        """``device_deadline_s``: of each wait for a GPU; what an engine has enqueued itself may take twelve times as long."""
        self._library = native.library()
        self._held = native.at_once()
        options = native.Options(load_threads, store_threads, store_niceness, max_jobs, int(device_deadline_s * 1e3))
        handle = self._library.kvtier_open(ctypes.byref(options))
        if not handle:
            native.check(-2)
        self._handle: int | None = handle
        self._pid = os.getpid()
        self._finalizer = weakref.finalize(self, _close, self._library, handle, self._pid)

    def map(self, ref: ArenaRef, folder: str | None = None) -> Arena:
        """Maps an arena; ``folder``: where this process sees the arenas' folder. KvError PROTOCOL when it is another one, SETUP."""
        seen = ref.within(folder)
        return Arena(self, ref, self._call("kvtier_map", seen.path.encode(), seen.bytes, seen.id, seen.lock_byte))

    def layout(self, parts: Sequence[Part], blocks: int, device: int | None = None) -> Layout:
        """A block's payload is its parts one after another; blocks are 0 to ``blocks`` - 1. ``device``: a GPU's, by CUDA's number."""
        listed = (native.Part * len(parts))(*[native.Part(p.base, p.stride, p.rows, p.row_stride, p.row_bytes) for p in parts])
        if device is None:
            number = self._call("kvtier_layout", listed, len(parts), blocks)
        else:
            number = self._call("kvtier_device_layout", device, listed, len(parts), blocks)
        return Layout(self, number, self._library.kvtier_payload_bytes(self._handle, number), blocks)

    def mark(self, device: int, stream: int) -> Mark:
        """Where the engine's stream (a CUstream) stands now: copies that are given it begin behind what was enqueued there."""
        return Mark(self, self._call("kvtier_mark", device, stream or None))

    def peek(self, device: int, address: int, size: int) -> bytes:
        """A few bytes of a GPU's memory. Waits."""
        out = ctypes.create_string_buffer(size)
        self._call("kvtier_peek", device, out, address, size)
        return out.raw

    def poke(self, device: int, address: int, data: bytes) -> None:
        self._call("kvtier_poke", device, address, data, len(data))

    def load(
        self,
        arena: Arena,
        layout: Layout,
        blocks: Sequence[int],
        offsets: Sequence[int],
        checksums: Sequence[int],
        after: Mark | None = None,
    ) -> Job:
        """Arena to engine. Where the checksum is another one, the block is bad, and what it holds means nothing."""
        _same(blocks, offsets, checksums)
        (ids, _a), (places, _b), (sums, _c) = _u64s(blocks), _u64s(offsets), _u64s(checksums)
        return self._job("kvtier_load", len(blocks), arena.number, layout.number, len(blocks), ids, places, sums, _at(after))

    def store(
        self, arena: Arena, layout: Layout, blocks: Sequence[int], offsets: Sequence[int], after: Mark | None = None
    ) -> Job:
        """Engine to arena; the result's checksums go into the commit."""
        _same(blocks, offsets)
        (ids, _a), (places, _b) = _u64s(blocks), _u64s(offsets)
        return self._job("kvtier_store", len(blocks), arena.number, layout.number, len(blocks), ids, places, _at(after))

    def check(self, arena: Arena, payload_bytes: int, offsets: Sequence[int], checksums: Sequence[int]) -> Job:
        """Reads slots and compares; copies nothing."""
        _same(offsets, checksums)
        (places, _b), (sums, _c) = _u64s(offsets), _u64s(checksums)
        return self._job("kvtier_check", len(offsets), arena.number, payload_bytes, len(offsets), places, sums)

    def counts(self) -> CopyCounts:
        counts = native.Counts()
        self._library.kvtier_count(self._live(), ctypes.byref(counts))
        return CopyCounts(**{field[0]: int(getattr(counts, field[0])) for field in native.Counts._fields_})

    def close(self, wait_s: float = 5.0) -> bool:
        """Ends the threads. False: not in time; what copies that still ran use is left to the end of the process. Idempotent."""
        handle, self._handle = self._handle, None
        if handle is None or not self._finalizer.detach():
            return True
        return self._pid == os.getpid() and self._library.kvtier_close(handle, int(wait_s * 1e6)) == 1

    def _live(self) -> int:
        if self._handle is None:
            raise KvError("CANCELLED", "copies: closed")
        if self._pid != os.getpid():
            raise KvError("CONFIG", "copies: opened before a fork; open them in the process that copies")
        return self._handle

    def _call(self, name: str, *arguments: object) -> int:
        return native.check(getattr(self._library, name)(self._live(), *arguments))

    def _at_once(self, name: str, *arguments: object) -> int:
        return native.check(getattr(self._held, name)(self._live(), *arguments))

    def _line(self) -> str:
        said: bytes = self._library.kvtier_last_error()
        return said.decode(errors="replace")

    def _job(self, name: str, count: int, *arguments: object) -> Job:
        return Job(self, self._call(name, *arguments), count)

    def _unmap(self, number: int) -> bool:
        return self._handle is None or self._call("kvtier_unmap", number) == 1


def unfit(good: bytes | bytearray) -> list[int]:
    """Of blocks' flags, the indexes of those that may not be used."""
    return [] if good.count(native.GOOD) == len(good) else [i for i, flag in enumerate(good) if flag != native.GOOD]


def _at(mark: Mark | None) -> int:
    return 0 if mark is None else mark.number


def _close(library: ctypes.CDLL, handle: int, pid: int) -> None:
    if pid == os.getpid():
        library.kvtier_close(handle, 1_000_000)


def _same(first: Sequence[int], *others: Sequence[int]) -> None:
    if not first or any(len(other) != len(first) for other in others):
        raise KvError("CONFIG", "a copy names at least one block, and one offset and checksum for each")
