"""The namespace, byte for byte what kvtier's own engine makes of the same."""

from __future__ import annotations

import dataclasses
import json
import unittest
from pathlib import Path
from typing import Any

from kvtier import Heads, Namespace
from kvtier.namespace import BlockLayout, Layers, Part

GOLDEN = Path(__file__).resolve().parents[3] / "base/identity/golden/namespaces.json"
LAYOUTS = GOLDEN.with_name("layouts.json")
MODEL, ROOT = b"\x01" * 32, b"\x02" * 32
LAYOUT = BlockLayout(16, (Layers(2, tuple(Part(name, "bf16", "token", (4, 64), "head,token,dim") for name in ("keys", "values"))),))


class Golden(unittest.TestCase):
    def test_the_digests_are_those_of_the_engine(self) -> None:
        golden = json.loads(GOLDEN.read_text())
        layout = LAYOUT.fingerprint()
        self.assertEqual(LAYOUT.block_bytes, 32768)
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

    def test_layouts_have_the_engines_digests(self) -> None:
        for one in json.loads(LAYOUTS.read_text()):
            layout = layout_of(one["layout"])
            heads = Heads(*one["heads"]) if one["heads"] else None
            tokens, dtype = layout.block_tokens, layout.layers[0].parts[0].dtype
            namespace = Namespace(MODEL, dtype, tokens, "sha256_cbor", ROOT, layout.fingerprint(), heads=heads)
            with self.subTest(one["name"]):
                self.assertEqual([run.bytes(tokens) for run in layout.layers], one["layerBytes"])
                self.assertEqual(layout.block_bytes, one["blockBytes"])
                self.assertEqual(layout.fingerprint().hex(), one["fingerprint"])
                self.assertEqual(namespace.digest().hex(), one["namespace"])

    def test_layers_have_one_digest_however_they_are_counted(self) -> None:
        parts = LAYOUT.layers[0].parts
        for counts in ((1, 1), (2,)):
            layout = dataclasses.replace(LAYOUT, layers=tuple(Layers(count, parts) for count in counts))
            self.assertEqual(layout.fingerprint(), LAYOUT.fingerprint())
        others = [
            dataclasses.replace(LAYOUT, layers=(Layers(1, parts), Layers(1, parts[:1]))),
            dataclasses.replace(LAYOUT, layers=(Layers(2, parts, 16384 + 16),)),
            dataclasses.replace(LAYOUT, engine={"name": "another"}),
            dataclasses.replace(LAYOUT, stage=(0, 2)),
            dataclasses.replace(LAYOUT, tensor_rank=(0, 2)),
        ]
        self.assertEqual(len({one.fingerprint() for one in [LAYOUT, *others]}), len(others) + 1)


def layout_of(said: Any) -> BlockLayout:
    def part(p: Any) -> Part:
        return Part(p["name"], p["dtype"], p["per"], tuple(p["shape"]), p["order"])

    return BlockLayout(
        said["blockTokens"],
        tuple(Layers(run["count"], tuple(part(p) for p in run["parts"])) for run in said["layers"]),
        tuple(said.get("tensorRank", (0, 1))),
        tuple(said.get("stage", (0, 1))),
        said.get("engine"),
    )


if __name__ == "__main__":
    unittest.main()
