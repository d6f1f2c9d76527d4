"""Writes python.json: what CPython's pickle and cbor2 give for values that vLLM's vectors do not reach.

Run: /usr/bin/python3 packages/base/identity/golden/python.py   (needs python3-cbor2)
Texts of more than one character are built anew at each place, as in vLLM, so that none is the same object twice.
"""

import json
import pickle
from pathlib import Path

import cbor2

VALUES = [
    [{"hex": "01" * 16}, [1, 2], ["a", ["a", 5], "bb", ["bb", -3]]],
    [{"hex": "02" * 32}, [1, 2, 3, 4, 70000, 2**31, 2**32 - 1, 2**53 - 1], ["x", "", "é", "y" * 300, "é", "", "x"]],
    ["\u0100", "\u0100", "z", None, []],
    [-1, -256, -257, -(2**31), -(2**31) - 1, -(2**53) + 1, 255, 256, 65535, 65536, 2**31 - 1],
    [{"hex": "03" * 300}, [], [[]], [[1], [1, 2], [1, 2, 3]]],
]


def build(value):
    if isinstance(value, list):
        return tuple(build(item) for item in value)
    if isinstance(value, dict):
        return bytes.fromhex(value["hex"])
    if isinstance(value, str) and len(value) > 0:
        return value.encode().decode()
    return value


cases = [
    {"value": v, "pickle": pickle.dumps(build(v), 5).hex(), "cbor": cbor2.dumps(build(v), canonical=True).hex()}
    for v in VALUES
]
Path(__file__).with_suffix(".json").write_text(json.dumps(cases, indent=1, ensure_ascii=True) + "\n")
