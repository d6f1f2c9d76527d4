"""The peer of `bench hash`: vLLM's sha256_cbor over a prompt, in plain Python with hashlib and cbor2.

Reads commands from stdin, one JSON object a line: {"tokens": N, "blockTokens": B, "seed": S}; answers one JSON object a line:
{"nsPerBlock": ..., "last": hex of the last hash}. One process serves all rounds, so that start-up is not in the figures.
The tokens are a linear congruential sequence that bench/suites/hash.ts produces too.
"""

import hashlib
import json
import sys
import time

import cbor2


def prompt(count, seed):
    tokens = []
    state = seed
    for _ in range(count):
        state = (state * 1664525 + 1013904223) & 0xFFFFFFFF
        tokens.append((state >> 8) % 128_000)
    return tokens


def main():
    prompts = {}
    for line in sys.stdin:
        ask = json.loads(line)
        key = (ask["tokens"], ask["seed"])
        if key not in prompts:
            prompts[key] = prompt(*key)
        tokens, size = prompts[key], ask["blockTokens"]
        start = time.perf_counter_ns()
        parent = hashlib.sha256(cbor2.dumps("vllm-none-hash", canonical=True)).digest()
        for at in range(0, len(tokens) - size + 1, size):
            block = (parent, tuple(tokens[at : at + size]), None)
            parent = hashlib.sha256(cbor2.dumps(block, canonical=True)).digest()
        elapsed = time.perf_counter_ns() - start
        print(json.dumps({"nsPerBlock": elapsed / (len(tokens) // size), "last": parent.hex()}), flush=True)


if __name__ == "__main__":
    main()
