"""Where the engine's KV lies: a CPU's memory, or that of one GPU, whose streams are torch's. torch is the engine's own: it is not
imported before there is a tensor of it in a GPU."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

from kvtier.copies import Copies, Mark
from kvtier.vllm.groups import Unsupported


class Device:
    """The CPU's memory."""

    kind = "cpu"
    #: CUDA's number; None: the CPU.
    ordinal: int | None = None

    def mark(self, copies: Copies) -> Mark | None:
        """Where the engine's stream stands now; None where there is none."""
        return None

    def settle(self) -> None:
        """What the engine has enqueued is done. Waits."""

    def read(self, copies: Copies, place: int, size: int) -> bytes:
        return ctypes.string_at(place, size)

    def write(self, copies: Copies, place: int, data: bytes) -> None:
        ctypes.memmove(place, data, len(data))


class Gpu(Device):
    kind = "cuda"

    def __init__(self, ordinal: int) -> None:
        self.ordinal: int = ordinal

    def mark(self, copies: Copies) -> Mark | None:
        import torch  # type: ignore[import-not-found]

        return copies.mark(self.ordinal, int(torch.cuda.current_stream(self.ordinal).cuda_stream))

    def settle(self) -> None:
        import torch

        torch.cuda.synchronize(self.ordinal)

    def read(self, copies: Copies, place: int, size: int) -> bytes:
        return copies.peek(self.ordinal, place, size)

    def write(self, copies: Copies, place: int, data: bytes) -> None:
        copies.poke(self.ordinal, place, data)


def device_of(tensors: Sequence[Any]) -> Device:
    """@raises Unsupported for what is neither"""
    places = {(str(getattr(tensor.device, "type", tensor.device)), getattr(tensor.device, "index", None)) for tensor in tensors}
    kinds = {kind for kind, _ in places}
    if kinds == {"cpu"}:
        return Device()
    if kinds != {"cuda"}:
        raise Unsupported(f"KV in the memory of {', '.join(sorted(kinds))}: libkvtier copies that of CPUs and of NVIDIA's GPUs")
    if len(places) > 1:
        raise Unsupported(f"KV of one rank in {len(places)} GPUs")
    ((_, index),) = places
    if index is None:
        raise Unsupported("KV in a GPU that does not say which")
    return Gpu(int(index))
