"""Which tensor ranks are one share: those that hold the same KV heads, and no others; no node."""

from __future__ import annotations

import types
import unittest
from typing import Any

from engine_parts import FullAttentionSpec, SlidingWindowSpec
from kvtier.vllm import identity
from kvtier.vllm.groups import groups_of
from kvtier.vllm.messages import KvtierHandshake
from test_vllm_names import ROOT, TOKENS, Engine


class Shares(unittest.TestCase):
    def held(self, hf: dict[str, Any], tp: int, rank_heads: int = 1, draft: Any = None, layers: Any = None) -> list[Any]:
        """Per group, a full one and one with windows, the ranks of its shares: of four heads, all ranks with as many bytes."""
        engine = Engine(hf=hf, tp=tp, heads=4)
        if draft is not None:
            number, of_layers, said = draft if isinstance(draft, tuple) else (draft, None, {})
            of_draft = types.SimpleNamespace(
                get_total_num_kv_heads=lambda: number,
                model_arch_config=types.SimpleNamespace(per_layer_overrides=of_layers),
                hf_config=types.SimpleNamespace(**said),
            )
            engine.config.speculative_config = types.SimpleNamespace(method="eagle", draft_model_config=of_draft)
        engine.config.model_config.model_arch_config = types.SimpleNamespace(per_layer_overrides=layers)
        specs = (
            FullAttentionSpec(block_size=TOKENS, page_size_bytes=48, sliding_window=None, num_kv_heads=1),
            SlidingWindowSpec(block_size=TOKENS, page_size_bytes=48, sliding_window=9, num_kv_heads=rank_heads),
        )
        made = [types.SimpleNamespace(layer_names=[f"a.{i}"], kv_cache_spec=spec) for i, spec in enumerate(specs)]
        groups = groups_of(types.SimpleNamespace(kv_cache_groups=made), TOKENS, False)
        told = {(0, rank): KvtierHandshake((0, rank), "", (48, 48), (b"l" * 32, b"m" * 32)) for rank in range(tp)}
        shares = identity.shares_of(engine.config, groups, told, b"", ROOT)
        self.assertEqual(len({share.namespace for share in shares}), len(shares))
        return [[[rank for _, rank in share.ranks] for share in shares if share.group.index == i] for i in range(2)]

    def test_ranks_are_one_share_only_where_all_layers_have_as_many_heads(self) -> None:
        own = [[rank] for rank in range(8)]
        pairs = [[0, 1], [2, 3], [4, 5], [6, 7]]
        blocks = [types.SimpleNamespace(attention=types.SimpleNamespace(n_heads_in_group=n, no_op=None)) for n in (8, 4)]
        for name, hf in {
            "windows have eight, as MiMo-V2's": {"num_key_value_heads": 4, "swa_num_key_value_heads": 8},
            "other layers have two, as Gemma 4's": {"num_key_value_heads": 4, "num_global_key_value_heads": 2},
            "said in a part, as Step-3.5 does": {"num_attention_groups": 4, "attention_other_setting": {"num_attention_groups": 8}},
            "said by layers": {"num_kv_heads": [4, 8, 4]},
            "said by blocks": {"num_attention_heads": 32, "block_configs": blocks},
            "said twice": {"num_key_value_heads": 4, "num_kv_heads": 8},
        }.items():
            with self.subTest(name):
                self.assertEqual(self.held(hf, 8), [own, own])
        for name, hf in {
            "all layers alike": {"num_key_value_heads": 4},
            "with windows as Gemma 3 has them": {"num_key_value_heads": 4, "layer_types": ["full_attention"], "sliding_window": 9},
            "said by layers, all alike": {"num_kv_heads": [4, 4]},
            "windows have as many": {"num_key_value_heads": 4, "swa_num_key_value_heads": 4},
            "none are said of other layers": {"num_key_value_heads": 4, "num_global_key_value_heads": None},
            "those of an encoder": {"num_key_value_heads": 4, "image_num_key_value_heads": 16, "vision_config": {"num_kv_heads": 16}},
            "vLLM knows better, as Falcon's": {"num_kv_heads": 71, "multi_query": True},
            "bytes of a head": {"num_key_value_heads": 4, "kv_head_dim": 64},
            "blocks alike": {"num_attention_heads": 32, "block_configs": blocks[:1]},
        }.items():
            with self.subTest(name):
                self.assertEqual(self.held(hf, 8), [pairs, pairs])
        alike = {"num_key_value_heads": 4}
        self.assertEqual(self.held(alike, 8, rank_heads=2), [pairs, own])
        self.assertEqual([self.held(alike, 8, draft=n) == [own, own] for n in (8, 4, 0)], [True, False, False])
        # vLLM says of a model with other layers the most that any of them has.
        mixed = {"num_key_value_heads": 4, "swa_num_key_value_heads": 2}
        for drafted, shared in (
            ((4, [{}, {"total_num_kv_heads": 2}], {}), own),
            ((4, None, mixed), own),
            ((4, [{}, {"head_size": 8}], alike), pairs),
            ((0, None, mixed), pairs),  # no attention, as Medusa's
        ):
            self.assertEqual(self.held(alike, 8, draft=drafted), [shared, shared], drafted)
        self.assertEqual(self.held(alike, 8, layers=[{}, {"total_num_kv_heads": 8}]), [own, own])
        self.assertEqual(self.held(alike, 8, layers=[{}, {"head_size": 8}]), [pairs, pairs])
        # With no more ranks than heads each has its own anyway.
        self.assertEqual(self.held({"num_key_value_heads": 4, "swa_num_key_value_heads": 8}, 4), [own[:4], own[:4]])


if __name__ == "__main__":
    unittest.main()
