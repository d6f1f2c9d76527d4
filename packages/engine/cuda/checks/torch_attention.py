#!/usr/bin/env python3
"""Prefill attention beside torch's flash attention, at the same shapes on the same GPU in the same minutes.

kernel_bench's last line comes in on stdin; for each figure of Attention v2 in bf16 torch runs the same shape, with
the same cold L2 cache, median of as many runs. Prints one line of the project's figures: ours, against torch's rate. New
queries see a prefix by a causal mask that is aligned at its lower right. Exit code 3: torch or its GPU is missing.
"""
import json
import re
import sys

HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128
REPEATS, FLUSH_BYTES = 21, 256 << 20
SHAPE = re.compile(r"^Attention v2 bf16, (\d+) x (\d+) queries over (\d+) tokens$")


def missing():
    try:
        import torch
    except ImportError:
        return "this python has no torch"
    return None if torch.cuda.is_available() else "torch sees no GPU"


def flash(torch, sequences, queries, computed):
    """A call of torch's flash attention. Grouped heads where it takes them, else keys repeated beforehand, at no cost."""
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.attention.bias import causal_lower_right
    from torch.nn.functional import scaled_dot_product_attention

    def noise(heads, tokens):
        return torch.randn(sequences, heads, tokens, HEAD_DIM, device="cuda", dtype=torch.bfloat16)

    q, k, v = noise(HEADS, queries), noise(KV_HEADS, computed + queries), noise(KV_HEADS, computed + queries)
    mask = {"is_causal": True} if computed == 0 else {"attn_mask": causal_lower_right(queries, computed + queries)}

    def call(k, v, **more):
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            return scaled_dot_product_attention(q, k, v, **mask, **more)

    try:
        call(k, v, enable_gqa=True)
        return lambda: call(k, v, enable_gqa=True)
    except (RuntimeError, TypeError, ValueError, AssertionError, NotImplementedError):
        k, v = (x.repeat_interleave(HEADS // KV_HEADS, dim=1) for x in (k, v))
        return lambda: call(k, v)


def median_us(torch, work):
    flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device="cuda")
    times = []
    for i in range(REPEATS + 1):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        flush.fill_(i)
        start.record()
        work()
        end.record()
        end.synchronize()
        if i > 0:
            times.append(1000 * start.elapsed_time(end))
    return sorted(times)[REPEATS // 2]


def main():
    why = missing()
    if why:
        print(f"torch's flash attention was not measured: {why}", file=sys.stderr)
        return 3
    import torch

    figures = []
    for ours in json.loads(sys.stdin.read().strip().splitlines()[-1])["figures"]:
        shape = SHAPE.match(ours["name"])
        if not shape or ours["unit"] != "TFLOP/s":
            continue  # decodes and the like are held against the memory's speed
        sequences, queries, computed = map(int, shape.groups())
        us = median_us(torch, flash(torch, sequences, queries, computed))
        flops = 4 * HEADS * HEAD_DIM * sequences * (queries * computed + 0.5 * queries * (queries + 1))
        theirs = flops / us / 1e6
        name = ours["name"].replace("Attention v2", "Attention beside torch,")
        limit = f"torch {torch.__version__} flash attention"
        figures.append({"name": name, "value": ours["value"], "unit": "TFLOP/s", "limit": theirs, "limitName": limit, "ratio": ours["value"] / theirs})
        print(f"{name:56} {ours['value']:10.4g} TFLOP/s {100 * ours['value'] / theirs:5.1f} % of {limit}", file=sys.stderr)
    if not figures:
        print("torch's flash attention was not measured: kernel_bench printed no Attention v2", file=sys.stderr)
        return 3
    print(json.dumps({"suite": "gpu-torch", "figures": figures}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
