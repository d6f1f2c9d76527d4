"""The lock by which the node sees that an engine's processes have ended, where it cannot see processes: a byte of the file beside the
arena, held by every process that copies (``Hold`` in proto/kvtier/v1/session.proto). The kernel ends it with the process.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import struct
import threading

#: struct flock of 64-bit Linux: type, whence, start, length, pid.
_FLOCK = struct.Struct("@hhqqi4x")

_lock = threading.Lock()
_own: tuple[int, int] = (0, 0)
#: Descriptors of `hold`, with the file of each: who closes one does not say so, and its number may be another file's by now.
_holds: dict[int, tuple[int, int]] = {}


def _end_in_child() -> None:
    """A forked child shares open files, and with them their locks: it would hold them for as long as it lives. Not closed: whoever closes
    them there, as here, must not close another file."""
    nothing = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    for fd, file in _holds.items():
        try:
            found = os.fstat(fd)
        except OSError:
            continue
        if (found.st_dev, found.st_ino) == file:
            os.dup2(nothing, fd, inheritable=False)
    os.close(nothing)
    _holds.clear()


os.register_at_fork(after_in_child=_end_in_child)


def own_byte() -> int:
    """Of this process, for all of its sessions: it names the engine, and travels to the processes that copy for it."""
    global _own
    with _lock:
        if _own[0] != os.getpid():
            _own = (os.getpid(), 1 + secrets.randbelow((1 << 48) - 1))
        return _own[1]


def session_byte(byte: int) -> int:
    """Beside a process' own, what says that its session has not ended: who maps the arena for it, and has no session itself, looks at it."""
    return byte + 1


def hold(path: str, byte: int) -> int | None:
    """A descriptor that holds the byte until it is closed; None where that cannot be."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return None
    found = os.fstat(fd)
    _holds[fd] = (found.st_dev, found.st_ino)
    try:
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _FLOCK.pack(fcntl.F_RDLCK, os.SEEK_SET, byte, 1, 0))
    except OSError:
        os.close(fd)
        return None
    return fd


def watch(path: str) -> int | None:
    """A descriptor to ask `is_held` with, also when the node has removed the file; None where the file may not be read.

    @raises FileNotFoundError where it has removed it already
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        raise
    except OSError:
        return None
    _holds.pop(fd, None)
    return fd


def is_held(fd: int, byte: int) -> bool:
    """Whether somebody holds it: by a descriptor of its own. What cannot be asked counts as held."""
    try:
        answer = fcntl.fcntl(fd, fcntl.F_OFD_GETLK, _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, byte, 1, 0))
        return bool(_FLOCK.unpack(answer)[0] != fcntl.F_UNLCK)
    except OSError:
        return True
