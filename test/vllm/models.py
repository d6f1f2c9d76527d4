"""Small models with random weights, in Hugging Face folders: every test knows what it runs. `python models.py KIND DIR [SEED]`

Source: as of engine.py.
"""
import sys

import torch
from transformers import AutoModelForCausalLM, Gemma3TextConfig, LlamaConfig, MistralConfig

vocab = 2048


def config_of(kind):
    common = dict(vocab_size=vocab, hidden_size=128, intermediate_size=256, num_hidden_layers=4, num_attention_heads=4,
                  num_key_value_heads=2, head_dim=32, max_position_embeddings=4096, bos_token_id=1, eos_token_id=2, pad_token_id=0)
    if kind == "llama":
        return LlamaConfig(**common, tie_word_embeddings=True)
    if kind == "llama-8k":  # for figures: long prompts, and 8 KiB of KV a token
        return LlamaConfig(**{**common, "hidden_size": 256, "intermediate_size": 768, "num_attention_heads": 4, "num_key_value_heads": 4,
                              "head_dim": 64, "max_position_embeddings": 16384}, tie_word_embeddings=True)
    if kind == "llama-long":  # for figures of hits: 4 KiB of KV a token, soon computed
        return LlamaConfig(**{**common, "num_attention_heads": 2, "head_dim": 64, "max_position_embeddings": 16384}, tie_word_embeddings=True)
    if kind == "gemma3":  # two groups: sliding windows of 96 tokens and full attention
        return Gemma3TextConfig(**common, sliding_window=96, query_pre_attn_scalar=32,
                                layer_types=["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"])
    if kind == "mistral-sw":  # nothing but a window
        return MistralConfig(**common, sliding_window=96, tie_word_embeddings=True)
    raise SystemExit(f"unknown kind {kind}")


def make(kind, folder, seed=1):
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config_of(kind), dtype=torch.float32)
    with torch.no_grad():
        for name, value in model.named_parameters():
            if value.dim() > 1:
                value.normal_(0, (0.05 if kind == "gemma3" else 0.6) if "embed" in name else 1.6 / value.shape[1] ** 0.5)
    model.save_pretrained(folder)
    return model


if __name__ == "__main__":
    make(sys.argv[1], sys.argv[2], int(sys.argv[3]) if len(sys.argv) > 3 else 1)
