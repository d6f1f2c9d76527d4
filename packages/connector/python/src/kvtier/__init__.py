"""kvtier for inference engines in Python: the session with a cache node, and copies between its arena and the engine's memory.

Beside what is exported here: one life of a session is `attachment.py`, what it lent `leases.py`, its connection `link.py`
(`connecting.py`, `waking.py`: who is at its other end); what the system refused is tried again by `retries.py` and `threads.py`.
For vLLM `vllm/connector.py` begins: `vllm/scheduler.py` claims (`claims.py`, by `lookups.py` and `staging.py`; `room.py`: who waits
for room; `standing.py`: how long the engine's loop stands for it; `filled.py`: whose blocks are complete; `handing.py`: what other
pods are promised), `vllm/worker.py` copies (`registration.py`, `arenas.py`, of the scheduler's half `mappings.py`, `store_jobs.py`);
`resets.py`: the engine forgets its cache; `decisions.py`: what its settings decide of KV; beside other connectors in one engine:
`wrapping.py`, `handshakes.py`, `naming.py`. For SGLang `sglang/storage.py` begins:
`pages.py`, `pools.py`, `flushes.py`; `arguments.py`: which of its arguments decide what KV is.

    session = kvtier.Session("/run/kvtier/node.sock", namespace=..., payload_bytes=..., block_tokens=16)
    load = session.load(hashes, deadline_s=0.5)             # poll load.done, load.ready
    copies = kvtier.Copies()
    arena = copies.map(load.attachment.arena)
    layout = copies.layout([kvtier.Part(base, stride, row_bytes)], blocks)
    slots = load.slots()
    job = copies.load(arena, layout, block_ids, slots.offsets, slots.checksums)   # poll job.ended()
    load.release(corrupt=job.take().corrupt)
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
