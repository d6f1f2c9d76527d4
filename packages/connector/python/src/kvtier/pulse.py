"""The node's pulse, behind its table of held blocks (docs/formats.md): a thread of the node's beats, whatever its event loop has to do."""

from __future__ import annotations

import mmap
import struct

_MAGIC = b"kvbeat1\0"
_WORDS = struct.Struct("<II")
PULSE_BYTES = len(_MAGIC) + _WORDS.size


class Pulse:
    """For one link: a beat is told once."""

    __slots__ = ("_at", "_beats", "_bytes")

    def __init__(self, mapped: mmap.mmap, at: int) -> None:
        self._bytes = mapped
        self._at = at + len(_MAGIC)
        self._beats = 0

    @staticmethod
    def at(mapped: mmap.mmap, at: int) -> Pulse | None:
        """None: of an older node."""
        whole = len(mapped) >= at + PULSE_BYTES and mapped[at : at + len(_MAGIC)] == _MAGIC
        return Pulse(mapped, at) if whole else None

    def still_s(self) -> float | None:
        """How long the present turn of the node's event loop has gone on, less what it waited for a processor. None: no beat since the last
        call."""
        beats, still_ms = _WORDS.unpack_from(self._bytes, self._at)
        if beats == self._beats:
            return None
        self._beats = beats
        return float(still_ms) / 1e3
