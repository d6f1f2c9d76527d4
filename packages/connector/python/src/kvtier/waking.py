"""An eventfd by which any thread wakes the session's."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable


def _waker() -> Callable[[int, int], object]:
    """Writes to an eventfd. Python's own lets go of the interpreter meanwhile, and the thread that wakes takes it: whoever posts a request,
    an engine's loop, would get it back when that request is encoded and sent."""
    try:
        write = ctypes.PyDLL(None).eventfd_write
    except (OSError, AttributeError):  # another C library
        return os.eventfd_write
    write.argtypes = (ctypes.c_int, ctypes.c_uint64)
    return write


_eventfd_write = _waker()


def wake(fd: int) -> None:
    _eventfd_write(fd, 1)


def unwake(fd: int) -> None:
    try:
        os.eventfd_read(fd)
    except BlockingIOError:
        pass
