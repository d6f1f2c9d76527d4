#!/usr/bin/env python3
"""libkvtier on a GPU as an engine in Python uses it: torch's tensors are found, stored into an arena and loaded back through the functions of
vLLM's worker half, behind torch's default stream and beside a graph that is captured. Bits are compared, rates stand beside one pinned copy.

    connector_gpu.py [LAYERS BLOCKS HEADS DIM]      default: 32 256 8 128, the KV of an 8B Llama, blocks of 2 MiB

A line of JSON a figure, at once; what fails is a line with its error, and exit code 1. Exit code 3: torch, its GPU or protobuf is missing.
"""
import json
import os
import random
import struct
import sys
import tempfile
import threading
import time
from functools import partial

PAGE, HEADER, TOKENS = 4096, 256, 16
ARENA_ID = 0x1234_5678_9ABC_DEF0
ROUNDS, LONGEST_S = 5, 30.0
#: So long the GPU is busy before it writes the blocks that are stored: a store that did not wait for it would find zeros.
BUSY_CYCLES = 200_000_000
#: Axes of a layer's tensor, as attention backends have them.
LAYOUTS = {
    "keys and values apart": lambda blocks, heads, dim: (2, blocks, TOKENS, heads, dim),
    "keys and values together": lambda blocks, heads, dim: (blocks, heads, TOKENS, 2 * dim),
}


def told(fields):
    print(json.dumps(fields, separators=(",", ":")), flush=True)  # as kernel_bench writes them, for verdicts.awk


def told_us(name, us, limit_us):
    told({"name": name, "value": us, "unit": "us", "limit": limit_us, "limitName": "one pinned copy, alone", "ratio": limit_us / us})


def told_blocks(how, blocks):
    told({"name": f"connector: blocks that came back with the same bits, {how}", "value": blocks, "unit": "blocks", "limit": blocks, "limitName": "all", "ratio": 1})


def missing():
    try:
        import google.protobuf  # noqa: F401
        import torch
    except ImportError as error:
        return f"this python has no {error.name}"
    return None if torch.cuda.is_available() else "torch sees no GPU"


