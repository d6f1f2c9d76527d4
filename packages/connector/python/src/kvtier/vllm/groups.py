"""KV cache groups as the tier sees them, and which prefixes all of them can bring.

Each group's blocks live in namespaces of their own. A prefix can be loaded where every group has what a token after it looks at:

    full      # # # # # # # .          all blocks of the prefix
    window    . . # # . # # #          the last two of them: prefixes of 4 and 7 blocks can be loaded

Groups may have blocks of different sizes; a prefix ends where all of them end a block (`align_tokens`). Pure.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

#: By the exact class of a spec: what is derived from it may store something else under the same blocks.
_FULL = frozenset({"FullAttentionSpec"})
_MLA = frozenset({"MLAAttentionSpec"})
_WINDOW = frozenset({"SlidingWindowSpec"})
_WINDOW_MLA = frozenset({"SlidingWindowMLASpec"})
_UNIFORM = frozenset({"UniformTypeKVCacheSpecs"})


class Unsupported(Exception):
    """This engine's KV is neither loaded nor stored; the text is the one line that says why."""


@dataclass(frozen=True)
class Group:
    index: int
    kind: str  # "full", "window"
    block_tokens: int
    #: Hashes of the request per block of this group.
    hash_step: int
    #: Tokens that a token looks at, itself included; 0: all.
    window_tokens: int
    #: All ranks of a stage hold the same bytes.
    replicated: bool
    layers: tuple[str, ...]
    #: Bytes of one block of one layer, as the engine reckons them.
    page_bytes: tuple[int, ...]
    #: Of a speculative method that recomputes the last block of a hit.
    drops_last: bool
    #: Of a window's tail, so many tokens more than a token looks at: who claims hits may ask for them.
    more_tail_tokens: int = 0
    #: Of a page, without what it is padded with; empty where the engine does not say it.
    least_bytes: tuple[int, ...] = ()
    #: The most KV heads that a layer has on a rank; 0 where the engine does not say it.
    rank_heads: int = 0

    @property
    def tail_blocks(self) -> int:
        """Blocks before the end of a prefix that a token after it looks at; 0: all."""
        tokens = self.window_tokens - 1 + self.more_tail_tokens
        return math.ceil(tokens / self.block_tokens) if self.window_tokens else 0

    def first_needed(self, first_block: int, end_block: int) -> int:
        """Of the blocks from `first_block` to `end_block`, the first that a token after them looks at."""
        return max(first_block, end_block - self.tail_blocks) if self.window_tokens else first_block

    def first_live(self, computed_tokens: int) -> int:
        """The first block that the window still covers, wholly or in part, when so many tokens are computed."""
        if not self.window_tokens:
            return 0
        return max(0, (computed_tokens - self.window_tokens + 1) // self.block_tokens)


def _layer_specs(spec: Any, layers: Sequence[str]) -> list[Any]:
    if type(spec).__name__ in _UNIFORM:
        return [spec.kv_cache_specs[layer] for layer in layers]
    return [spec] * len(layers)


def _kind(spec: Any) -> tuple[str, int, bool]:
    name = type(spec).__name__
    window = getattr(spec, "sliding_window", None) or 0
    if getattr(spec, "non_causal", False):
        raise Unsupported(f"attention that looks ahead ({name}): KV of a prefix depends on what follows")
    if name in _FULL or name in _MLA:
        if getattr(spec, "attention_chunk_size", None):
            raise Unsupported(f"attention in chunks ({name})")
        # With the hybrid manager off, layers with windows keep all their blocks: then all of them are stored.
        return "full", 0, name in _MLA
    if name in _WINDOW or name in _WINDOW_MLA:
        if not window:
            raise Unsupported(f"{name} without a window")
        if getattr(spec, "extra_retained_tokens", 0):
            window += int(spec.extra_retained_tokens)
        return "window", int(window), name in _WINDOW_MLA
    raise Unsupported(f"KV of the kind {name} is not known here")


def _unpadded(spec: Any) -> int:
    said = getattr(spec, "unpadded_page_size_bytes", None)
    return int(said) if isinstance(said, int) else 0


def _rank_heads(spec: Any) -> int:
    said = getattr(spec, "num_kv_heads", None)
    return said if isinstance(said, int) else 0


def _check_said(index: int, group: Any, specs: Sequence[Any]) -> None:
    """What newer engines say themselves, whatever class their specs are of."""
    if getattr(group, "enable_kv_transfer", True) is False:
        raise Unsupported(f"group {index} is not for connectors, by the engine's word")
    for spec in specs:
        if getattr(spec, "prefix_cacheable", True) is False:
            raise Unsupported(f"group {index}: {type(spec).__name__} is of no use as a prefix, by the engine's word")


def groups_of(kv_cache_config: Any, hash_block_tokens: int, use_eagle: bool) -> tuple[Group, ...]:
    """@raises Unsupported where one of them is of a kind that is not known: then none is used."""
    out = []
    for index, group in enumerate(kv_cache_config.kv_cache_groups):
        spec, layers = group.kv_cache_spec, tuple(group.layer_names)
        specs = _layer_specs(spec, layers)
        _check_said(index, group, (spec, *specs))
        kinds = {_kind(one) for one in specs}
        if len(kinds) != 1:
            raise Unsupported(f"group {index} mixes kinds of attention")
        kind, window, replicated = kinds.pop()
        block_tokens = int(spec.block_size)
        if block_tokens % hash_block_tokens:
            raise Unsupported(f"group {index}: blocks of {block_tokens} tokens, hashes of {hash_block_tokens}")
        out.append(
            Group(
                index=index,
                kind=kind,
                block_tokens=block_tokens,
                hash_step=block_tokens // hash_block_tokens,
                window_tokens=window,
                replicated=replicated,
                layers=layers,
                page_bytes=tuple(int(one.page_size_bytes) for one in specs),
                least_bytes=tuple(_unpadded(one) for one in specs),
                rank_heads=max(_rank_heads(one) for one in specs) if specs else 0,
                drops_last=bool(use_eagle and getattr(group, "is_eagle_group", False)) or (use_eagle and kind == "full"),
            )
        )
    if not out:
        raise Unsupported("the model has no KV")
    return tuple(out)


def align_tokens(groups: Sequence[Group]) -> int:
    return math.lcm(*(group.block_tokens for group in groups))


class Prefixes:
    """Which prefixes all groups can bring. It is asked on the loop of the engine: what of the answer never changes is found once."""

    def __init__(self, groups: Sequence[Group]) -> None:
        self.align = align_tokens(groups)
        self.groups = len(groups)
        self._sizes = [group.block_tokens for group in groups]
        self._windows = [group for group in groups if group.window_tokens]
        self._each = tuple(groups)
        self.has_windows = bool(self._windows)
        self._drops = any(group.drops_last for group in groups)

    def longest(self, held: Sequence[Sequence[tuple[int, int]]], local_tokens: int, limit_tokens: int) -> int:
        """Tokens of the longest prefix beyond `local_tokens` that all groups can bring; `local_tokens` where there is none.

        `held`: per group, the ranges [first, end) of blocks that the node holds.
        """
        if self._windows:
            return self._longest_with_windows(held, local_tokens, limit_tokens)
        end = limit_tokens
        for size, ranges in zip(self._sizes, held):
            reach = first = local_tokens // size
            for a, b in ranges:
                if a <= first < b:
                    reach = b
            if reach * size < end:
                end = reach * size
        end = end // self.align * self.align
        return end if end > local_tokens else local_tokens

    def _longest_with_windows(self, held: Sequence[Sequence[tuple[int, int]]], local_tokens: int, limit_tokens: int) -> int:
        """From the longest down: each end that cannot be brought gives the next one that may be, and no range is looked at twice."""
        align = self.align
        end = limit_tokens // align * align
        at = [len(ranges) - 1 for ranges in held]
        while end > local_tokens:
            shorter = end
            for index, (group, ranges) in enumerate(zip(self._each, held)):
                size = group.block_tokens
                last = end // size
                # The last range that begins before the end: ends only grow shorter, and those behind it are done with.
                i = at[index]
                while i >= 0 and ranges[i][0] >= last:
                    i -= 1
                at[index] = i
                if i < 0:
                    return local_tokens
                begins, ends = ranges[i]
                local = local_tokens // size
                # A gap before this end: the next one is where the run before the gap ends.
                until = min(last, ends)
                if begins > group.first_needed(local, until):
                    # Too short a run, and shorter ends make it no longer: the one before it.
                    until = ranges[i - 1][1] if i else 0
                if until < last:
                    shorter = min(shorter, until * size)
            if shorter == end:
                return end
            end = shorter // align * align
        return local_tokens

    def usable(self, prefix_tokens: int, local_tokens: int, request_tokens: int) -> int:
        """What may be claimed of a prefix that is held: speculation recomputes the last block of a hit, and where the whole request
        is held its last token is computed again, which looks one token further back than a window's tail does."""
        end = prefix_tokens
        if self._drops:
            end -= self.align
        if self._windows and end >= request_tokens:
            end -= self.align
        return end if end > local_tokens else local_tokens
