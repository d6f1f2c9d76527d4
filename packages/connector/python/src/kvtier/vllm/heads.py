"""Which tensor ranks hold the same KV heads of a group.

     as many heads as ranks, or more      each rank has heads of its own
     fewer heads than ranks               ranks beside each other hold the same one, and are one share

vLLM says one number for the whole model. Some models have layers with other numbers of heads (MiMo-V2's windows, Step-3.5, Gemma 4): of
these that number says nothing about a group. Invariant: ranks are one share only where nothing says that any layer has other heads.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from kvtier.namespace import Heads
from kvtier.vllm.groups import Group, Unsupported
from kvtier.vllm.messages import Rank

#: By these the model's own number is said; vLLM has read it, with what else decides it (Falcon's `multi_query`).
_OF_MODEL = frozenset({"n_head_kv", "num_kv_heads", "num_key_value_heads", "multi_query_group_num", "num_attention_groups"})
#: What says numbers of KV heads, whatever a model calls it.
_SAYS = re.compile(r"^(?!.*(?:dim|size)$)(?:.*(?:key_value|kv).*head|.*head.*(?:key_value|kv)|.*(?:query|attention)_group)", re.IGNORECASE)
#: Of blocks of a model made by search: how many heads share one of KV.
_SHARED_BY = "n_heads_in_group"
#: Their layers have no KV cache.
_ENCODERS = re.compile(r"vision|visual|image|video|audio|speech", re.IGNORECASE)


def _fields(value: Any) -> dict[str, Any]:
    if isinstance(value, dict):
        return value
    if hasattr(value, "to_dict"):
        return dict(value.to_dict())
    return dict(vars(value)) if hasattr(value, "__dict__") and not isinstance(value, type) else {}


def _said(value: Any, queries: int, depth: int = 0) -> Iterator[tuple[int, str, int]]:
    """(depth, name, number of KV heads) of all that a configuration says of them."""
    if depth > 8:
        return
    if isinstance(value, (list, tuple)):
        for one in value:
            yield from _said(one, queries, depth + 1)
        return
    for key, item in _fields(value).items():
        name = str(key)
        if _ENCODERS.search(name):
            continue
        if name == _SHARED_BY and isinstance(item, int) and item:
            yield depth, name, queries // item
        elif _SAYS.match(name):
            listed = isinstance(item, (list, tuple))  # by layers: it is not the model's one number
            for one in item if listed else [item]:
                if isinstance(one, int) and not isinstance(one, bool):
                    yield depth + listed, name, one
                else:
                    yield from _said(one, queries, depth + 1)
        else:
            yield from _said(item, queries, depth + 1)


def _of(model: Any) -> int:
    return int(model.get_total_num_kv_heads())


def _uniform(model: Any, heads: int) -> bool:
    """Nothing says that a layer of this model has another number of KV heads than these."""
    if _of(model) != heads:
        return False
    for layer in getattr(getattr(model, "model_arch_config", None), "per_layer_overrides", None) or ():
        if layer.get("total_num_kv_heads", heads) != heads:
            return False
    config = getattr(model, "hf_text_config", None) or getattr(model, "hf_config", None)
    queries = _fields(config).get("num_attention_heads")
    own: set[int] = set()
    for depth, name, number in _said(config, queries if isinstance(queries, int) else 0):
        if depth == 0 and name in _OF_MODEL:
            own.add(number)
        elif number != heads:
            return False
    return len(own) <= 1


def all_alike(vllm_config: Any, group: Group) -> bool:
    """Nothing says that a layer of this engine has another number of KV heads than the model."""
    model = vllm_config.model_config
    heads = _of(model)
    if not _uniform(model, heads):
        return False
    draft = getattr(getattr(vllm_config, "speculative_config", None), "draft_model_config", None)
    # Its layers are in the same groups; one with no heads has no such layers.
    if hasattr(draft, "get_total_num_kv_heads") and _of(draft) and not _uniform(draft, heads):
        return False
    return group.rank_heads <= 1


def holders_of(vllm_config: Any, group: Group, stage: int) -> list[tuple[tuple[Rank, ...], Heads | None]]:
    """Ranks of a stage that hold the same, and which heads these are.

    @raises Unsupported
    """
    tp = int(vllm_config.parallel_config.tensor_parallel_size)
    ranks = [(stage, rank) for rank in range(tp)]
    if tp == 1 or group.replicated:
        return [(tuple(ranks), None)]
    heads = _of(vllm_config.model_config)
    if heads >= tp and heads % tp == 0:
        each = heads // tp
        return [((rank,), Heads(rank[1] * each, each, heads)) for rank in ranks]
    if heads and tp % heads == 0:
        if not all_alike(vllm_config, group):
            return [((rank,), Heads(rank[1], 1, tp)) for rank in ranks]
        copies = tp // heads
        return [(tuple(ranks[h * copies : (h + 1) * copies]), Heads(h, 1, heads)) for h in range(heads)]
    raise Unsupported(f"{heads} KV heads over {tp} tensor ranks")
