#!/usr/bin/env python3
"""Prefill attention beside torch's, at the same shapes on the same GPU in the same minutes: flash attention and cuDNN's.

kernel_bench's lines come in on stdin; for each figure of Attention v2 in bf16 torch runs the same shape, with
the same cold L2 cache, median of as many runs. Prints one line of JSON a figure, at once: ours, against torch's rate. What torch does
not take is a line with its error. New queries see a prefix by a causal mask that is aligned at its lower right. Exit code 3: torch or its
GPU is missing.
"""
import json
import re
import sys

HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128
REPEATS, FLUSH_BYTES = 21, 256 << 20
SHAPE = re.compile(r"^Attention v2 bf16, (\d+) x (\d+) queries over (\d+) tokens$")
BACKENDS = {"flash": "FLASH_ATTENTION", "cuDNN": "CUDNN_ATTENTION"}


def line(fields):
    return json.dumps(fields, separators=(",", ":"))  # as kernel_bench writes them, for verdicts.awk


def missing():
    try:
        import torch
    except ImportError:
        return "this python has no torch"
    return None if torch.cuda.is_available() else "torch sees no GPU"


def attention(torch, backend, sequences, queries, computed):
    """A call of one of torch's kernels. Grouped heads where it takes them, else keys repeated beforehand, at no cost."""
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.attention.bias import causal_lower_right
    from torch.nn.functional import scaled_dot_product_attention

    def noise(heads, tokens):
        return torch.randn(sequences, heads, tokens, HEAD_DIM, device="cuda", dtype=torch.bfloat16)

    q, k, v = noise(HEADS, queries), noise(KV_HEADS, computed + queries), noise(KV_HEADS, computed + queries)
    mask = {"is_causal": True} if computed == 0 else {"attn_mask": causal_lower_right(queries, computed + queries)}

    def call(k, v, **more):
        with sdpa_kernel(getattr(SDPBackend, BACKENDS[backend])):
            return scaled_dot_product_attention(q, k, v, **mask, **more)

    try:
        call(k, v, enable_gqa=True)
        return lambda: call(k, v, enable_gqa=True)
    except (RuntimeError, TypeError, ValueError, AssertionError, NotImplementedError):
        k, v = (x.repeat_interleave(HEADS // KV_HEADS, dim=1) for x in (k, v))
        call(k, v)
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
        print(f"torch's attention was not measured: {why}", file=sys.stderr)
        return 3
    import torch

    measured = 0
    for line_read in sys.stdin:
        try:
            ours = json.loads(line_read)
        except ValueError:
            continue  # the last line of a bench that was cut off may be half
        shape = SHAPE.match(ours.get("name", ""))
        if not shape or ours.get("unit") != "TFLOP/s":
            continue  # decodes and the like are held against the memory's speed
        sequences, queries, computed = map(int, shape.groups())
        flops = 4 * HEADS * HEAD_DIM * sequences * (queries * computed + 0.5 * queries * (queries + 1))
        for backend in BACKENDS:
            name = ours["name"].replace("Attention v2", f"Attention beside torch's {backend},")
            try:
                theirs = flops / median_us(torch, attention(torch, backend, sequences, queries, computed)) / 1e6
            except Exception as error:  # whatever it is, the next shape is measured
                print(line({"case": name, "error": str(error).strip().split("\n")[0]}), flush=True)
                continue
            measured += 1
            limit = f"torch {torch.__version__} {backend} attention"
            ratio = ours["value"] / theirs
            print(line({"name": name, "value": ours["value"], "unit": "TFLOP/s", "limit": theirs, "limitName": limit, "ratio": ratio}), flush=True)
            print(f"{name:56} {ours['value']:10.4g} TFLOP/s {100 * ratio:5.1f} % of {limit}", file=sys.stderr)
    if not measured:
        print("torch's attention was not measured: kernel_bench printed no Attention v2, or torch took no shape", file=sys.stderr)
        return 3
    return 0


if __name__ == "__main__":
    sys.exit(main())
