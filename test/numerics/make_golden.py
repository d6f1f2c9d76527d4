"""Golden logits from Hugging Face transformers, for packages/engine/executor's CPU backend.

Each case is a small random model in golden/NAME/ (config.json, model.safetensors) with golden.json: a prompt, and the
fp32 logits of transformers at a few positions. Run with a Python that has torch and transformers:

    .cache/torch-venv/bin/python test/numerics/make_golden.py [NAME ...]       rewrites the golden folders
    .cache/torch-venv/bin/python test/numerics/make_golden.py --logits DIR     prints logits of any model, for the live test
                                                                               (stdin: {"tokens", "positions"})
"""

import json
import pathlib
import sys

import torch
from transformers import (AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM,
                          Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM, Gemma3TextConfig,
                          Gemma3ForCausalLM, Gemma3Config, Gemma3ForConditionalGeneration, MinistralConfig,
                          MinistralForCausalLM)

SHAPE = dict(vocab_size=160, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
             num_key_value_heads=2, max_position_embeddings=512, rms_norm_eps=1e-5, bos_token_id=1, eos_token_id=2)
LLAMA3 = dict(rope_type="llama3", rope_theta=10000.0, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
              original_max_position_embeddings=64)
YARN = dict(rope_type="yarn", rope_theta=10000.0, factor=4.0, original_max_position_embeddings=128)

CASES = {
    "llama": (LlamaForCausalLM, LlamaConfig(**SHAPE), "float32"),
    "llama-bias-linear": (LlamaForCausalLM, LlamaConfig(**SHAPE, attention_bias=True, tie_word_embeddings=True,
                          rope_parameters=dict(rope_type="linear", rope_theta=10000.0, factor=2.0)), "float16"),
    "llama3-rope": (LlamaForCausalLM, LlamaConfig(**{**SHAPE, "num_key_value_heads": 1}, rope_parameters=LLAMA3), "bfloat16"),
    "mistral-window": (MistralForCausalLM, MistralConfig(**SHAPE, head_dim=32, sliding_window=24), "bfloat16"),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config(**{**SHAPE, "num_hidden_layers": 3}, tie_word_embeddings=True), "bfloat16"),
    "qwen3-yarn": (Qwen3ForCausalLM, Qwen3Config(**SHAPE, head_dim=32, tie_word_embeddings=True, rope_parameters=YARN),
                   "bfloat16"),
    # Windows shorter than the prompt, in some layers and in others not.
    "gemma3": (Gemma3ForCausalLM, Gemma3TextConfig(**{**SHAPE, "num_hidden_layers": 4, "intermediate_size": 64}, head_dim=16,
               sliding_window=20, layer_types=["sliding_attention", "sliding_attention", "full_attention",
                                               "sliding_attention"],
               query_pre_attn_scalar=24, final_logit_softcapping=8.0,
               rope_parameters=dict(sliding_attention=dict(rope_type="default", rope_theta=1000.0),
                                    full_attention=dict(rope_type="linear", rope_theta=50000.0, factor=4.0))), "bfloat16"),
    "ministral-mixed": (MinistralForCausalLM, MinistralConfig(**{**SHAPE, "num_hidden_layers": 4, "intermediate_size": 64},
                        head_dim=16, sliding_window=24,
                        layer_types=["full_attention", "sliding_attention"] * 2), "bfloat16"),
    # The text model of one with a vision tower, as small as that gets; the layers' kinds follow from the pattern.
    "gemma3-vision": (Gemma3ForConditionalGeneration, Gemma3Config(
        text_config=dict({**SHAPE, "num_hidden_layers": 6, "intermediate_size": 32, "hidden_size": 32}, head_dim=16,
                         sliding_window=20, query_pre_attn_scalar=16),
        vision_config=dict(hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1, image_size=28,
                           patch_size=14), mm_tokens_per_image=4, image_token_index=SHAPE["vocab_size"] - 1),
        "bfloat16"),
}
TOKENS = 97


def logits_of(model, tokens, positions):
    with torch.no_grad():
        rows = model.float()(torch.tensor([tokens])).logits[0]
    return [rows[p].tolist() for p in positions]


def load(folder):
    kind = json.loads((pathlib.Path(folder) / "config.json").read_text())["architectures"][0]
    auto = Gemma3ForConditionalGeneration if kind == "Gemma3ForConditionalGeneration" else AutoModelForCausalLM
    return auto.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")


def main():
    root = pathlib.Path(__file__).parent / "golden"
    for seed, (name, (cls, config, dtype)) in enumerate(CASES.items()):
        if sys.argv[1:] and name not in sys.argv[1:]:
            continue
        torch.manual_seed(seed)
        model = cls(config)
        generator = torch.Generator().manual_seed(seed)
        for key, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            # Norms around one, biases that matter, matrices that keep the variance: every path must show in the logits.
            scale = 0.2 if parameter.dim() == 1 else parameter.shape[-1] ** -0.5
            parameter.data = noise * scale + (1.0 if "norm" in key else 0.0)
        folder = root / name
        model.to(getattr(torch, dtype)).save_pretrained(folder, max_shard_size="60KB" if name == "qwen2" else "1GB")
        (folder / "generation_config.json").unlink(missing_ok=True)
        tokens = torch.randint(3, SHAPE["vocab_size"], (TOKENS,), generator=generator).tolist()
        positions = [0, 15, 16, 40, 63, TOKENS - 2, TOKENS - 1]
        golden = dict(tokens=tokens, positions=positions, logits=logits_of(load(folder), tokens, positions))
        golden["logits"] = [[float(f"{x:.7g}") for x in row] for row in golden["logits"]]
        (folder / "golden.json").write_text(json.dumps(golden))
        print(name, sum(f.stat().st_size for f in folder.iterdir()), "bytes")


if len(sys.argv) == 3 and sys.argv[1] == "--logits":
    asked = json.load(sys.stdin)
    print(json.dumps(logits_of(load(sys.argv[2]), asked["tokens"], asked["positions"])))
else:
    main()
