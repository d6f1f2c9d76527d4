"""An engine's KV memory for the contract test: tensors by duck type over plain bytes, in the layouts that engines have.

What the engine writes goes through the tensor's own indexes (block, token, head, side), never through what the connector makes of its
strides, so that a wrong reading of a layout is a wrong token.
"""

from __future__ import annotations

import ctypes
import itertools
import math
import mmap
import os
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


#: Of a GPU: who allocates there (standin.Driver). None: the CPU's.
ALLOCATOR: Any = None


class Storage:
    def __init__(self, size: int) -> None:
        self.size = size
        if ALLOCATOR is None:
            self.buffer = ctypes.create_string_buffer(size)
            self._place = ctypes.addressof(self.buffer)
        else:
            self._place = ALLOCATOR.allocate(size)
            ctypes.memset(self._place, 0, size)

    def data_ptr(self) -> int:
        return self._place

    def nbytes(self) -> int:
        return self.size


class MappedStorage(Storage):
    """One range of addresses over two allocations, mapped next to each other: as expandable segments are. Of the CPU only."""

    def __init__(self, size: int) -> None:
        self.size = size
        page = mmap.PAGESIZE
        pages = max(2, -(-size // page))
        libc = ctypes.CDLL(None, use_errno=True)
        libc.mmap.restype = ctypes.c_void_p
        libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
        libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
        self._place = _mapped(libc.mmap(None, pages * page, 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0))
        at = self._place
        for count in (pages // 2, pages - pages // 2):
            fd = os.memfd_create("kvtier-test")
            os.ftruncate(fd, count * page)
            protection = mmap.PROT_READ | mmap.PROT_WRITE
            assert _mapped(libc.mmap(at, count * page, protection, mmap.MAP_SHARED | _MAP_FIXED, fd, 0)) == at
            os.close(fd)
            at += count * page
        #: Where one ends and the other begins.
        self.seam = self._place + pages // 2 * page
        weakref.finalize(self, libc.munmap, self._place, pages * page)


_MAP_FIXED = 0x10


def _mapped(place: int | None) -> int:
    assert place is not None and place != ctypes.c_void_p(-1).value
    return place


@dataclass(frozen=True)
class Device:
    type: str = "cpu"
    index: int | None = None


class Tensor:
    """Just as much of a tensor as a connector looks at."""

    def __init__(self, storage: Storage, shape: Sequence[int], strides: Sequence[int], offset: int = 0, item: int = 2) -> None:
        self._storage, self.shape, self._strides, self._offset, self._item = storage, tuple(shape), tuple(strides), offset, item
        self.dtype = "torch.bfloat16"
        self.device = Device() if ALLOCATOR is None else Device("cuda", 0)

    def stride(self) -> tuple[int, ...]:
        return self._strides

    def element_size(self) -> int:
        return self._item

    def data_ptr(self) -> int:
        return self._storage.data_ptr() + self._offset * self._item

    def untyped_storage(self) -> Storage:
        return self._storage

    def narrow(self, dimension: int, first: int, count: int) -> Tensor:
        shape = list(self.shape)
        shape[dimension] = count
        return Tensor(self._storage, shape, self._strides, self._offset + first * self._strides[dimension], self._item)

    def zero_(self) -> Tensor:
        for index in itertools.product(*(range(n) for n in self.shape[:-1])):
            place = self.place(*index, 0)
            if self._strides[-1] == 1:
                ctypes.memset(place, 0, self.shape[-1] * self._item)
            else:
                for i in range(self.shape[-1]):
                    ctypes.memset(place + i * self._strides[-1] * self._item, 0, self._item)
        return self

    def place(self, *index: int) -> int:
        return self.data_ptr() + sum(i * s for i, s in zip(index, self._strides)) * self._item


def contiguous(shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))


class LayerMemory:
    """One layer of one rank. A token's KV of one head is `2 * dim` elements, keys and values, wherever they lie."""

    def __init__(self, tensor: Tensor, axes: str, heads: int, dim: int, block_tokens: int) -> None:
        self.tensor, self.axes, self.heads, self.dim, self.block_tokens = tensor, axes, heads, dim, block_tokens
        # Kernels may take smaller blocks than the manager.
        self.kernel_tokens = tensor.shape[axes.index("n")]
        #: Of what was asked for once: nothing moves, and most of a test would be this sum.
        self._known: dict[tuple[int, int, int], list[tuple[int, int]]] = {}
        self._known_runs: dict[int, list[tuple[int, int]]] = {}

    def _places(self, block: int, token: int, head: int) -> list[tuple[int, int]]:
        known = self._known.get((block, token, head))
        if known is None:
            known = self._known[block, token, head] = self._sum(block, token, head)
        return known

    def _sum(self, block: int, token: int, head: int) -> list[tuple[int, int]]:
        small = self.block_tokens // self.kernel_tokens
        at = {"b": block * small + token // self.kernel_tokens, "n": token % self.kernel_tokens, "h": head, "d": 0}
        sides = 2 if "k" in self.axes else 1
        size = self.dim * (1 if "k" in self.axes else 2) * 2
        return [(self.tensor.place(*({**at, "k": side}[axis] for axis in self.axes)), size) for side in range(sides)]

    def write(self, block: int, token: int, head: int, data: bytes) -> None:
        at = 0
        for place, size in self._places(block, token, head):
            ctypes.memmove(place, data[at : at + size], size)
            at += size

    def read(self, block: int, token: int, head: int) -> bytes:
        return b"".join([ctypes.string_at(place, size) for place, size in self._places(block, token, head)])

    def poison(self, block: int) -> None:
        for place, size in self._runs(block):
            ctypes.memset(place, 0xDD, size)

    def _runs(self, block: int) -> list[tuple[int, int]]:
        """All bytes of a block, in as few pieces as they lie in."""
        runs = self._known_runs.get(block)
        if runs is None:
            runs = self._known_runs[block] = []
            whole = itertools.product(range(self.block_tokens), range(self.heads))
            for place, size in sorted(itertools.chain.from_iterable(self._sum(block, *at) for at in whole)):
                if runs and sum(runs[-1]) == place:
                    runs[-1] = (runs[-1][0], runs[-1][1] + size)
                else:
                    runs.append((place, size))
        return runs


#: How the layers of one group lie: name -> axes of a tensor, outermost first in its shape.
LAYOUTS = ("hnd", "nhd", "split", "kernel", "packed", "strided")


def make_layers(
    layout: str, names: Sequence[str], blocks: int, block_tokens: int, heads: int, dim: int
) -> dict[str, LayerMemory]:
    width = 2 * dim
    page = heads * block_tokens * width
    out: dict[str, LayerMemory] = {}
    if layout in ("packed", "strided"):
        storage = Storage(2 * len(names) * page * blocks + 64)
    for number, name in enumerate(names):
        if layout == "hnd":
            shape: tuple[int, ...] = (blocks, heads, block_tokens, width)
            tensor, axes = Tensor(Storage(2 * math.prod(shape)), shape, contiguous(shape)), "bhnd"
        elif layout == "mapped":
            # A block lies on the seam of two allocations.
            shape = (blocks, heads, block_tokens, width)
            mapped = MappedStorage(2 * math.prod(shape) + 64)
            tensor, axes = Tensor(mapped, shape, contiguous(shape), 16), "bhnd"
            assert (mapped.seam - tensor.data_ptr()) % (2 * page)
        elif layout == "nhd":
            # Logical (B, H, N, D), tokens outside of heads in memory.
            shape = (blocks, heads, block_tokens, width)
            strides = (page, width, heads * width, 1)
            tensor, axes = Tensor(Storage(2 * math.prod(shape)), shape, strides), "bhnd"
        elif layout == "split":
            shape = (2, blocks, block_tokens, heads, dim)
            tensor, axes = Tensor(Storage(2 * math.prod(shape)), shape, contiguous(shape)), "kbnhd"
        elif layout == "kernel":
            shape = (2 * blocks, heads, block_tokens // 2, width)
            tensor, axes = Tensor(Storage(2 * math.prod(shape)), shape, contiguous(shape)), "bhnd"
        elif layout == "packed":
            # All layers of a block side by side, in one storage.
            shape = (blocks, heads, block_tokens, width)
            strides = (len(names) * page, block_tokens * width, width, 1)
            tensor, axes = Tensor(storage, shape, strides, number * page), "bhnd"
        elif layout == "strided":
            # Blocks outermost, then heads, then layers: a block of a layer is one run a head.
            shape = (blocks, heads, block_tokens, width)
            run = block_tokens * width
            strides = (len(names) * page, len(names) * run, width, 1)
            tensor, axes = Tensor(storage, shape, strides, number * run), "bhnd"
        else:
            raise ValueError(layout)
        out[name] = LayerMemory(tensor, axes, heads, dim, block_tokens)
    return out
