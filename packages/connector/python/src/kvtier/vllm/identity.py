"""Who this engine is: what of its configuration goes into the namespaces of its blocks, and which ranks hold the same bytes.

vLLM's block hashes say which tokens; they say nothing of the model. Invariant: engines that differ in weights, configuration,
types, group, layers, bytes of a page, backend, head range or generation have different namespaces.
"""

from __future__ import annotations

import json
import math
import os
import platform
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvtier.namespace import BlockLayout, Layers, Namespace, Part, fingerprint
from kvtier.vllm import decisions
from kvtier.vllm.groups import Group, Unsupported
from kvtier.vllm.heads import holders_of
from kvtier.vllm.layouts import View
from kvtier.vllm.messages import KvtierHandshake, Rank
from kvtier.vllm.processors import processed
from kvtier.weights import local_folder

#: Types of numbers by kvtier's names; others stay what the engine calls them.
_NUMBERS = {
    "torch.float32": "f32",
    "torch.float16": "f16",
    "torch.bfloat16": "bf16",
    "torch.int8": "i8",
    "torch.uint8": "u8",
    "torch.float8_e4m3fn": "e4m3",
    "torch.float8_e5m2": "e5m2",
}
#: Of a CPU, what decides which kernels write KV, and how.
_CPU_FLAGS = ("avx2", "avx512f", "avx512_bf16", "amx_tile", "asimd", "sve")


def block_sizes(vllm_config: Any, kv_cache_config: Any) -> tuple[int, int]:
    """Tokens of a block of the scheduler and of a hash, as the engine reckons them."""
    try:
        from vllm.v1.core.kv_cache_utils import resolve_kv_cache_block_sizes  # type: ignore[import-not-found]

        scheduler, hashed = resolve_kv_cache_block_sizes(kv_cache_config, vllm_config)
        return int(scheduler), int(hashed)
    except ImportError:
        pass
    groups = kv_cache_config.kv_cache_groups
    sizes = [int(group.kv_cache_spec.block_size) for group in groups]
    if len(sizes) == 1:
        return int(vllm_config.cache_config.block_size), int(vllm_config.cache_config.block_size)
    unit = getattr(vllm_config.cache_config, "prefix_match_unit", None)
    return math.lcm(*sizes), int(unit or math.gcd(*sizes))


def rank_of(vllm_config: Any) -> Rank:
    """(pipeline stage, tensor rank) of this worker."""
    try:
        from vllm.distributed.parallel_state import get_pp_group, get_tp_group  # type: ignore[import-not-found]

        return int(get_pp_group().rank_in_group), int(get_tp_group().rank_in_group)
    except ImportError:
        parallel = vllm_config.parallel_config
        return divmod(int(parallel.rank), int(parallel.tensor_parallel_size))


def check_supported(vllm_config: Any) -> None:
    """@raises Unsupported for what would mean other bytes under the same names"""
    parallel, cache = vllm_config.parallel_config, vllm_config.cache_config
    for key in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        if int(getattr(parallel, key, 1) or 1) > 1:
            raise Unsupported(f"{key} above 1: ranks hold other tokens of a block each")
    if getattr(cache, "calculate_kv_scales", False):
        raise Unsupported("calculate_kv_scales: scales of this engine alone give its KV their meaning")
    if getattr(getattr(vllm_config, "model_config", None), "is_encoder_decoder", False):
        raise Unsupported("an encoder-decoder model")


def root_hash() -> bytes | None:
    """Of the engine's chains, once it has made it."""
    module = sys.modules.get("vllm.v1.core.kv_cache_utils")
    found = getattr(module, "NONE_HASH", None)
    return bytes(found) if found is not None else None


def uses_eagle(vllm_config: Any) -> bool:
    """A speculative method that recomputes the last block of a hit."""
    speculative = getattr(vllm_config, "speculative_config", None)
    if speculative is None:
        return False
    asked = getattr(speculative, "use_eagle", None)
    try:
        return bool(asked() if callable(asked) else asked)
    except Exception:
        return True


def _config_text(model_config: Any) -> str:
    return json.dumps(decisions.plain_config(model_config), sort_keys=True)


def weight_folders(vllm_config: Any) -> list[str]:
    """Where the weights of the model, and of a draft model, lie on this machine.

    @raises Unsupported where that cannot be told
    """
    model = vllm_config.model_config
    load = getattr(vllm_config, "load_config", None)
    if str(getattr(load, "load_format", "auto")).lower().endswith("dummy"):
        raise Unsupported('weights made up at the start (load_format dummy); give "weights_digest" to say which they are')
    folders = [_folder_of(str(model.model), getattr(model, "revision", None), load)]
    speculative = getattr(vllm_config, "speculative_config", None)
    drafting = getattr(speculative, "draft_model_config", None)
    draft = getattr(drafting, "model", None)
    if draft and str(draft) != str(model.model):
        folders.append(_folder_of(str(draft), getattr(drafting, "revision", None), load))
    return folders


def _folder_of(name: str, revision: str | None, load_config: Any) -> str:
    return local_folder(name, revision, getattr(load_config, "download_dir", None))


