"""What connector_gpu.py needs of torch, with tensors in the memory of the driver's stand-in (packages/connector/python/tests/standin.py), which
the CPU reads and writes at once: no stream is ever behind."""
from __future__ import annotations

import contextlib
import ctypes
import math
import os
import types
from collections.abc import Iterator, Sequence
from typing import Any

import engine_memory
from standin import Driver

DRIVER = Driver()
engine_memory.ALLOCATOR = DRIVER

__version__ = "0"
uint8, bfloat16 = "torch.uint8", "torch.bfloat16"
_BYTES = {uint8: 1, bfloat16: 2}


class Tensor(engine_memory.Tensor):
    """All of its elements one after another."""

    def __init__(self, storage: engine_memory.Storage, shape: Sequence[int], dtype: str) -> None:
        super().__init__(storage, shape, engine_memory.contiguous(shape), 0, _BYTES[dtype])
        self.dtype = dtype

    @property
    def size(self) -> int:
        return math.prod(self.shape) * self._item

    def view(self, to: Any) -> Tensor:
        if isinstance(to, str):
            return Tensor(self._storage, (self.size // _BYTES[to],), to)
        assert math.prod(to) == math.prod(self.shape)
        return Tensor(self._storage, to, self.dtype)

    def copy_(self, other: Tensor, non_blocking: bool = False) -> Tensor:
        assert self.size == other.size
        ctypes.memmove(self.data_ptr(), other.data_ptr(), self.size)
        return self

    def fill_(self, value: int) -> Tensor:
        ctypes.memset(self.data_ptr(), value, self.size)
        return self

    def zero_(self) -> Tensor:
        return self.fill_(0)


def empty(count: int, dtype: str, device: str = "cpu", pin_memory: bool = False) -> Tensor:
    return Tensor(engine_memory.Storage(count * _BYTES[dtype]), (count,), dtype)


zeros = empty  # a new Storage is zeros


def randint(low: int, high: int, shape: tuple[int], dtype: str, device: str) -> Tensor:
    made = empty(shape[0], dtype)
    ctypes.memmove(made.data_ptr(), os.urandom(made.size), made.size)
    return made


def equal(a: Tensor, b: Tensor) -> bool:
    return ctypes.string_at(a.data_ptr(), a.size) == ctypes.string_at(b.data_ptr(), b.size)


class _Graph:
    def replay(self) -> None:
        pass


@contextlib.contextmanager
def _graph(_: _Graph) -> Iterator[None]:
    DRIVER.capture()
    try:
        yield
    finally:
        broken = DRIVER.captured()
    if broken:
        raise RuntimeError(f"{broken} calls of other threads ended the capture")


def _stream(_: int) -> types.SimpleNamespace:
    held = DRIVER.held_stream()
    held.let_go()
    return types.SimpleNamespace(cuda_stream=held.stream)


cuda = types.SimpleNamespace(
    is_available=lambda: True,
    current_stream=lambda device: types.SimpleNamespace(cuda_stream=0),
    synchronize=lambda device: None,
    Stream=_stream,
    CUDAGraph=_Graph,
    graph=_graph,
    _sleep=lambda cycles: None,
)
