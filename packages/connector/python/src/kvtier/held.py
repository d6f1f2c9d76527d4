"""The node's table of held blocks, in the file beside its arena (docs/formats.md): what it says is not held is not asked for, nor what
lies in the arena alone.

A byte of it may say too much, and never too little. So that it stays so here, whatever is not as it must be is no table, and the node
is asked: another form, a file that is too short, a node that did not confirm that it sees our lock in the very file that we read.
"""

from __future__ import annotations

import mmap
import os
import struct

from .pulse import PULSE_BYTES, Pulse

_MAGIC = b"kvheld1\0"
_HEADER = struct.Struct("<8sII")
_WORD = struct.Struct("<I")
#: More blocks of a chain are not looked at. The engine's loop does, and each costs it 100 ns.
MAX_LOOKS = 256
_ARENA = 4


class HeldTable:
    """Mapped until the last user of this object has gone."""

    __slots__ = ("_bytes", "_mask", "_tag", "pulse")

    def __init__(self, mapped: mmap.mmap, buckets: int, tag: int) -> None:
        #: Of the node that writes it; None: it has none.
        self.pulse = Pulse.at(mapped, _HEADER.size + buckets)
        self._bytes = mapped
        self._mask = buckets - 1
        self._tag = tag

    @staticmethod
    def open(lock_path: str, locked_fd: int, tag: int) -> HeldTable | None:
        """``locked_fd``: of the same file, opened by itself: a mapping keeps what it is made from open, and a lock with it. ``tag``: of the
        session's namespace, as the node says it."""
        try:
            fd = os.open(lock_path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:
            return None
        try:
            magic, buckets, zero = _HEADER.unpack(os.pread(fd, _HEADER.size, 0))
            is_power = buckets > 0 and buckets & (buckets - 1) == 0
            if magic != _MAGIC or zero != 0 or not is_power:
                return None
            if not os.path.sameopenfile(fd, locked_fd):
                return None
            # ValueError for a file that is shorter.
            table = _HEADER.size + buckets
            size = table if os.fstat(fd).st_size < table + PULSE_BYTES else table + PULSE_BYTES
            return HeldTable(mmap.mmap(fd, size, mmap.MAP_SHARED, mmap.PROT_READ), buckets, tag)
        except (OSError, ValueError, struct.error):
            return None
        finally:
            os.close(fd)

    def lacks(self, hashes: bytes, hash_bytes: int, gaps: bool) -> bool:
        """Nobody holds anything of this chain: not its first block, or, where it may begin behind a gap, none of it."""
        table, tag, mask, at = self._bytes, self._tag, self._mask, _HEADER.size
        if not gaps:
            none: bool = table[at + ((_WORD.unpack_from(hashes)[0] ^ tag) & mask)] == 0
            return none
        if len(hashes) > MAX_LOOKS * hash_bytes:
            return False
        for (word,) in struct.iter_unpack(f"<I{hash_bytes - _WORD.size}x", hashes):
            if table[at + ((word ^ tag) & mask)]:
                return False
        return True

    def in_arena(self, hashes: bytes, hash_bytes: int, gaps: bool) -> tuple[tuple[int, int], ...] | None:
        """What of this chain lies in the arena, as [first, end), where all that is held of it does; without ``gaps`` from its first block on.
        None: it is not told."""
        if len(hashes) > MAX_LOOKS * hash_bytes:
            return None
        table, tag, mask, at = self._bytes, self._tag, self._mask, _HEADER.size
        ranges: list[tuple[int, int]] = []
        first, block = -1, 0
        for (word,) in struct.iter_unpack(f"<I{hash_bytes - _WORD.size}x", hashes):
            flags = table[at + ((word ^ tag) & mask)]
            if flags & _ARENA:
                if first < 0:
                    first = block
            elif flags:
                return None
            elif first >= 0:
                ranges.append((first, block))
                first = -1
                if not gaps:
                    break
            elif not gaps:
                break
            block += 1
        if first >= 0:
            ranges.append((first, block))
        return tuple(ranges)