def model_digest(vllm_config: Any, weights: bytes, generation: bytes) -> bytes:
    """@raises Unsupported; OSError where the file system of the model does not answer now"""
    model = vllm_config.model_config
    speculative = getattr(vllm_config, "speculative_config", None)
    decided = decisions.decided(model, getattr(speculative, "draft_model_config", None))
    media = processed(vllm_config)
    return fingerprint(
        "kvtier-vllm-model-1",
        {
            "weights": weights,
            "config": _config_text(model),
            "dtype": str(getattr(model, "dtype", "")),
            "quantization": str(getattr(model, "quantization", None) or ""),
            "speculative": str(getattr(speculative, "method", None) or ""),
            "generation": generation,
            # Of nearly all models nothing.
            **({"decided": decided} if decided else {}),
            **({"media": media} if media else {}),
        },
    )


def kv_dtype(vllm_config: Any) -> str:
    said = str(vllm_config.cache_config.cache_dtype)
    return str(getattr(vllm_config.model_config, "dtype", said)) if said == "auto" else said


def backend_of(vllm_config: Any, layer: str) -> str:
    """The name of a layer's attention backend: a page's bytes are private to it."""
    try:
        module = vllm_config.compilation_config.static_forward_context[layer]
        backend = module.get_attn_backend() if hasattr(module, "get_attn_backend") else module.attn_backend
        return str(backend.get_name())
    except Exception:
        return ""


def cpu_kind() -> str:
    """What decides how kernels of a CPU lay KV out."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.machine()
    match = re.search(r"^(?:flags|Features)\s*:(.*)$", text, re.MULTILINE)
    flags = set(match[1].split()) if match else set()
    return " ".join([platform.machine(), *(flag for flag in _CPU_FLAGS if flag in flags)])


def _page_of(view: View) -> Layers:
    """One layer's page: its dimensions as they lie, called by their places in the backend's shape, which is private to it."""
    sizes = [view.per_block if d == view.dimension else n for d, n in enumerate(view.shape)]
    order = sorted((d for d, n in enumerate(sizes) if n > 1), key=lambda d: (-view.strides[d], d)) or [0]
    shape, names = tuple(sizes[d] for d in order), ",".join(f"d{d}" for d in order)
    return Layers(1, (Part("page", _NUMBERS.get(view.dtype, view.dtype), "block", shape, names),), view.block_bytes)


def group_layout(vllm_config: Any, group: Group, views: Sequence[View], device: str, version: str | None, stage: int) -> BlockLayout:
    """What gives the bytes of this worker's blocks of a group their meaning; not how many blocks there are, nor where."""
    parallel = vllm_config.parallel_config
    return BlockLayout(
        group.block_tokens,
        tuple(_page_of(view) for view in views),
        stage=(stage, int(getattr(parallel, "pipeline_parallel_size", 1) or 1)),
        engine={
            "name": "vllm",
            "version": ".".join((version or "none").split(".")[:2]),
            "device": cpu_kind() if device == "cpu" else device,
            "kind": group.kind,
            "windowTokens": group.window_tokens,
            "layers": [view.layer for view in views],
            "backends": [backend_of(vllm_config, view.layer) for view in views],
            # Where heads are replicated, the same head range is another set of bytes under another number of ranks.
            "tensorRanks": 1 if group.replicated else int(parallel.tensor_parallel_size),
        },
    )


@dataclass(frozen=True)
class Share:
    """The blocks of one group that one or several ranks hold alike: one session, one writer."""

    number: int
    group: Group
    ranks: tuple[Rank, ...]
    payload_bytes: int
    namespace: bytes


def shares_of(
    vllm_config: Any,
    groups: Sequence[Group],
    handshakes: dict[Rank, KvtierHandshake],
    model: bytes,
    root: bytes,
) -> list[Share]:
    """@raises Unsupported where ranks that should hold the same do not, or one has said nothing"""
    algorithm = str(vllm_config.cache_config.prefix_caching_hash_algo)
    shares: list[Share] = []
    for stage in sorted({rank[0] for rank in handshakes}):
        for group in groups:
            for ranks, heads in holders_of(vllm_config, group, stage):
                silent = [rank for rank in ranks if rank not in handshakes]
                if silent:
                    raise Unsupported(f"rank {silent[0]} (pipeline stage, tensor rank) has not said how its tensors lie")
                told = [handshakes[rank] for rank in ranks]
                payloads = {one.payload_bytes[group.index] for one in told}
                layouts = {one.fingerprints[group.index] for one in told}
                if len(payloads) != 1 or len(layouts) != 1:
                    raise Unsupported(f"ranks {ranks} hold group {group.index} in different layouts")
                namespace = Namespace(
                    model_digest=model,
                    kv_dtype=kv_dtype(vllm_config),
                    block_tokens=group.block_tokens,
                    algorithm=algorithm,
                    root=root,
                    layout=layouts.pop(),
                    group=group.index,
                    heads=heads,
                )
                shares.append(Share(len(shares), group, ranks, payloads.pop(), namespace.digest()))
    return shares
