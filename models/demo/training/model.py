# SPDX-License-Identifier: Apache-2.0
"""The model: a LlamaForCausalLM in plain torch, for training and for evaluation without transformers.

The parameter names are those of transformers' LlamaModel; the head is the embedding.
"""
import torch
import torch.nn as nn
import torch.nn.functional as F

from .tokens import BOS, EOS, PAD

MAX_POSITIONS = 8192


def config(vocab_size, head_dim=64, layers=4, rope_theta=1e8):
    """config.json. There are four heads, because start.py gives each head of a layer its own part.

    A large rope_theta leaves more rotary pairs that hardly turn over the longest prompt: words far
    apart are compared in those.
    """
    return {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": vocab_size,
        "hidden_size": 4 * head_dim, "intermediate_size": 8 * head_dim, "num_hidden_layers": layers,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": head_dim,
        "hidden_act": "silu", "rms_norm_eps": 1e-5, "max_position_embeddings": MAX_POSITIONS,
        "rope_theta": rope_theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": rope_theta},
        "tie_word_embeddings": True, "attention_bias": False, "mlp_bias": False,
        "attention_dropout": 0.0, "initializer_range": 0.02, "use_cache": True,
        "pad_token_id": PAD, "bos_token_id": BOS, "eos_token_id": EOS, "dtype": "bfloat16",
        "torch_dtype": "bfloat16"}


class Norm(nn.Module):
    def __init__(self, dim, eps):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(dim)), eps

    def forward(self, x):
        return F.rms_norm(x, x.shape[-1:], self.weight.to(x.dtype), self.eps)


class Attention(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.h, self.kv, self.d = c["num_attention_heads"], c["num_key_value_heads"], c["head_dim"]
        w = c["hidden_size"]
        self.q_proj = nn.Linear(w, self.h * self.d, bias=False)
        self.k_proj = nn.Linear(w, self.kv * self.d, bias=False)
        self.v_proj = nn.Linear(w, self.kv * self.d, bias=False)
        self.o_proj = nn.Linear(self.h * self.d, w, bias=False)

    def forward(self, x, cos, sin, columns=None):
        """columns: those that attend (all without it); every column is attended to."""
        b, t, _ = x.shape
        asking, at = (x, slice(None)) if columns is None else (x[:, columns], columns)

        def split(y, n):
            return y.view(b, -1, n, self.d).transpose(1, 2)

        def rope(y, at):                            # the two halves, as transformers does it
            y1, y2 = y.chunk(2, dim=-1)
            c, s = cos[at].to(y.dtype), sin[at].to(y.dtype)
            return torch.cat((y1 * c - y2 * s, y2 * c + y1 * s), dim=-1)
        q, k = rope(split(self.q_proj(asking), self.h), at), rope(split(self.k_proj(x), self.kv), slice(None))
        v = split(self.v_proj(x), self.kv)
        g = self.h // self.kv
        k, v = k.repeat_interleave(g, dim=1), v.repeat_interleave(g, dim=1)
        if columns is None:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)   # flash attention in bf16 on cuda
        else:
            seen = columns[:, None] >= torch.arange(t, device=x.device)
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=seen)
        return self.o_proj(y.transpose(1, 2).reshape(b, q.shape[2], -1))


class MLP(nn.Module):
    def __init__(self, c):
        super().__init__()
        w, m = c["hidden_size"], c["intermediate_size"]
        self.gate_proj, self.up_proj = nn.Linear(w, m, bias=False), nn.Linear(w, m, bias=False)
        self.down_proj = nn.Linear(m, w, bias=False)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.self_attn, self.mlp = Attention(c), MLP(c)
        self.input_layernorm = Norm(c["hidden_size"], c["rms_norm_eps"])
        self.post_attention_layernorm = Norm(c["hidden_size"], c["rms_norm_eps"])

    def forward(self, x, cos, sin, columns=None):
        y = self.self_attn(self.input_layernorm(x), cos, sin, columns)
        x = (x if columns is None else x[:, columns]) + y
        return x + self.mlp(self.post_attention_layernorm(x))


class Llama(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.config = c
        self.embed_tokens = nn.Embedding(c["vocab_size"], c["hidden_size"])
        self.layers = nn.ModuleList(Block(c) for _ in range(c["num_hidden_layers"]))
        self.norm = Norm(c["hidden_size"], c["rms_norm_eps"])
        ang = torch.outer(torch.arange(c["max_position_embeddings"]).float(), rotations(c))
        self.register_buffer("cos", ang.cos(), persistent=False)
        self.register_buffer("sin", ang.sin(), persistent=False)

    def forward(self, tokens, columns=None):
        """The final hidden states of the columns (a tensor of indices; all without it); logits only where they
        are needed (see below). The last layer, then, computes no others: a fifth of a step over a long table."""
        t = tokens.shape[1]
        cos, sin = self.cos[:t], self.sin[:t]
        h = self.embed_tokens(tokens)
        for layer in self.layers[:-1]:
            h = layer(h, cos, sin)
        return self.norm(self.layers[-1](h, cos, sin, columns))

    def logits(self, h):
        return F.linear(h, self.embed_tokens.weight).float()


def rotations(c):
    """[head_dim / 2]: radians per position of the rotary pairs."""
    d = c["head_dim"]
    return 1.0 / (c["rope_parameters"]["rope_theta"] ** (torch.arange(0, d, 2).float() / d))


@torch.no_grad()
def greedy(model, tokens, max_new):
    """Appends up to max_new tokens to rows of equal length, until every row has had </s>."""
    begin = tokens.shape[1]
    for _ in range(max_new):
        step = model.logits(model(tokens)[:, -1]).argmax(-1, keepdim=True)
        tokens = torch.cat((tokens, step), dim=1)
        if (tokens[:, begin:] == EOS).any(dim=1).all():
            break
    return tokens[:, begin:]
