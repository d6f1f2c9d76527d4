"""CUDA's driver on the emulator (packages/engine/cuda/checks/standin_cuda.cc): the library finds it by KVTIER_CUDA_DRIVER, as it
finds the real one; tests allocate device memory and inject faults by it. What is there can be read by the CPU."""

from __future__ import annotations

import ctypes
import os
from ctypes import byref, c_int, c_size_t, c_void_p
from pathlib import Path

PATH = Path(__file__).resolve().parents[4] / "build/cuda-emulated/libstandin_cuda.so"
OUT_OF_MEMORY = 2
#: What a driver says of pinning under confidential computing.
NOT_SUPPORTED = 801


class Driver:
    def __init__(self) -> None:
        os.environ["KVTIER_CUDA_DRIVER"] = str(PATH)
        # One queue for each stream: a stream that stands still holds up no other.
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
        self._library = ctypes.CDLL(str(PATH))
        self._library.kvtier_standin_registered_bytes.restype = c_size_t
        self._library.kvtier_standin_pinned_buffers.restype = c_size_t
        self._library.kvtier_standin_held_stream.restype = c_void_p
        self._context = c_void_p()
        assert self._library.cuDevicePrimaryCtxRetain(byref(self._context), 0) == 0

    def current(self) -> None:
        """What an engine's runtime has done on every thread of its own."""
        assert self._library.cuCtxSetCurrent(self._context) == 0

    def context_of_thread(self) -> bool:
        return self._library.cuCtxGetDevice(byref(c_int())) == 0

    def allocate(self, size: int) -> int:
        place = c_void_p()
        self.current()
        assert self._library.cuMemAlloc_v2(byref(place), c_size_t(size)) == 0
        assert place.value is not None
        return place.value

    def free(self, place: int) -> None:
        assert self._library.cuMemFree_v2(c_void_p(place)) == 0

    @property
    def free_bytes(self) -> int:
        free, total = c_size_t(), c_size_t()
        self.current()
        assert self._library.cuMemGetInfo_v2(byref(free), byref(total)) == 0
        return free.value

    def break_down(self) -> None:
        """The next operation is an illegal access, after which every call of the process fails, until `heal`."""
        self._library.kvtier_standin_fault(2)

    def hang(self) -> None:
        """The next operation never ends, until `heal`."""
        self._library.kvtier_standin_fault(1)

    def heal(self) -> None:
        self._library.kvtier_standin_fault(0)

    def refuse_pinning(self, status: int) -> None:
        self._library.kvtier_standin_refuse_pinning(status)

    def refuse_memory(self, status: int) -> None:
        self._library.kvtier_standin_refuse_memory(status)

    def capture(self) -> None:
        """The engine captures a graph, for all threads that ask for no other mode, until `captured`."""
        self._library.kvtier_standin_capturing(1)

    def captured(self) -> int:
        """How many calls of such threads have ended the capture."""
        return int(self._library.kvtier_standin_capturing(0))

    def capture_mode(self) -> int:
        """This thread's; 0, as threads begin: another thread's capture is in its way, and it in that capture's."""
        mode = c_int(0)
        assert self._library.cuThreadExchangeStreamCaptureMode(byref(mode)) == 0
        was = mode.value
        assert self._library.cuThreadExchangeStreamCaptureMode(byref(mode)) == 0
        return was

    @property
    def registered_bytes(self) -> int:
        return int(self._library.kvtier_standin_registered_bytes())

    @property
    def pinned_buffers(self) -> int:
        """Of memory that is pinned from its beginning."""
        return int(self._library.kvtier_standin_pinned_buffers())

    @property
    def giving_back(self) -> int:
        """Calls that give memory back and wait for the GPU."""
        return int(self._library.kvtier_standin_giving_back())

    def held_stream(self) -> HeldStream:
        gate = c_void_p()
        return HeldStream(self._library, int(self._library.kvtier_standin_held_stream(byref(gate))), gate)


class HeldStream:
    """An engine's stream that stands still until it is let go."""

    def __init__(self, library: ctypes.CDLL, stream: int, gate: c_void_p) -> None:
        self._library = library
        self._gate = gate
        self.stream = stream

    def set(self, place: int, value: int, size: int) -> None:
        assert self._library.kvtier_standin_set(c_void_p(self.stream), c_void_p(place), value, c_size_t(size)) == 0

    def let_go(self) -> None:
        self._library.kvtier_standin_open(self._gate)
