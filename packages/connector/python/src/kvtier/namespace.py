"""The namespace: everything that two engines must have in common to share a block, as one digest (docs/formats.md, "Namespace")."""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Union

_Cbor = Union[int, str, bytes, None, "Sequence[_Cbor]", "Mapping[str, _Cbor]"]


def _head(major: int, value: int) -> bytes:
    for size, extra in ((1, 24), (2, 25), (4, 26), (8, 27)):
        if value < 24:
            return bytes([major << 5 | value])
        if value < 1 << (8 * size):
            return bytes([major << 5 | extra]) + value.to_bytes(size, "big")
    raise ValueError("a number beyond 64 bits")


def canonical_cbor(value: _Cbor) -> bytes:
    """RFC 8949, 4.2: shortest forms, keys sorted by their bytes. No negative numbers."""
    if value is None:
        return b"\xf6"
    if isinstance(value, int):
        return _head(0, value)
    if isinstance(value, bytes):
        return _head(2, len(value)) + value
    if isinstance(value, str):
        text = value.encode()
        return _head(3, len(text)) + text
    if isinstance(value, (list, tuple)):
        return _head(4, len(value)) + b"".join(canonical_cbor(item) for item in value)
    if isinstance(value, Mapping):
        pairs = sorted((canonical_cbor(key), canonical_cbor(item)) for key, item in value.items())
        return _head(5, len(pairs)) + b"".join(key + item for key, item in pairs)
    raise TypeError(f"{type(value).__name__} has no form in CBOR here")


@dataclass(frozen=True)
class Heads:
    """The KV heads that this engine holds, of all that the model has."""

    first: int
    count: int
    total: int


@dataclass(frozen=True)
class Namespace:
    model_digest: bytes
    kv_dtype: str
    block_tokens: int
    algorithm: str
    #: Root hash of the chains.
    root: bytes
    #: Fingerprint of the BlockLayout.
    layout: bytes
    #: Attention group.
    group: int = 0
    #: None: all of them.
    heads: Heads | None = None

    def digest(self) -> bytes:
        """32 bytes. Engines share a block only if they are equal."""
        heads = self.heads
        whole = heads is None or (heads.first == 0 and heads.count == heads.total)
        return hashlib.sha256(
            canonical_cbor(
                {
                    "format": "kvtier-namespace-1",
                    "modelDigest": self.model_digest,
                    "kvDtype": self.kv_dtype,
                    "blockTokens": self.block_tokens,
                    "algorithm": self.algorithm,
                    "root": self.root,
                    "group": self.group,
                    "layout": self.layout,
                    "heads": None if whole or heads is None else [heads.first, heads.count, heads.total],
                }
            )
        ).digest()


def fingerprint(format: str, fields: Mapping[str, _Cbor]) -> bytes:
    """SHA-256 of a canonical map under the name of its format."""
    return hashlib.sha256(canonical_cbor({"format": format, **fields})).digest()


#: Bytes of one number of a part.
NUMBER_BYTES = {"f32": 4, "f16": 2, "bf16": 2, "i32": 4, "i8": 1, "u8": 1, "e4m3": 1, "e5m2": 1, "e8m0": 1}
_ALIGNMENT = 16


@dataclass(frozen=True)
class Part:
    """What one layer of a block holds: for each token, or once a block. docs/formats.md, "Namespace"."""

    name: str
    #: One of NUMBER_BYTES; in a layout of another engine's own also what it calls it.
    dtype: str
    #: "token" or "block".
    per: str
    shape: tuple[int, ...]
    #: Dimensions, outermost first.
    order: str

    def bytes(self, block_tokens: int) -> int:
        """In one layer of a block."""
        tokens = {"token": block_tokens, "block": 1}[self.per]
        return math.prod(self.shape) * tokens * NUMBER_BYTES[self.dtype]


@dataclass(frozen=True)
class Layers:
    """Layers that follow one another and are alike."""

    count: int
    parts: tuple[Part, ...]
    #: Of one layer; None: what the parts take, and zeros up to whole pieces of 16 bytes.
    layer_bytes: int | None = None

    def bytes(self, block_tokens: int) -> int:
        """Of one layer."""
        if self.layer_bytes is not None:
            return self.layer_bytes
        return -(-sum(part.bytes(block_tokens) for part in self.parts) // _ALIGNMENT) * _ALIGNMENT


@dataclass(frozen=True)
class BlockLayout:
    """How the payload of a block lies in memory: its layers one after the other, each of all its parts. One format for every engine."""

    block_tokens: int
    layers: tuple[Layers, ...]
    #: Rank and ranks, where no range of KV heads says whose bytes these are.
    tensor_rank: tuple[int, int] = (0, 1)
    #: Stage and stages of a pipeline.
    stage: tuple[int, int] = (0, 1)
    #: Where parts do not say all: the engine that lays bytes out in a way of its own, and what of it gives them their meaning.
    engine: Mapping[str, _Cbor] | None = None

    @property
    def block_bytes(self) -> int:
        return sum(run.count * run.bytes(self.block_tokens) for run in self.layers)

    def fingerprint(self) -> bytes:
        """For `Namespace.layout`."""
        runs: list[_Cbor] = []
        counted: list[tuple[int, Layers]] = []
        for run in self.layers:
            if counted and dataclasses.replace(run, count=0) == dataclasses.replace(counted[-1][1], count=0):
                counted[-1] = (counted[-1][0] + run.count, run)
            else:
                counted.append((run.count, run))
        for count, run in counted:
            parts: list[_Cbor] = [[part.name, part.dtype, part.per, list(part.shape), part.order] for part in run.parts]
            runs.append([count, run.bytes(self.block_tokens), parts])
        return fingerprint(
            "kvtier-layout-3",
            {
                "blockTokens": self.block_tokens,
                "blockBytes": self.block_bytes,
                "layers": runs,
                "tensorRank": list(self.tensor_rank),
                "stage": list(self.stage),
                "engine": None if self.engine is None else dict(self.engine),
            },
        )
