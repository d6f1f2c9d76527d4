"""What the played engine is made of: its configuration, its pool of blocks, its requests and the hashes of their blocks."""

from __future__ import annotations

import hashlib
import types
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any

from engine_versions import Version

ROOT = hashlib.sha256(b"the root of the chains").digest()
#: A machine that runs other tests beside this one takes its time; the tests of deadlines have their own.
PATIENT = {
    "weights_digest": "ab" * 32,
    "lookup_deadline_ms": 5_000,
    "load_deadline_ms": 20_000,
    "plan_loads": False,
    "held_blocks_share": 0.5,
}


class FullAttentionSpec(types.SimpleNamespace):
    pass


class MLAAttentionSpec(types.SimpleNamespace):
    pass


class SlidingWindowSpec(types.SimpleNamespace):
    pass


class MambaSpec(types.SimpleNamespace):
    pass


@dataclass
class GroupShape:
    kind: str = "full"  # full, window, mla, mamba
    layers: int = 2
    block_tokens: int = 4
    window: int = 0
    layout: str = "hnd"


@dataclass
class Shape:
    """An engine's configuration."""

    groups: list[GroupShape] = field(default_factory=lambda: [GroupShape()])
    blocks: int = 96
    heads: int = 2
    dim: int = 8
    tp: int = 1
    pp: int = 1
    prefix_caching: bool = True
    step_tokens: int = 64
    drafts: int = 0
    asynchronous: bool = False
    dcp: int = 1
    max_running: int = 8
    model: str = "the model"
    #: Of a model with images and the like, how the engine handles them.
    media: dict[str, Any] | None = None
    #: Another class than `KvtierConnector`.
    connector: Any = None
    #: Of vLLM.
    version: Version = Version()
    #: New blocks are zeroed before they are written to.
    zeroes: bool = False
    options: dict[str, Any] = field(default_factory=dict)


@dataclass
class Block:
    block_id: int
    ref_cnt: int = 0
    is_null: bool = False
    block_hash: Any = None


class Pool:
    """Blocks by reference count; what is free and named is still found, least recently freed goes first."""

    def __init__(self, count: int, caching: bool) -> None:
        self.blocks = [Block(i) for i in range(count)]
        self.blocks[0].is_null, self.blocks[0].ref_cnt = True, 1
        self.caching = caching
        self.free: OrderedDict[int, None] = OrderedDict((i, None) for i in range(1, count))
        self.cached: dict[tuple[int, bytes], int] = {}

    def touch(self, blocks: list[Block]) -> None:
        for block in blocks:
            if block.ref_cnt == 0:
                del self.free[block.block_id]
            block.ref_cnt += 1

    def free_blocks(self, blocks: Any) -> None:
        for block in blocks:
            if block.is_null:
                continue
            assert block.ref_cnt > 0, "a block is freed twice"
            block.ref_cnt -= 1
            if block.ref_cnt == 0:
                self.free[block.block_id] = None

    def take(self, count: int) -> list[int] | None:
        if count > len(self.free):
            return None
        out = []
        for _ in range(count):
            number, _ = self.free.popitem(last=False)
            block = self.blocks[number]
            if block.block_hash is not None and self.cached.get(block.block_hash) == number:
                del self.cached[block.block_hash]
            block.block_hash, block.ref_cnt = None, 1
            out.append(number)
        return out

    def reset_prefix_cache(self) -> bool:
        """Only where nobody has a block."""
        if len(self.free) != len(self.blocks) - 1:
            return False
        self.cached.clear()
        for block in self.blocks:
            block.block_hash = None
        return True

    def name(self, number: int, key: tuple[int, bytes]) -> None:
        if self.caching and number and key not in self.cached:
            self.cached[key] = number
            self.blocks[number].block_hash = key


class Request:
    def __init__(self, name: str, prompt: list[int], outputs: int, hash_tokens: int, **more: Any) -> None:
        self.request_id = name
        self.all_token_ids = list(prompt)
        self.num_prompt_tokens = len(prompt)
        self.outputs = outputs
        self.num_computed_tokens = 0
        self.block_hashes: list[bytes] = []
        self.kv_transfer_params = more.get("kv_transfer_params")
        self.lora_request = more.get("lora_request")
        self.cache_salt = more.get("cache_salt")
        self.mm_features: list[Any] = more.get("mm_features", [])
        self.skip_reading_prefix_cache = more.get("skip_reading", False)
        self.resumable = more.get("resumable", False)
        self._hash_tokens = hash_tokens
        self.state = "waiting"
        self.status = ""
        self.tables: list[list[int]] = []
        self.drafts: list[int] = []
        self.in_flight = 0
        self.epoch = 0
        self.external = 0
        self.answer: dict[str, Any] | None = None
        self.error = ""
        self.hash_more()

    @property
    def num_tokens(self) -> int:
        return len(self.all_token_ids)

    def hash_more(self) -> None:
        size = self._hash_tokens
        while (len(self.block_hashes) + 1) * size <= len(self.all_token_ids):
            first = len(self.block_hashes) * size
            parent = self.block_hashes[-1] if self.block_hashes else ROOT
            salt = (self.cache_salt or "") if first == 0 else ""
            text = repr((parent, self.all_token_ids[first : first + size], salt)).encode()
            self.block_hashes.append(hashlib.sha256(text).digest())

    def output_tokens(self) -> list[int]:
        return self.all_token_ids[self.num_prompt_tokens :]


def next_token(tokens: list[int], model: str) -> int:
    return int.from_bytes(hashlib.sha256(repr((model, tokens)).encode()).digest()[:2], "big") % 997


class Blocks:
    """What an allocation is told by."""

    def __init__(self, tables: list[list[int]]) -> None:
        self._tables = tables

    def get_block_ids(self) -> tuple[list[int], ...]:
        return tuple(list(table) for table in self._tables)
