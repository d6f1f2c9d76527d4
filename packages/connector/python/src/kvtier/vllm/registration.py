"""What the engine's tensors are to a worker: where the blocks of each group lie, in whose memory, and the fingerprint of that. Nothing of it
is believed before a canary was written through the engine's view and read back through ours.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from kvtier.copies import Copies, Layout, Part
from kvtier.errors import KvError
from kvtier.vllm import identity, layouts
from kvtier.vllm.bases import vllm_version
from kvtier.vllm.device import Device, device_of
from kvtier.vllm.groups import Unsupported, groups_of
from kvtier.vllm.messages import KvtierHandshake, Rank


@dataclass(frozen=True)
class Registered:
    device: Device
    #: By group.
    layouts: tuple[Layout, ...]
    handshake: KvtierHandshake


def registered(copies: Copies, vllm_config: Any, kv_cache_config: Any, rank: Rank, tensors: Mapping[str, Any]) -> Registered:
    """@raises Unsupported"""
    identity.check_supported(vllm_config)
    _, hashed = identity.block_sizes(vllm_config, kv_cache_config)
    groups = groups_of(kv_cache_config, hashed, identity.uses_eagle(vllm_config))
    blocks = int(kv_cache_config.num_blocks)
    views = layouts.views_of(groups, tensors, blocks)
    device = device_of([tensors[view.layer] for group in views for view in group])
    try:
        made = []
        for group in views:
            parts = [Part(base=base, stride=stride, row_bytes=size) for base, stride, size in layouts.pieces_of(group)]
            made.append(copies.layout(parts, blocks, device.ordinal))
    except KvError as error:
        raise Unsupported(str(error)) from error
    read, write = partial(device.read, copies), partial(device.write, copies)
    for group in views:
        for view in group:
            layouts.check_canary(tensors[view.layer], view, blocks, read, write, device.settle)
    version = vllm_version()
    prints = tuple(
        identity.group_layout(vllm_config, group, of, device.kind, version, rank[0]).fingerprint() for group, of in zip(groups, views)
    )
    payloads = tuple(layout.payload_bytes for layout in made)
    return Registered(device, tuple(made), KvtierHandshake(rank=rank, payload_bytes=payloads, fingerprints=prints))
