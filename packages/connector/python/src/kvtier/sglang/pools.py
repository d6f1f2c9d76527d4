"""A host pool of SGLang as libkvtier sees it: where the parts of a page lie.

The pool itself is asked where (`get_page_buffer_meta`), for some pages; from these follows the rule for all of them, and other pages
must agree with it. Then a canary is written through the pool and read through the rule. What is not understood is not used.

Invariant: when a pool was looked at, each of its pages holds what it held before.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvtier.copies import Part
from kvtier.sglang.bases import page_indices

#: A page has no more parts than this: two for each layer of a large model.
MAX_PARTS = 4096


class Unsupported(Exception):
    """This pool's pages are neither loaded nor stored; the text is the one line that says why."""


@dataclass(frozen=True)
class PoolView:
    name: str
    pool: Any
    parts: tuple[Part, ...]
    pages: int
    page_tokens: int
    payload_bytes: int
    #: What gives the bytes of a page their meaning, as far as the pool tells it.
    facts: dict[str, Any]

    def blocks(self, host_indices: Any, count: int) -> list[int] | None:
        """The pages that the indices of ``count`` keys name; None where they are not whole pages of this pool."""
        numbers = [int(one) for one in host_indices.tolist()]
        size = self.page_tokens
        if len(numbers) != count * size:
            return None
        found = []
        for first in range(0, len(numbers), size):
            page, rest = divmod(numbers[first], size)
            if rest or not 0 <= page < self.pages or numbers[first : first + size] != list(range(page * size, (page + 1) * size)):
                return None
            found.append(page)
        return found


def _meta(pool: Any, page: int, page_tokens: int) -> tuple[list[int], list[int]]:
    try:
        found = pool.get_page_buffer_meta(page_indices(page, page_tokens))
    except (AttributeError, NotImplementedError, ValueError, AssertionError) as error:
        raise Unsupported(f"it does not say where its pages lie ({error or type(error).__name__})") from error
    if found is None:
        raise Unsupported("it has no memory of its own")
    pointers, sizes = found
    pointers, sizes = [int(one) for one in pointers], [int(one) for one in sizes]
    if not 1 <= len(pointers) == len(sizes) <= MAX_PARTS or min(sizes) < 1:
        raise Unsupported(f"its pages have {len(pointers)} parts of {len(sizes)} sizes")
    return pointers, sizes


def _buffers(pool: Any) -> list[tuple[int, int]]:
    """Of the pool's tensors, where they lie."""
    if hasattr(pool, "get_hybrid_pool_buffer"):
        tensors = pool.get_hybrid_pool_buffer()
    else:
        tensors = pool.kv_buffer
    tensors = tensors if isinstance(tensors, (list, tuple)) else [tensors]
    return [(int(one.data_ptr()), int(one.nbytes)) for one in tensors if one is not None]


def anchor(pool: Any) -> Any:
    """Of a group of pools, the one that the KV lies in."""
    return getattr(getattr(pool, "anchor_entry", None), "host_pool", pool)


def facts_of(pool: Any) -> dict[str, Any]:
    def number(name: str, default: int = 0) -> int:
        return int(getattr(pool, name, default) or 0)

    device = getattr(pool, "device_pool", None)
    return {
        "class": type(pool).__name__,
        # What the pages are copies of.
        "device": [type(device).__name__, *(str(getattr(device, one, None)) for one in ("kv_cache_layout", "use_hnd", "store_dtype"))],
        "layout": str(getattr(pool, "layout", "")),
        "dtype": str(getattr(pool, "dtype", "")),
        "layers": [number("start_layer"), number("end_layer")],
        "shape": [number(one) for one in ("layer_num", "head_num", "head_dim", "v_head_dim", "kv_cache_dim")],
        "contextRanks": [number("dcp_rank"), number("dcp_size", 1)],
    }


def view(name: str, pool: Any) -> PoolView:
    """@raises Unsupported"""
    pool = anchor(pool)
    page_tokens = int(getattr(pool, "page_size", 0) or 0)
    pages = int(getattr(pool, "size", 0) or 0) // page_tokens if page_tokens else 0
    if pages < 1:
        raise Unsupported("it has no pages")
    if str(getattr(pool, "device", "cpu")) != "cpu":
        raise Unsupported(f"it lies in the memory of {pool.device}")
    first, sizes = _meta(pool, 0, page_tokens)
    last, _ = _meta(pool, pages - 1, page_tokens)
    strides = [(b - a) // max(1, pages - 1) for a, b in zip(first, last)]
    for page in sorted({0, min(1, pages - 1), pages // 3, pages // 2, pages - 1}):
        pointers, its = _meta(pool, page, page_tokens)
        if its != sizes or pointers != [a + page * stride for a, stride in zip(first, strides)]:
            raise Unsupported("its pages do not lie at one stride")
    if any(stride < 0 or (pages > 1 and stride < size) for stride, size in zip(strides, sizes)):
        raise Unsupported("its pages overlap")
    buffers = _buffers(pool)
    for base, stride, size in zip(first, strides, sizes):
        end = base + (pages - 1) * stride + size
        if not any(at <= base and end <= at + length for at, length in buffers):
            raise Unsupported("a page lies outside of its tensors")
    parts = tuple(Part(base, stride, size) for base, stride, size in zip(first, strides, sizes))
    facts = {**facts_of(pool), "partBytes": list(sizes)}
    found = PoolView(name, pool, parts, pages, page_tokens, sum(sizes), facts)
    _canary(found)
    return found


def read_page(parts: Sequence[Part], page: int) -> list[bytes]:
    return [ctypes.string_at(part.base + page * part.stride, part.row_bytes) for part in parts]


def _canary(seen: PoolView) -> None:
    """Writes a page through the pool, reads it through our own view, and puts back what it held: a pool that goes by the indices of another
    one gives none out, so that its free pages may be in use. The engine is idle, and reads none of them meanwhile."""
    pool = seen.pool
    try:
        indices = pool.alloc(seen.page_tokens)
    except (AttributeError, NotImplementedError) as error:
        raise Unsupported("it gives out no pages of its own") from error
    if indices is None:
        raise Unsupported("it has no free page to be tried with; attach the storage backend when the engine is idle")
    try:
        blocks = seen.blocks(indices, 1)
        if blocks is None:
            raise Unsupported("its pages are not consecutive indices")
        page = pool.get_dummy_flat_data_page()
        data = os.urandom(int(page.nbytes))
        if len(data) != seen.payload_bytes:
            raise Unsupported(f"a page has {len(data)} bytes, its parts have {seen.payload_bytes}")
        index = blocks[0] * seen.page_tokens
        held = pool.get_data_page(index).contiguous()
        before = ctypes.string_at(int(held.data_ptr()), int(held.nbytes))
        if len(before) != len(data):
            raise Unsupported(f"a page that is written to it has {len(data)} bytes, and one that is read {len(before)}")
        try:
            ctypes.memmove(int(page.data_ptr()), data, len(data))
            pool.set_from_flat_data_page(index, page)
            # The order of the parts is the pool's own matter; each of them must be there once.
            spans = sorted((data.find(part), len(part)) for part in read_page(seen.parts, blocks[0]))
            at = 0
            for start, length in spans:
                if start != at:
                    raise Unsupported("a page that is written through it is not found where it says that its pages lie")
                at += length
        finally:
            ctypes.memmove(int(page.data_ptr()), before, len(before))
            pool.set_from_flat_data_page(index, page)
    finally:
        pool.free(indices)
