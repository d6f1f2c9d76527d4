"""SGLang's side of its third tier, played: host pools in the layouts that it has, and the calls of its controller in their order.

What a page holds says which tokens, pool and rank it is of, and goes in and out through the pool's own reckoning: a stale, foreign or torn
byte is a wrong page.
"""

from __future__ import annotations

import ctypes
import hashlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from kvtier.sglang.storage import KvtierStorage

#: Pages in one call of SGLang.
BATCH_PAGES = 128


def chain(tokens: Sequence[int], page_tokens: int, before: str = "") -> list[str]:
    """Names of whole pages: SHA-256 over the one before and token ids of four bytes."""
    names, last = [], bytes.fromhex(before)
    for at in range(0, len(tokens) - page_tokens + 1, page_tokens):
        last = hashlib.sha256(last + array("I", tokens[at : at + page_tokens]).tobytes()).digest()
        names.append(last.hex())
    return names


def names(seed: int, count: int, page_tokens: int = 4) -> list[str]:
    return chain([seed * 1000 + i for i in range(count * page_tokens)], page_tokens)


class Flat:
    """A tensor of plain bytes."""

    device, dtype = "cpu", "torch.bfloat16"

    def __init__(self, data: bytes) -> None:
        self.nbytes = len(data)
        self._held = ctypes.create_string_buffer(data, len(data))

    def data_ptr(self) -> int:
        return ctypes.addressof(self._held)

    def contiguous(self) -> Flat:
        return self

    def bytes(self) -> bytes:
        return self._held.raw


class Pool:
    """A host pool: ``sides`` 2 is keys and values, 1 is what ranks hold alike."""

    device, dtype = "cpu", "torch.bfloat16"

    def __init__(self, pages: int, page_size: int = 4, layout: str = "layer_first", sides: int = 2, layers: int = 3, row: int = 32) -> None:
        self.page_size, self.layout, self.sides, self.layer_num = page_size, layout, sides, layers
        self.size, self.row = pages * page_size, row
        self.head_num, self.head_dim, self.start_layer, self.end_layer = 2, row // 4, 0, layers
        self.kv_buffer = Flat(bytes(sides * layers * self.size * row))
        self.free_slots: list[int] = []
        self.clear()

    @property
    def page_bytes(self) -> int:
        return self.sides * self.layer_num * self.page_size * self.row

    def clear(self) -> None:
        self.mem_state = bytearray(self.size)
        self.free_slots = list(range(self.size))

    def alloc(self, count: int) -> array[int] | None:
        if count > len(self.free_slots):
            return None
        taken, self.free_slots = self.free_slots[:count], self.free_slots[count:]
        return array("q", taken)

    def free(self, indices: Sequence[int]) -> None:
        self.free_slots += list(indices)

    def get_page_buffer_meta(self, indices: Any) -> tuple[list[int], list[int]]:
        base, pointers = self.kv_buffer.data_ptr(), []
        side = self.layer_num * self.size * self.row
        numbers = indices.tolist()
        per_layer = self.page_size * self.row
        for index in numbers[:: self.page_size]:
            if self.layout == "layer_first":
                for layer in range(self.layer_num):
                    for s in range(self.sides):
                        pointers.append(base + s * side + (layer * self.size + index) * self.row)
            else:
                for s in range(self.sides):
                    pointers.append(base + s * side + index * self.layer_num * self.row)
        size = per_layer if self.layout == "layer_first" else per_layer * self.layer_num
        return pointers, [size] * len(pointers)

    def _places(self, index: int) -> list[tuple[int, int]]:
        """Of a flat page, where its pieces lie: sides outside, as SGLang flattens."""
        side, per_layer = self.layer_num * self.size * self.row, self.page_size * self.row
        if self.layout == "layer_first":
            return [
                (s * side + (layer * self.size + index) * self.row, per_layer)
                for s in range(self.sides)
                for layer in range(self.layer_num)
            ]
        return [(s * side + index * self.layer_num * self.row, per_layer * self.layer_num) for s in range(self.sides)]

    def get_data_page(self, index: int, flat: bool = True) -> Flat:
        base = self.kv_buffer.data_ptr()
        return Flat(b"".join(ctypes.string_at(base + at, size) for at, size in self._places(index)))

    def get_dummy_flat_data_page(self) -> Flat:
        return Flat(bytes(self.page_bytes))

    def set_from_flat_data_page(self, index: int, page: Flat) -> None:
        data, done = page.bytes(), 0
        for at, size in self._places(index):
            ctypes.memmove(self.kv_buffer.data_ptr() + at, data[done : done + size], size)
            done += size


@dataclass
class Config:
    """As SGLang's HiCacheStorageConfig."""

    extra_config: dict[str, Any]
    tp_rank: int = 0
    tp_size: int = 1
    pp_rank: int = 0
    pp_size: int = 1
    attn_cp_rank: int = 0
    attn_cp_size: int = 1
    is_mla_model: bool = False
    should_split_heads: bool = False
    enable_storage_metrics: bool = False
    model_name: str | None = None


@dataclass
class Transfer:
    """As SGLang's PoolTransfer."""

    name: str
    keys: list[str] | None = None
    host_indices: Any = None
    hit_policy: str = "all_pages"


@dataclass
class Extra:
    """As SGLang's HiCacheStorageExtraInfo."""

    prefix_keys: list[str] | None = None
    extra_info: dict[str, Any] | None = field(default=None)


