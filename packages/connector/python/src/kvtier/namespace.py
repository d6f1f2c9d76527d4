"""The namespace: everything that two engines must have in common to share a block, as one digest (docs/formats.md, "Namespace")."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Union

_Cbor = Union[int, str, bytes, None, "list[_Cbor]", "dict[str, _Cbor]"]


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
    if isinstance(value, list):
        return _head(4, len(value)) + b"".join(canonical_cbor(item) for item in value)
    pairs = sorted((canonical_cbor(key), canonical_cbor(item)) for key, item in value.items())
    return _head(5, len(pairs)) + b"".join(key + item for key, item in pairs)


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
    #: SHA-256 of everything that says how a payload lies in memory.
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


def fingerprint(format: str, fields: dict[str, _Cbor]) -> bytes:
    """SHA-256 of a canonical map under the name of its format: of a layout that is not kvtier's own."""
    return hashlib.sha256(canonical_cbor({"format": format, **fields})).digest()
