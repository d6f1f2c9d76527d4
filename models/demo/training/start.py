# SPDX-License-Identifier: Apache-2.0
"""The weights that training begins with: constructed for the look-up, or taken from an exported model.

Heads that look back a fixed distance are a part of any such look-up, so they are given here
instead of being learned from noise. Everything stays trainable.
"""
import math

import torch
import torch.nn as nn

from .model import rotations
from .tokens import vocabulary

# How far a rotary pair may turn over the longest prompt (radians) and still compare words.
LOW_FREQUENCY = 0.75


@torch.no_grad()
def construct(model, max_tokens):
    c, inv = model.config, rotations(model.config)
    for name, p in model.named_parameters():
        if p.dim() == 2:
            std = 0.08 if "embed" in name else p.shape[1] ** -0.5
            if "o_proj" in name or "down_proj" in name:
                std /= 3 * math.sqrt(2 * c["num_hidden_layers"])
            nn.init.normal_(p, std=std)
    for layer in model.layers[:2]:      # noise in what the third layer compares
        layer.mlp.down_proj.weight *= 0.1
    look_back(model, inv)
    look_up(model, inv, max_tokens)


def look_back(model, inv):
    """The heads of the first two layers look back n tokens.

    Dimension 0 of every embedding is a constant; the high-frequency rotary pairs of q and k read
    only it, with the phase that makes the score largest at the wanted distance.
    """
    d = model.config["head_dim"]
    half = d // 2
    pairs = half * 3 // 8
    model.embed_tokens.weight[:, 0] = 1.0
    for layer, (back, gain) in zip(model.layers, (((1, 2, 3, 4), 0.85), ((2, 3, 4, 6), 1.4))):
        a = layer.self_attn
        a.o_proj.weight[0] = 0
        layer.mlp.down_proj.weight[0] = 0
        for w, shifts in ((a.q_proj.weight, back), (a.k_proj.weight, (0,) * a.kv)):
            for h, n in enumerate(shifts):
                lo = h * d
                w[lo:lo + pairs] = 0
                w[lo + half:lo + half + pairs] = 0
                w[lo:lo + pairs, 0] = gain * torch.cos(n * inv[:pairs])
                w[lo + half:lo + half + pairs, 0] = -gain * torch.sin(n * inv[:pairs])


def look_up(model, inv, max_tokens):
    """The rest, with random projections: words go from where they stand to the value tokens and to
    the question's last token (layers 0, 1), are compared there in the rotary pairs that hardly turn
    over max_tokens, and the value found is copied (layer 2).
    """
    w, d = model.config["hidden_size"], model.config["head_dim"]
    half = d // 2

    def ortho(rows, cols):
        return nn.init.orthogonal_(torch.empty(rows, cols))
    outs = []
    for i in (0, 1):
        a, v, o = model.layers[i].self_attn, ortho(d, w), ortho(w, w)
        v[:, 0] = 0
        o[0] = 0
        a.v_proj.weight.copy_(v.repeat(a.kv, 1))
        scale = torch.tensor([0.2, 0.02, 0.02, 0.02] if i == 0 else [0.2] * 4).repeat_interleave(d)
        a.o_proj.weight.copy_(o * scale)
        outs.append(o.split(d, dim=1))
    two, three, four, six = outs[1]
    a = model.layers[2].self_attn
    first = int((inv * max_tokens > LOW_FREQUENCY).sum())
    low = torch.cat((torch.arange(first, half), torch.arange(half + first, d)))
    for j in range(a.kv):
        r, v = ortho(len(low), d), ortho(d, w)
        v[:, 0] = 0
        k = torch.zeros(d, w)
        k[low] = 2.0 * r @ (two + four + six).T
        q = torch.zeros(d, w)
        q[low] = 2.0 * r @ three.T
        a.k_proj.weight[j * d:(j + 1) * d] = k + 0.01 * torch.randn(d, w)
        a.v_proj.weight[j * d:(j + 1) * d] = v
        for h in range(j * a.h // a.kv, (j + 1) * a.h // a.kv):
            a.q_proj.weight[h * d:(h + 1) * d] = q + 0.01 * torch.randn(d, w)
            a.o_proj.weight[:, h * d:(h + 1) * d] = 0.2 * v.T


@torch.no_grad()
def carry_over(model, weights, old_tokenizer, new_tokenizer):
    """Takes exported weights of the same shape; tokens that are new keep the start they have.

    Embedding rows are matched by the token's text, so the two tokenizers may differ. Returns how
    many rows were taken.
    """
    own = model.state_dict()
    for name, value in weights.items():
        if name != "embed_tokens.weight":
            own[name].copy_(value)
    old, new = vocabulary(old_tokenizer), vocabulary(new_tokenizer)
    both = [t for t in new if t in old]
    rows = weights["embed_tokens.weight"][[old[t] for t in both]]
    own["embed_tokens.weight"][[new[t] for t in both]] = rows.to(own["embed_tokens.weight"].dtype)
    # New rows get the constant that the look-back heads read as training has left it.
    own["embed_tokens.weight"][[new[t] for t in new if t not in old], 0] = rows[:, 0].float().mean()
    return len(both)