def median_us(work):
    times = []
    for _ in range(ROUNDS):
        begin = time.perf_counter()
        work()
        times.append(1e6 * (time.perf_counter() - begin))
    return sorted(times)[ROUNDS // 2]


def wait_for(what, condition):
    end = time.monotonic() + LONGEST_S
    while not condition():
        if time.monotonic() > end:
            raise RuntimeError(f"{what}: not within {LONGEST_S:.0f} s")
        time.sleep(0.001)


class ArenaFile:
    """What a cache node would make, one slot a block. It loses its name as soon as it is mapped: whatever ends this process, it goes."""

    def __init__(self, blocks, payload_bytes):
        step = -(-(HEADER + payload_bytes) // PAGE) * PAGE
        self.offsets = [PAGE + HEADER + i * step for i in range(blocks)]
        self.bytes = PAGE + blocks * step
        self._file, self._path = tempfile.mkstemp(prefix="kvtier-connector-", dir="/dev/shm")

    def mapped(self, kvtier, copies):
        try:
            os.write(self._file, struct.pack("<8sIIQQ", b"KVTIERAR", 1, PAGE, self.bytes, ARENA_ID))
            os.posix_fallocate(self._file, 0, self.bytes)
            return copies.map(kvtier.ArenaRef(self._path, self.bytes, ARENA_ID))
        finally:
            os.unlink(self._path)

    def read(self, offset, size):
        return os.pread(self._file, size, offset)

    def close(self):
        """Its memory goes when it is mapped nowhere, either."""
        os.close(self._file)


class Kv:
    """An engine's KV: a tensor a layer. `raw` are the same bytes."""

    def __init__(self, torch, copies, sizes, shape_of):
        from kvtier.copies import Part
        from kvtier.vllm import layouts
        from kvtier.vllm.device import device_of

        layers, blocks, heads, dim = sizes
        shape = shape_of(blocks, heads, dim)
        self.raw = [torch.zeros(2 * blocks * TOKENS * heads * 2 * dim, dtype=torch.uint8, device="cuda:0") for _ in range(layers)]
        tensors = {f"model.layers.{i}.self_attn.attn": raw.view(torch.bfloat16).view(shape) for i, raw in enumerate(self.raw)}
        views = [layouts.view_of(name, tensor, blocks) for name, tensor in tensors.items()]
        self.copies, self.blocks = copies, blocks
        self.device = device_of(list(tensors.values()))
        self.pieces = layouts.pieces_of(views)
        self.parts = [Part(base=base, stride=stride, row_bytes=size) for base, stride, size in self.pieces]
        self.layout = copies.layout(self.parts, blocks, self.device.ordinal)
        read, write = partial(self.device.read, copies), partial(self.device.write, copies)
        for view in views:
            layouts.check_canary(tensors[view.layer], view, blocks, read, write, self.device.settle)

    def payload(self, block):
        """By its places, and not by a copy of whole blocks."""
        return b"".join(self.device.read(self.copies, base + block * stride, size) for base, stride, size in self.pieces)

    def shuffled(self, offsets, seed):
        blocks = list(range(self.blocks))
        random.Random(seed).shuffle(blocks)
        return blocks, [offsets[block] for block in blocks]

    def store(self, arena, offsets, mark):
        """Sums by block."""
        blocks, places = self.shuffled(offsets, 1)
        job = self.copies.store(arena, self.layout, blocks, places, mark)
        copied = self._done(job, "store")
        return [sum_ for _, sum_ in sorted(zip(blocks, copied.checksums))]

    def load(self, arena, offsets, sums, mark):
        blocks, places = self.shuffled(offsets, 2)
        self._done(self.copies.load(arena, self.layout, blocks, places, [sums[block] for block in blocks], mark), "load")

    def _done(self, job, what):
        if not job.ended(LONGEST_S):
            raise RuntimeError(f"a {what} has not ended within {LONGEST_S:.0f} s")
        copied = job.take()
        if copied.bad:
            raise RuntimeError(f"a {what}: {len(copied.bad)} of {job.count} blocks are bad")
        return copied


def with_mark(kv, work):
    mark = kv.device.mark(kv.copies)
    try:
        return work(mark)
    finally:
        mark.close()


def same(torch, kv, wanted):
    if not all(torch.equal(raw, want) for raw, want in zip(kv.raw, wanted)):
        raise RuntimeError("what was loaded is not what was stored")


def one_layout(torch, kvtier, sizes, how):
    copies = kvtier.Copies(load_threads=2, store_threads=2)
    kv = Kv(torch, copies, sizes, LAYOUTS[how])
    payload_bytes = kv.layout.payload_bytes
    file = ArenaFile(kv.blocks, payload_bytes)
    arena = file.mapped(kvtier, copies)
    wait_for("pinning the arena", lambda: arena.refusal(0) is not None)
    if arena.refusal(0):
        raise RuntimeError(arena.refusal(0))
    wanted = [torch.randint(0, 256, (raw.shape[0],), dtype=torch.uint8, device="cuda:0") for raw in kv.raw]
    torch.cuda.synchronize(0)
    torch.cuda._sleep(BUSY_CYCLES)
    for raw, want in zip(kv.raw, wanted):
        raw.copy_(want)
    sums = with_mark(kv, lambda mark: kv.store(arena, file.offsets, mark))
    checked = copies.check(arena, payload_bytes, file.offsets, sums)
    kv._done(checked, "check")
    for block in {0, kv.blocks // 2, kv.blocks - 1}:
        if file.read(file.offsets[block], payload_bytes) != kv.payload(block):
            raise RuntimeError(f"block {block} lies in the arena in another order than in its tensors")
    for raw in kv.raw:
        raw.zero_()
    with_mark(kv, lambda mark: kv.load(arena, file.offsets, sums, mark))
    same(torch, kv, wanted)
    told_blocks(how, kv.blocks)
    rates(torch, kv, arena, file, sums, how)
    if how == list(LAYOUTS)[0]:
        beside_capture(torch, kvtier, copies, kv, sizes, wanted)
    same(torch, kv, wanted)
    arena.close()
    file.close()
    kv.layout.close()
    if not copies.close(LONGEST_S):
        raise RuntimeError("copies still ran when they were closed")


def rates(torch, kv, arena, file, sums, how):
    all_bytes = kv.blocks * kv.layout.payload_bytes
    host = torch.empty(all_bytes, dtype=torch.uint8, pin_memory=True)
    near = torch.empty(all_bytes, dtype=torch.uint8, device="cuda:0")

    def copy(target, source):
        target.copy_(source, non_blocking=True)
        torch.cuda.synchronize(0)

    what = f"{kv.layout.payload_bytes >> 10} KiB x {kv.blocks}, {how}"
    copy(host, near)  # pages
    out_us = median_us(lambda: copy(host, near))
    told_us(f"connector store {what}", median_us(lambda: with_mark(kv, lambda mark: kv.store(arena, file.offsets, mark))), out_us)
    in_us = median_us(lambda: copy(near, host))
    told_us(f"connector load {what}", median_us(lambda: with_mark(kv, lambda mark: kv.load(arena, file.offsets, sums, mark))), in_us)


def beside_capture(torch, kvtier, copies, kv, sizes, wanted):
    """A new arena is mapped and pinned, blocks go there and into other tensors, all of it while torch captures a graph in its strictest mode."""
    other = Kv(torch, copies, sizes, LAYOUTS[list(LAYOUTS)[0]])
    side, graph = torch.cuda.Stream(0), torch.cuda.CUDAGraph()
    captured = torch.zeros(1 << 10, dtype=torch.uint8, device="cuda:0")
    began, over, errors = threading.Event(), threading.Event(), []

    def work():
        try:
            began.wait(LONGEST_S)
            file = ArenaFile(kv.blocks, kv.layout.payload_bytes)
            arena = file.mapped(kvtier, copies)
            copies.layout(kv.parts, kv.blocks, 0).close()
            wait_for("pinning an arena beside a captured graph", lambda: arena.refusal(0) == "")
            mark = copies.mark(0, int(side.cuda_stream))
            other.load(arena, file.offsets, kv.store(arena, file.offsets, mark), mark)
            mark.close()
            arena.close()
            file.close()
        except Exception as error:  # told by the thread that captures
            errors.append(error)
        over.set()

    thread = threading.Thread(target=work)
    thread.start()
    with torch.cuda.graph(graph):
        began.set()
        over.wait(3 * LONGEST_S)
        captured.fill_(7)
    thread.join()
    if errors:
        raise errors[0]
    graph.replay()
    torch.cuda.synchronize(0)
    if not torch.equal(captured, torch.zeros(1 << 10, dtype=torch.uint8, device="cuda:0").fill_(7)):
        raise RuntimeError("a graph that was captured beside copies does something else")
    same(torch, other, wanted)
    told_blocks("beside a captured graph", kv.blocks)
    other.layout.close()


def main(arguments):
    why = missing()
    if why:
        print(f"the connector's copies were not run: {why}", file=sys.stderr)
        return 3
    import kvtier
    import torch

    sizes = tuple(map(int, arguments)) or (32, 256, 8, 128)
    try:
        for how in LAYOUTS:
            one_layout(torch, kvtier, sizes, how)
    except Exception as error:  # whatever it is, it is the case's line
        told({"case": "connector", "error": str(error).strip().split("\n")[0]})
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
