"""kvtier for inference engines in Python: the session with a cache node, and copies between its arena and the engine's memory.

    session = kvtier.Session("/run/kvtier/node.sock", namespace=..., payload_bytes=..., block_tokens=16)
    load = session.load(hashes, deadline_s=0.5)             # poll load.done, load.ready
    copies = kvtier.Copies()
    arena = copies.map(load.attachment.arena)
    layout = copies.layout([kvtier.Part(base, stride, row_bytes)], blocks)
    slots = load.slots()
    job = copies.load(arena, layout, block_ids, slots.offsets, slots.checksums)   # poll job.ended()
    load.release(corrupt=job.take().bad)
"""

from .attachment import Attachment
from .copies import Arena, ArenaRef, Copied, Copies, CopyCounts, Job, Layout, Mark, Part
from .errors import KvError
from .leases import Load, ReadyRange, Reservation, Slots
from .namespace import BlockLayout, Heads, Layers, Namespace, fingerprint
from .protocol import BUSY, HELD, MAX_HASHES, REFUSED, RESERVED
from .requests import Held, Request, TierState
from .session import Session

__version__ = "0.1.0"

__all__ = [
    "Arena",
    "ArenaRef",
    "Attachment",
    "BUSY",
    "BlockLayout",
    "Copied",
    "Copies",
    "CopyCounts",
    "HELD",
    "Heads",
    "Held",
    "Job",
    "KvError",
    "Layers",
    "Layout",
    "Mark",
    "Load",
    "MAX_HASHES",
    "Namespace",
    "Part",
    "REFUSED",
    "RESERVED",
    "ReadyRange",
    "Request",
    "Reservation",
    "Session",
    "Slots",
    "TierState",
    "fingerprint",
]
