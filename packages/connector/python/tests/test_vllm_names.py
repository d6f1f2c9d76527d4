"""Which engines share blocks: every single difference that gives bytes another meaning gives them other names; no node."""

from __future__ import annotations

import os
import types
import unittest
from typing import Any

os.environ.setdefault("KVTIER_WITHOUT_VLLM", "1")

from engine_memory import make_layers
from engine_parts import FullAttentionSpec, MLAAttentionSpec
from kvtier.vllm import identity, layouts
from kvtier.vllm.groups import Unsupported, groups_of
from kvtier.vllm.messages import KvtierHandshake, Rank

BLOCKS, TOKENS = 5, 4
ROOT = b"\x11" * 32


class Engine:
    """A configuration, by what sets it apart from the plainest one."""

    def __init__(self, **but: Any) -> None:
        self.but = {
            "cache_dtype": "auto", "dtype": "torch.bfloat16", "quantization": None, "backend": "FLASH_ATTN", "tp": 1, "heads": 8,
            "pp": 1, "algorithm": "sha256", "scales": False, "encoder": False, "speculative": None, "version": "0.27.1",
            "device": "cuda", "hf": {"layers": 2}, "layout": "nhd", "names": ["a.0", "a.1"], "weights": b"w" * 32,
            "generation": b"", "mla": False, "kind": "block", **but,
        }
        get = self.but.__getitem__
        backend = types.SimpleNamespace(get_name=lambda: get("backend"))
        layer = types.SimpleNamespace(get_attn_backend=lambda: backend)
        self.config = types.SimpleNamespace(
            parallel_config=types.SimpleNamespace(tensor_parallel_size=get("tp"), pipeline_parallel_size=get("pp"), rank=0),
            cache_config=types.SimpleNamespace(
                cache_dtype=get("cache_dtype"), prefix_caching_hash_algo=get("algorithm"), block_size=TOKENS,
                calculate_kv_scales=get("scales"),
            ),
            model_config=types.SimpleNamespace(
                dtype=get("dtype"), quantization=get("quantization"), hf_config=types.SimpleNamespace(**get("hf")),
                is_encoder_decoder=get("encoder"), get_total_num_kv_heads=lambda: get("heads"),
            ),
            speculative_config=get("speculative"),
            compilation_config=types.SimpleNamespace(static_forward_context={name: layer for name in get("names")}),
        )

    def names(self, **more: Any) -> list[bytes]:
        """Of its shares."""
        but, config = {**self.but, **more}, self.config
        identity.check_supported(config)
        kind = MLAAttentionSpec if but["mla"] else FullAttentionSpec
        heads = 1 if but["mla"] else max(1, but["heads"] // but["tp"])
        spec = kind(block_size=TOKENS, page_size_bytes=TOKENS * heads * 12, sliding_window=None)
        made = types.SimpleNamespace(kv_cache_groups=[types.SimpleNamespace(layer_names=but["names"], kv_cache_spec=spec)])
        groups = groups_of(made, TOKENS, identity.uses_eagle(config))
        tensors = {name: one.tensor for name, one in make_layers(but["layout"], but["names"], BLOCKS, TOKENS, heads, 3).items()}
        (views,) = layouts.views_of(groups, tensors, BLOCKS)
        told: dict[Rank, KvtierHandshake] = {}
        for stage in range(but["pp"]):
            layout = identity.group_layout(config, groups[0], views, but["device"], but["version"], stage)
            for rank in range(but["tp"]):
                told[stage, rank] = KvtierHandshake((stage, rank), "", (layouts.payload_bytes(views),), (layout.fingerprint(),))
        model = identity.model_digest(config, but["weights"], but["generation"])
        return [share.namespace for share in identity.shares_of(config, groups, told, model, but.get("root", ROOT))]


class Names(unittest.TestCase):
    def test_one_difference_is_another_name(self) -> None:
        speculative = types.SimpleNamespace(method="eagle", use_eagle=lambda: True)
        engines = {
            "the plainest": Engine(),
            "fp8": Engine(cache_dtype="fp8"),
            "fp8 e5m2": Engine(cache_dtype="fp8_e5m2"),
            "fp8 e4m3": Engine(cache_dtype="fp8_e4m3"),
            "fp8 scaled per token": Engine(cache_dtype="fp8_per_token_head"),
            "float16": Engine(dtype="torch.float16"),
            "KV of bfloat16 beside numbers of float16": Engine(dtype="torch.float16", cache_dtype="torch.bfloat16"),
            "awq": Engine(quantization="awq"),
            "gptq": Engine(quantization="gptq"),
            "another backend": Engine(backend="FLASHINFER"),
            "another hash": Engine(algorithm="xxhash"),
            "another configuration": Engine(hf={"layers": 3}),
            "another minor version": Engine(version="0.28.0"),
            "another kind of GPU": Engine(device="xpu"),
            "other layers": Engine(names=["b.0", "b.1"]),
            "other order of bytes": Engine(layout="hnd"),
            "other weights": Engine(weights=b"v" * 32),
            "another generation": Engine(generation=b"1" * 16),
            "another root": Engine(root=b"\x12" * 32),
            "speculation": Engine(speculative=speculative),
            "latent": Engine(mla=True),
        }
        named: dict[bytes, str] = {}
        for name, engine in engines.items():
            for one in engine.names():
                self.assertNotIn(one, named, f"{name} has the names of {named.get(one)}")
                named[one] = name
        self.assertEqual(Engine().names(), Engine(version="0.27.9").names())  # within a minor version all share

    def test_ranks(self) -> None:
        """Heads of their own, or replicated: the number of ranks is part of the name; a latent is the same in all of them."""
        whole, split = Engine().names(), Engine(tp=2).names()
        self.assertEqual((len(whole), len(set(split))), (1, 2))
        self.assertFalse(set(whole) & set(split))
        few, many = Engine(tp=8, heads=4).names(), Engine(tp=16, heads=4).names()
        self.assertEqual((len(set(few)), len(set(many))), (4, 4))
        self.assertFalse(set(few) & set(many), "ranks that hold a head in other company share its blocks")
        self.assertEqual(Engine(mla=True, tp=2).names(), Engine(mla=True).names())
        self.assertEqual(len(set(Engine(pp=2, tp=2).names())), 4)

    def test_what_is_refused(self) -> None:
        with self.assertRaisesRegex(Unsupported, "calculate_kv_scales"):
            Engine(scales=True).names()
        with self.assertRaisesRegex(Unsupported, "encoder-decoder"):
            Engine(encoder=True).names()
        with self.assertRaisesRegex(Unsupported, "3 KV heads over 2 tensor ranks"):
            Engine(heads=3, tp=2).names()
        engine = Engine(tp=8, heads=4)
        groups = groups_of(
            types.SimpleNamespace(kv_cache_groups=[types.SimpleNamespace(
                layer_names=["a"], kv_cache_spec=FullAttentionSpec(block_size=TOKENS, page_size_bytes=48, sliding_window=None)
            )]), TOKENS, False,
        )
        told = {(0, rank): KvtierHandshake((0, rank), "", (48,), (bytes([rank % 2]) * 32,)) for rank in range(8)}
        with self.assertRaisesRegex(Unsupported, "in different layouts"):
            identity.shares_of(engine.config, groups, told, b"", ROOT)

    def test_eagle(self) -> None:
        def said(use_eagle: Any) -> bool:
            return identity.uses_eagle(types.SimpleNamespace(speculative_config=types.SimpleNamespace(use_eagle=use_eagle)))

        self.assertFalse(identity.uses_eagle(types.SimpleNamespace(speculative_config=None)))
        self.assertEqual([said(lambda: True), said(lambda: False), said(True), said(None)], [True, False, True, False])
        self.assertTrue(said(lambda: 1 / 0))  # it cannot be told: the last block of a hit is not counted on
        spec = FullAttentionSpec(block_size=TOKENS, page_size_bytes=48, sliding_window=None)
        made = types.SimpleNamespace(kv_cache_groups=[types.SimpleNamespace(layer_names=["a"], kv_cache_spec=spec)])
        self.assertEqual([groups_of(made, TOKENS, eagle)[0].drops_last for eagle in (True, False)], [True, False])


if __name__ == "__main__":
    unittest.main()
