"""Pages that callers bring as tensors: SGLang without `interface_v1`, and the pages of its draft model, whose keys have a suffix.

They go through memory of our own, one copy more. Names of theirs are apart from those of pages in host pools: the order of a flat
page's bytes is another one. A call has one deadline, however many times its pages fill that memory.
"""

from __future__ import annotations

import ctypes
import mmap
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from kvtier.copies import Part
from kvtier.sglang.pages import HASH_BYTES, Pages, held
from kvtier.sglang.shares import Share, Shares

#: Of the memory that pages of one size pass through, each way.
_STAGING_BYTES = 32 << 20
#: Kinds of pages: suffixes and sizes.
_MAX_KINDS = 16


class _Staging:
    def __init__(self, shares: Shares, page_bytes: int) -> None:
        self.page_bytes = page_bytes
        self.pages = max(1, min(128, _STAGING_BYTES // page_bytes))
        self._lock = threading.Lock()
        self._memory = mmap.mmap(-1, self.pages * page_bytes)
        self._held = ctypes.c_char.from_buffer(self._memory)
        self.address = ctypes.addressof(self._held)
        self.layout = shares.copies.layout([Part(self.address, page_bytes, page_bytes)], self.pages)

    @contextmanager
    def held(self, until: float) -> Iterator[float]:
        """This thread's alone; gives the seconds that are left. 0: it is not, for there are none."""
        if not self._lock.acquire(timeout=max(0.0, until - time.monotonic())):
            yield 0.0
            return
        try:
            yield until - time.monotonic()
        finally:
            self._lock.release()


def _split(key: str) -> tuple[bytes, str] | None:
    """A page's name and the suffix that says of which kind it is."""
    head, _, suffix = key.partition(".")
    try:
        name = bytes.fromhex(head)
    except ValueError:
        return None
    return (name, suffix) if len(name) == HASH_BYTES and len(suffix) <= 64 else None


def _kind(suffix: str, page: Any) -> str:
    return f"{suffix or 'kv'}/{int(page.nbytes)} {page.dtype}"


class Tensors:
    def __init__(self, shares: Shares, pages: Pages) -> None:
        self._shares = shares
        self._pages = pages
        self._lock = threading.Lock()
        self._staging: dict[str, _Staging] = {}

    def expect(self, page: Any) -> None:
        """A page of the KV pool: pages of another process are found before one of ours is stored."""
        self._staging_of(_kind("", page), int(page.nbytes), str(page.dtype))

    def held(self, key: str, deadline_s: float) -> bool:
        return self.held_run([key], deadline_s) == 1

    def held_run(self, keys: Sequence[str], deadline_s: float) -> int:
        """Of these keys, how many are held from the first on."""
        split = [_split(key) for key in keys]
        if not split or split[0] is None:
            return 0
        suffix = split[0][1]
        names = b""
        for one in split:
            if one is None or one[1] != suffix:
                break
            names += one[0]
        # Nobody says how large the pages of this kind are: whichever size was seen.
        kinds = [one for one in list(self._staging) if one.startswith(f"{suffix or 'kv'}/")]
        shares = [share for share in map(self._shares.share, kinds) if share is not None]
        return max((held(share, names, deadline_s) for share in shares), default=0)

    def load(self, keys: Sequence[str], targets: Any, deadline_s: float) -> list[Any]:
        out: list[Any] = [None] * len(keys)
        if targets is None:
            return out
        until = time.monotonic() + deadline_s
        for share, staging, indexes, names in self._kinds(keys, targets):
            for at in range(0, len(indexes), staging.pages):
                part = indexes[at : at + staging.pages]
                with staging.held(until) as left_s:
                    if left_s <= 0:
                        return out
                    packed = names[at * HASH_BYTES : (at + len(part)) * HASH_BYTES]
                    good = self._pages.load(share, packed, range(len(part)), left_s)
                    for slot, index in enumerate(part):
                        if good[slot]:
                            source = staging.address + slot * staging.page_bytes
                            ctypes.memmove(int(targets[index].data_ptr()), source, staging.page_bytes)
                            out[index] = targets[index]
                if not all(good):
                    break
        return out

    def store(self, keys: Sequence[str], values: Any, deadline_s: float) -> bool:
        if values is None:
            return False
        stored, until = 0, time.monotonic() + deadline_s
        for share, staging, indexes, names in self._kinds(keys, values):
            if not share.writes:
                stored += len(indexes)
                continue
            for at in range(0, len(indexes), staging.pages):
                part = indexes[at : at + staging.pages]
                with staging.held(until) as left_s:
                    if left_s <= 0:
                        return False
                    for slot, index in enumerate(part):
                        value = values[index].contiguous()
                        ctypes.memmove(staging.address + slot * staging.page_bytes, int(value.data_ptr()), staging.page_bytes)
                    packed = names[at * HASH_BYTES : (at + len(part)) * HASH_BYTES]
                    before = names[(at - 1) * HASH_BYTES : at * HASH_BYTES] if at else b""
                    good = self._pages.store(share, before, packed, range(len(part)), left_s)
                stored += sum(good)
                if not all(good):
                    break
        return stored == len(keys)

    def _kinds(self, keys: Sequence[str], tensors: Sequence[Any]) -> list[tuple[Share, _Staging, list[int], bytes]]:
        """The keys by kind, in their order; those of no kind are left out."""
        found: dict[str, tuple[list[int], bytes]] = {}
        for index, (key, tensor) in enumerate(zip(keys, tensors)):
            split = _split(key)
            if split is None or tensor is None or str(getattr(tensor, "device", "cpu")) != "cpu":
                continue
            kind = _kind(split[1], tensor)
            indexes, names = found.get(kind, ([], b""))
            found[kind] = ([*indexes, index], names + split[0])
        out = []
        for kind, (indexes, names) in found.items():
            staging = self._staging_of(kind, int(tensors[indexes[0]].nbytes), str(tensors[indexes[0]].dtype))
            share = self._shares.share(kind) if staging is not None else None
            if share is not None and staging is not None:
                out.append((share, staging, indexes, names))
        return out

    def _staging_of(self, kind: str, page_bytes: int, dtype: str) -> _Staging | None:
        with self._lock:
            found = self._staging.get(kind)
            if found is None:
                page_tokens = self._shares.page_tokens()
                if page_bytes < 1 or page_tokens < 1 or len(self._staging) >= _MAX_KINDS:
                    return None
                found = self._staging[kind] = _Staging(self._shares, page_bytes)
                facts = {"kind": "flat pages", "dtype": dtype, "pageBytes": page_bytes, **self._shares.page_facts()}
                self._shares.add_memory(kind, found.layout, page_tokens, facts)
            return found
