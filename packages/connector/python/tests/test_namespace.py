"""The namespace, byte for byte what kvtier's own engine makes of the same."""

from __future__ import annotations

import dataclasses
import json
import unittest
from pathlib import Path

from kvtier import Heads, Namespace, fingerprint
from kvtier.namespace import Part, PartsLayout

GOLDEN = Path(__file__).resolve().parents[3] / "base/identity/golden/namespaces.json"
LAYOUTS = GOLDEN.with_name("layouts.json")
MODEL, ROOT = b"\x01" * 32, b"\x02" * 32
LAYOUT = {
    "layers": 2,
    "kvHeads": 4,
    "headDim": 64,
    "dtype": "bf16",
    "blockTokens": 16,
    "blockBytes": 32768,
    "order": "layer,kv,head,token,dim",
}


class Golden(unittest.TestCase):
    def test_the_digests_are_those_of_the_engine(self) -> None:
        golden = json.loads(GOLDEN.read_text())
        layout = fingerprint("kvtier-layout-1", LAYOUT)
        whole = Namespace(MODEL, "bf16", 16, "sha256_cbor", ROOT, layout)
        sharded = dataclasses.replace(whole, group=1, heads=Heads(2, 2, 4))
        self.assertEqual(
            {"layout": layout.hex(), "namespace": whole.digest().hex(), "sharded": sharded.digest().hex()}, golden
        )
        self.assertEqual(dataclasses.replace(whole, heads=Heads(0, 4, 4)).digest(), whole.digest())

    def test_every_field_separates(self) -> None:
        one = Namespace(MODEL, "bf16", 16, "sha256_cbor", ROOT, ROOT)
        others = [
            dataclasses.replace(one, **change)
            for change in (
                {"model_digest": ROOT},
                {"kv_dtype": "f16"},
                {"block_tokens": 32},
                {"algorithm": "sha256"},
                {"root": MODEL},
                {"layout": MODEL},
                {"group": 1},
                {"heads": Heads(0, 1, 2)},
                {"heads": Heads(1, 1, 2)},
            )
        ]
        digests = {namespace.digest() for namespace in [one, *others]}
        self.assertEqual(len(digests), len(others) + 1)

    def test_layouts_of_parts_have_the_engines_digests(self) -> None:
        for one in json.loads(LAYOUTS.read_text()):
            said = one["layout"]
            parts = tuple(Part(p["name"], p["dtype"], p["per"], tuple(p["shape"]), p["order"]) for p in said["parts"])
            layout = PartsLayout(said["layers"], said["blockTokens"], parts, tuple(said["tensorRank"]))
            heads = Heads(*one["heads"]) if one["heads"] else None
            tokens, dtype = said["blockTokens"], parts[0].dtype
            namespace = Namespace(MODEL, dtype, tokens, "sha256_cbor", ROOT, layout.fingerprint(), heads=heads)
            with self.subTest(one["name"]):
                self.assertEqual((layout.layer_bytes, layout.block_bytes), (one["layerBytes"], one["blockBytes"]))
                self.assertEqual(layout.fingerprint().hex(), one["fingerprint"])
                self.assertEqual(namespace.digest().hex(), one["namespace"])


if __name__ == "__main__":
    unittest.main()
