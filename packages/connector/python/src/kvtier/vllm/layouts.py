"""Where a block's bytes lie in the engine's tensors, by strides alone: shapes mean something else in every backend.

A tensor has one dimension along which blocks follow each other, `num_blocks` long or a multiple of it (kernels may take smaller
blocks than the manager). All other dimensions, sorted by stride, make the runs of contiguous bytes of one block:

    (2, blocks, tokens, heads, dim)     two runs a block: keys, values
    (blocks, heads, tokens, 2 dim)      one run
    packed: one storage, block_stride   one run, the stride is larger than the run
    as_strided over all layers          one run a layer, or a few

The canary proves that these runs are the bytes of the layer's own view: zeros through the view come out as zeros through the
runs, and nowhere else. Invariant: a layout that fails it is not used.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvtier.vllm.groups import Group, Unsupported

#: More pieces than this in one layer's block: copies would be all overhead.
MAX_RUNS = 64


@dataclass(frozen=True)
class View:
    """One layer's blocks: block b's bytes are `runs` moved by `b * stride` from `base`."""

    layer: str
    base: int
    stride: int
    runs: tuple[tuple[int, int], ...]  # offset, bytes
    #: Of the tensor: what decides in which order the bytes mean what.
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str
    dimension: int
    per_block: int

    @property
    def block_bytes(self) -> int:
        return sum(size for _, size in self.runs)


def _block_dimension(shape: Sequence[int], strides: Sequence[int], blocks: int) -> int:
    fits = [d for d, size in enumerate(shape) if size and size % blocks == 0]
    if not fits:
        raise Unsupported(f"no dimension of {tuple(shape)} counts {blocks} blocks")
    exact = [d for d in fits if shape[d] == blocks] or fits
    # Blocks are the outermost of what could be meant.
    return max(exact, key=lambda d: (strides[d], -d))


def view_of(layer: str, tensor: Any, blocks: int) -> View:
    """@raises Unsupported for what cannot be copied block by block"""
    shape = tuple(int(n) for n in tensor.shape)
    item = int(tensor.element_size())
    strides = tuple(int(n) * item for n in tensor.stride())
    if any(n < 0 for n in strides):
        raise Unsupported(f"layer {layer}: negative strides")
    dimension = _block_dimension(shape, strides, blocks)
    per_block = shape[dimension] // blocks
    dims = [(strides[d], n if d != dimension else per_block) for d, n in enumerate(shape)]
    run = item
    pending: list[tuple[int, int]] = []
    for stride, count in sorted((s, n) for s, n in dims if n > 1):
        if stride == 0:
            raise Unsupported(f"layer {layer}: one place for several elements")
        if not pending and stride == run:
            run *= count
        else:
            pending.append((stride, count))
    offsets = [0]
    for stride, count in pending:
        if len(offsets) * count > MAX_RUNS:
            raise Unsupported(f"layer {layer}: a block lies in more than {MAX_RUNS} pieces (shape {shape}, strides {strides})")
        offsets = [at + i * stride for at in offsets for i in range(count)]
    offsets.sort()
    if any(b - a < run for a, b in zip(offsets, offsets[1:])):
        raise Unsupported(f"layer {layer}: pieces of a block overlap")
    stride = strides[dimension] * per_block
    base = int(tensor.data_ptr())
    storage = tensor.untyped_storage()
    first, size = int(storage.data_ptr()), int(storage.nbytes())
    last = base + (blocks - 1) * stride + offsets[-1] + run
    if base < first or last > first + size:
        raise Unsupported(f"layer {layer}: its blocks end outside of their storage")
    if len(offsets) > 1 or stride >= offsets[-1] + run:
        pass
    elif blocks > 1:
        raise Unsupported(f"layer {layer}: blocks overlap")
    return View(
        layer=layer,
        base=base,
        stride=stride,
        runs=tuple((at, run) for at in offsets),
        shape=shape,
        strides=strides,
        dtype=str(tensor.dtype),
        dimension=dimension,
        per_block=per_block,
    )


def views_of(groups: Sequence[Group], tensors: Mapping[str, Any], blocks: int) -> list[list[View]]:
    """Per group, its layers' views in the order of their names' numbers: the order in a payload."""
    out = []
    for group in groups:
        views = []
        for i, (layer, page_bytes) in enumerate(zip(group.layers, group.page_bytes)):
            tensor = tensors.get(layer)
            if tensor is None:
                raise Unsupported(f"layer {layer} has no registered KV cache")
            if isinstance(tensor, (list, tuple)):
                raise Unsupported(f"layer {layer} has several tensors")
            view = view_of(layer, tensor, blocks)
            if view.block_bytes > page_bytes:
                raise Unsupported(f"layer {layer}: {view.block_bytes} bytes a block, where the engine reckons {page_bytes}")
            least = group.least_bytes[i] if i < len(group.least_bytes) else 0
            if view.block_bytes < least:
                raise Unsupported(f"layer {layer}: {view.block_bytes} bytes a block in its view, where the engine fills {least}")
            views.append(view)
        out.append(views)
    return out


def pieces_of(views: Sequence[View]) -> list[tuple[int, int, int]]:
    """Of one group: base, stride, bytes of every run of every layer, in the order in which they lie in a payload."""
    return [(view.base + at, view.stride, size) for view in views for at, size in view.runs]


def payload_bytes(views: Sequence[View]) -> int:
    return sum(view.block_bytes for view in views)


def check_canary(
    tensor: Any,
    view: View,
    blocks: int,
    read: Callable[[int, int], bytes],
    write: Callable[[int, bytes], None],
    settle: Callable[[], None] = lambda: None,
) -> None:
    """Nothing runs yet: blocks 0 and 1 may be written, and are as they were afterwards.

    @param read bytes at an address of the engine's memory; `write` puts them there; `settle` ends what was enqueued through the view
    @raises Unsupported when the layer's own view and ours are not the same bytes
    """
    elements = math.prod(n for d, n in enumerate(view.shape) if d != view.dimension) * view.per_block
    if elements * int(tensor.element_size()) != view.block_bytes:
        raise Unsupported(f"layer {view.layer}: its view has another size than its blocks")
    settle()
    probed = range(min(2, blocks))
    places = [[(view.base + b * view.stride + at, size) for at, size in view.runs] for b in probed]
    before = [[read(place, size) for place, size in block] for block in places]
    try:
        for block in places:
            for place, size in block:
                write(place, b"\x5a" * size)
        tensor.narrow(view.dimension, 0, view.per_block).zero_()
        settle()
        for b in probed:
            wanted = 0 if b == 0 else 0x5A
            for place, size in places[b]:
                if read(place, size) != bytes([wanted]) * size:
                    raise Unsupported(f"layer {view.layer}: what the engine writes to block 0 is found elsewhere")
    finally:
        for block, bytes_of in zip(places, before):
            for (place, _), data in zip(block, bytes_of):
                write(place, data)
