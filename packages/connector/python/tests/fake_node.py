"""A node that says what a test makes it say."""

from __future__ import annotations

import os
import socket
import struct
import tempfile
import threading
from collections.abc import Callable
from typing import Any

from kvtier.protocol import ClientFrame, ServerFrame

ARENA_BYTES = 1 << 20


def frame(request_id: int, kind: str, epoch: int = 7, **fields: Any) -> bytes:
    message = ServerFrame(id=request_id, boot_epoch=epoch, **{kind: fields}).SerializeToString()
    return struct.pack("<I", len(message)) + message


def attached(request: Any, **changes: Any) -> bytes:
    fields = {
        "session": b"s" * 16,
        "arena_path": "/dev/shm/none",
        "arena_bytes": ARENA_BYTES,
        "header_bytes": 256,
        "arena_id": 5,
        **changes,
    }
    return frame(request.id, "attached", **fields)


class FakeNode:
    """Answers each request with what ``answer`` makes of it: bytes to send; none closes the connection."""

    def __init__(self, answer: Callable[[Any], list[bytes]]) -> None:
        self.folder = tempfile.mkdtemp(prefix="kvtier-lies-")
        self.path = f"{self.folder}/node.sock"
        self._answer = answer
        self._server = socket.socket(socket.AF_UNIX)
        self._server.bind(self.path)
        self._server.listen(8)
        self.connections = 0
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while True:
            try:
                connection, _ = self._server.accept()
            except OSError:
                return
            self.connections += 1
            with connection:
                self._serve(connection)

    def _serve(self, connection: socket.socket) -> None:
        held = b""
        while True:
            try:
                chunk = connection.recv(1 << 16)
                held += chunk
                if not chunk:
                    return
                while len(held) >= 4 and len(held) >= 4 + struct.unpack_from("<I", held)[0]:
                    (length,) = struct.unpack_from("<I", held)
                    request = ClientFrame.FromString(held[4 : 4 + length])
                    held = held[4 + length :]
                    answers = self._answer(request)
                    if not answers:
                        return
                    for answer in answers:
                        connection.sendall(answer)
            except OSError:
                return

    def close(self) -> None:
        self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()
        self._thread.join(10)
        os.unlink(self.path)
        os.rmdir(self.folder)
