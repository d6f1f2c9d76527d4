"""The session link's messages and frames: 4 bytes of length, little-endian, then one protobuf message (docs/formats.md).

The classes are made from descriptors, in a pool of our own: no generated code that asks for one version of protobuf, and no quarrel
with others that register messages of the same name. Everything that is not typed is in this file.
"""

from __future__ import annotations

import base64
import struct
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory  # type: ignore[import-untyped]

from ._generated.session import DESCRIPTORS
from .errors import KvError

PROTOCOL = 1
MAX_FRAME_BYTES = 16 << 20
#: Hashes in one request; the node refuses more.
MAX_HASHES = 65_536
RESERVED, HELD, BUSY, REFUSED = 1, 2, 3, 4

_LENGTH = struct.Struct("<I")


def _classes() -> tuple[Any, Any]:
    files = descriptor_pb2.FileDescriptorSet.FromString(base64.b64decode(DESCRIPTORS))
    pool = descriptor_pool.DescriptorPool()
    for file in files.file:
        pool.AddSerializedFile(file.SerializeToString())
    client = pool.FindMessageTypeByName("kvtier.v1.ClientFrame")
    server = pool.FindMessageTypeByName("kvtier.v1.ServerFrame")
    if hasattr(message_factory, "GetMessageClass"):
        return message_factory.GetMessageClass(client), message_factory.GetMessageClass(server)
    factory = message_factory.MessageFactory(pool)  # protobuf before 4.22
    return factory.GetPrototype(client), factory.GetPrototype(server)


ClientFrame, ServerFrame = _classes()


def encode(request_id: int, kind: str, fields: dict[str, Any]) -> bytes:
    """The bytes of a frame. KvError PROTOCOL when they are too many."""
    frame = ClientFrame(id=request_id, **{kind: fields})
    message: bytes = frame.SerializeToString()
    if len(message) > MAX_FRAME_BYTES:
        raise KvError("PROTOCOL", f"{kind}: {len(message)} bytes do not fit a frame; send less at once")
    return _LENGTH.pack(len(message)) + message


class FrameReader:
    """Cuts a stream into messages. After a KvError the stream is lost."""

    def __init__(self) -> None:
        self._held = bytearray()

    def push(self, chunk: bytes | memoryview) -> list[Any]:
        """The messages that are whole now, in order."""
        held = self._held
        held += chunk
        frames: list[Any] = []
        at = 0
        while len(held) - at >= 4:
            (length,) = _LENGTH.unpack_from(held, at)
            if not 1 <= length <= MAX_FRAME_BYTES:
                raise KvError("PROTOCOL", f"the cache node announces a frame of {length} bytes; use one version of kvtier")
            if len(held) - at - 4 < length:
                break
            try:
                frames.append(ServerFrame.FromString(bytes(held[at + 4 : at + 4 + length])))
            except Exception as error:
                raise KvError("PROTOCOL", f"the cache node sent no message ({error})") from error
            at += 4 + length
        if at:
            del held[:at]
        return frames
