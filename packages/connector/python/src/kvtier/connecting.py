"""A connection to the cache node, once it is known whose process serves there.

Invariant: not a byte is sent to a process of a user that is not trusted; the wait is bounded.
"""

from __future__ import annotations

import errno
import grp
import os
import socket
import stat
import struct

from .errors import KvError

CONNECT_TIMEOUT_S = 2.0


def group_id(group: int | str | None) -> int | None:
    """KvError CONFIG when the system knows no group of that name."""
    if not isinstance(group, str):
        return group
    if group.isdecimal():
        return int(group)
    try:
        return grp.getgrnam(group).gr_gid
    except KeyError as error:
        raise KvError("CONFIG", f'the system has no group "{group}"; give its number, which containers share') from error


def connect(path: str, group: int | None = None) -> socket.socket:
    """A connection to a node of our own user, root, or of the user whose folder of ``group`` it is. KvError DISCONNECTED when nobody
    serves, SETUP when it is another's."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.settimeout(CONNECT_TIMEOUT_S)
        connection.connect(path)
        owner = _check_folder(path, group)
        _check_server(connection, path, owner)
        connection.setblocking(False)
        return connection
    except KvError:
        connection.close()
        raise
    except OSError as error:
        connection.close()
        if error.errno in (errno.EACCES, errno.EPERM, errno.ENAMETOOLONG) or "too long" in str(error):
            remedy = "run engine and node as one user, or name a group that both are in"
            raise KvError("SETUP", f"{path}: cannot be reached ({error}); {remedy}") from error
        raise KvError("DISCONNECTED", f"{path}: no cache node ({error}); it is tried again", retry=True) from error


def _check_folder(path: str, group: int | None) -> int:
    """Whoever binds a path first is found there: its folder is ours, root's or of the group, and only its owner may write to it. Gives back
    whose process may serve there besides our own and root's."""
    folder = os.path.dirname(os.path.abspath(path))
    found = os.stat(folder)
    ours = found.st_uid in (0, os.geteuid())
    if not ours and found.st_gid != group:
        raise KvError("SETUP", f"{folder}: belongs to user {found.st_uid}, who could put another socket there; use a folder of your own")
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise KvError("SETUP", f"{folder}: others may write there; choose a private folder for the socket, or chmod go-w it")
    return found.st_uid if found.st_gid == group else os.geteuid()


def _check_server(connection: socket.socket, path: str, owner: int) -> None:
    pid, uid, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    if uid not in (0, os.geteuid(), owner):
        raise KvError("SETUP", f"{path}: is served by a process of user {uid} (pid {pid}), not by ours; choose a private folder")