def extra_config(socket: str, zero_copy: bool = True, **more: Any) -> dict[str, Any]:
    return {
        "backend_name": "kvtier",
        "module_path": "kvtier.sglang.storage",
        "class_name": "KvtierStorage",
        **({"interface_v1": 1} if zero_copy else {}),
        "kvtier": {"socket": socket, "weights_digest": "ab" * 32, "lookup_deadline_ms": 2000, "load_deadline_ms": 10_000, **more},
    }


class Engine:
    """One rank, and a process: SGLang makes a host pool once in each. With the pool of another one it is the same process, whose backend
    was attached again."""

    def __init__(self, socket: str, pool: Pool | None = None, rank: int = 0, ranks: int = 1, mla: bool = False, **options: Any) -> None:
        self.pool = pool or Pool(64)
        self.rank = 0 if mla else rank
        zero_copy = options.pop("zero_copy", True)
        self.zero_copy = zero_copy
        metrics = options.pop("metrics", False)
        config = Config(extra_config(socket, zero_copy, **options), tp_rank=rank, tp_size=ranks, is_mla_model=mla)
        config.enable_storage_metrics, config.model_name = metrics, "model"
        self.storage = KvtierStorage(config, {})
        self.storage.register_mem_pool_host(self.pool)

    @property
    def attached(self) -> bool:
        # Names that nobody has: asked for so that there is a share, and it is attached.
        self.storage.batch_exists(["00" * 32])
        shares = list(self.storage.shares._shares.values())
        return len(shares) == len(self.storage.shares._memory) and all(share.session.attachment for share in shares)

    def content(self, key: str, pool: Pool | None = None, name: str = "kv") -> bytes:
        return hashlib.shake_128(f"{key} {name} {self.rank}".encode()).digest((pool or self.pool).page_bytes)

    def _take(self, keys: Sequence[str], pool: Pool) -> array[int]:
        indices = pool.alloc(len(keys) * pool.page_size)
        assert indices is not None, "the pool of the test is too small"
        return indices

    def fill(self, keys: Sequence[str], pool: Pool, name: str = "kv") -> array[int]:
        indices = self._take(keys, pool)
        for i, key in enumerate(keys):
            pool.set_from_flat_data_page(indices[i * pool.page_size], Flat(self.content(key, pool, name)))
        return indices

    def wrong(self, keys: Sequence[str], indices: Any, pool: Pool, name: str = "kv") -> list[str]:
        """Of these pages, those that hold something else."""
        return [
            key
            for i, key in enumerate(keys)
            if pool.get_data_page(indices[i * pool.page_size]).bytes() != self.content(key, pool, name)
        ]

    def backup(self, keys: Sequence[str], prefix: list[str] | None = None) -> int:
        """As its backup thread: pages that it believes to be stored."""
        done = 0
        for at in range(0, len(keys), BATCH_PAGES):
            batch = list(keys[at : at + BATCH_PAGES])
            indices = self.fill(batch, self.pool)
            if self.zero_copy:
                said = self.storage.batch_set_v1(batch, indices, Extra(prefix))
                assert len(said) == len(batch)
                good = all(said)
            else:
                data = [self.pool.get_data_page(indices[i * self.pool.page_size]) for i in range(len(batch))]
                good = self.storage.batch_set(batch, data)
            # Whatever was said, the pages are given to others at once.
            for i in range(len(batch)):
                self.pool.set_from_flat_data_page(indices[i * self.pool.page_size], Flat(b"\xee" * self.pool.page_bytes))
            self.pool.free(indices)
            if not good:
                break
            done += len(batch)
            if prefix:
                prefix = prefix + batch
        return done

    def exists(self, keys: Sequence[str]) -> int:
        found = 0
        for at in range(0, len(keys), BATCH_PAGES):
            batch = list(keys[at : at + BATCH_PAGES])
            said = self.storage.batch_exists(batch, Extra())
            assert isinstance(said, int) and 0 <= said <= len(batch)
            found += said
            if said < len(batch):
                break
        return found

    def prefetch(self, keys: Sequence[str]) -> tuple[int, list[str]]:
        """As its prefetch threads: pages that are used, and those of them that hold something else."""
        hit = self.exists(keys)
        used: list[str] = []
        wrong: list[str] = []
        for at in range(0, hit, BATCH_PAGES):
            batch = list(keys[at : min(at + BATCH_PAGES, hit)])
            indices = self._take(batch, self.pool)
            if self.zero_copy:
                said = self.storage.batch_get_v1(batch, indices, Extra())
            else:
                dummies = [self.pool.get_dummy_flat_data_page() for _ in batch]
                found = self.storage.batch_get(batch, dummies)
                said = [one is not None for one in found]
                for i, one in enumerate(found):
                    if one is not None:
                        self.pool.set_from_flat_data_page(indices[i * self.pool.page_size], one)
            assert len(said) == len(batch)
            run = said.index(False) if False in said else len(said)
            used += batch[:run]
            # What was not brought is given to others at once: nothing may write there any more.
            size = self.pool.page_size
            for i in range(run, len(batch)):
                self.pool.set_from_flat_data_page(indices[i * size], Flat(b"\xdd" * self.pool.page_bytes))
            wrong += self.wrong(batch[:run], indices, self.pool)
            for i in range(run, len(batch)):
                if self.pool.get_data_page(indices[i * size]).bytes() != b"\xdd" * self.pool.page_bytes:
                    wrong.append(f"written after the call: {batch[i]}")
            self.pool.free(indices)
            if run < len(batch):
                break
        return len(used), wrong

    def close(self) -> None:
        self.storage.close()
