"""The namespace of a pool's pages: everything that two SGLang engines must have in common to share them (docs/sglang.md).

SGLang names pages by a chain of SHA-256 over token ids alone: neither model nor adapter are in it, so they are in the namespace, or
nothing is used.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvtier.namespace import BlockLayout, Heads, Layers, Namespace, Part, fingerprint
from kvtier.sglang.arguments import WEIGHTS, decisive
from kvtier.sglang.bases import KNOWN_VERSIONS
from kvtier.sglang.pools import PoolView, Unsupported
from kvtier.weights import WeightsMissing, local_folder

#: How the first page of a chain is named: SGLang's chains have no root.
_ROOT = hashlib.sha256(b"sglang: a chain of pages begins with its tokens").digest()


def version_refusal(version: str | None, accept: tuple[str, ...]) -> str:
    """Why this version is not served; "" when it is. None: the contract test."""
    minor = ".".join((version or "").split(".")[:2])
    if version is None or minor in KNOWN_VERSIONS or minor in accept:
        return ""
    return (
        f"SGLang {version} is not one of the versions that are known ({', '.join(KNOWN_VERSIONS)}); install one of them, "
        f'or vouch for it with "accept_versions": ["{minor}"]'
    )


@dataclass(frozen=True)
class Engine:
    """What is the same for all pools of this rank."""

    version: str
    weights: bytes
    config: str
    arguments: dict[str, str]
    tp_rank: int
    tp_size: int
    pp_rank: int
    pp_size: int
    cp_rank: int
    cp_size: int
    #: All tensor ranks hold the same bytes.
    replicated: bool
    #: 0: not known.
    kv_heads: int


def refusal(arguments: Any, storage_config: Any, keep_on_flush: bool) -> str:
    """What of this engine cannot be named; "" when all can."""
    if getattr(arguments, "disaggregation_decode_enable_offload_kvcache", False) and not keep_on_flush:
        return 'a flush does not clear the pool that a decode engine offloads by; where weights are never replaced, say "keep_on_flush": true'
    if getattr(arguments, "enable_lora", None) or getattr(arguments, "lora_paths", None):
        return "LoRA adapters are on, and SGLang's names of pages do not say which adapter computed them"
    if getattr(storage_config, "should_split_heads", False):
        return '"tp_lcm_size" splits pages by heads, which is not known here; leave it out'
    return ""


def folders(arguments: Any) -> list[str]:
    """Where the models' weights lie, of a draft model, too. @raises Unsupported, WeightsMissing, OSError"""
    model = getattr(arguments, "model_path", None)
    if not model:
        raise Unsupported('SGLang does not say which model it serves; give "weights_digest", 64 hex digits that stand for its weights')
    if str(getattr(arguments, "load_format", "auto")).lower().endswith("dummy"):
        raise Unsupported('weights made up at the start (load_format dummy); give "weights_digest" to say which they are')
    cache = getattr(arguments, "download_dir", None)
    found = [local_folder(str(model), getattr(arguments, "revision", None), cache)]
    draft = getattr(arguments, "speculative_draft_model_path", None)
    if draft and str(draft) != str(model):
        found.append(local_folder(str(draft), getattr(arguments, "speculative_draft_model_revision", None), cache))
    return found


def beside(arguments: Any, models: Sequence[str]) -> list[str]:
    """Where weights lie that are used instead of the models' or with them. `models`: folders that count already: one of them may be named
    once more."""
    found: list[str] = []
    for name in WEIGHTS:
        path = str(getattr(arguments, name, None) or "")
        if path and os.path.realpath(path) not in map(os.path.realpath, (*models, *found)):
            found.append(path)
    return found


def attached_later(arguments: Any) -> bool:
    """SGLang was started without us, as far as it says so: its weights may have been replaced before it was given this backend."""
    if not hasattr(arguments, "hicache_storage_backend"):
        return False
    said = str(getattr(arguments, "hicache_storage_backend_extra_config", None) or "")
    if said.startswith("@"):  # a file
        try:
            said = Path(said[1:]).read_text()
        except (OSError, ValueError):
            said = ""
    return str(arguments.hicache_storage_backend) != "dynamic" or "kvtier" not in said


#: A model's own configuration, as Hugging Face names it and as Mistral does.
_CONFIGS = ("config.json", "params.json")


def config_of(arguments: Any) -> dict[str, Any]:
    """The model's configuration, of the folder that it is loaded from. Where that is not on this machine, its name and revision: it has a
    digest by the options. Empty: not known. @raises OSError where it cannot be read now"""
    model, revision = str(getattr(arguments, "model_path", None) or ""), getattr(arguments, "revision", None)
    if not model:
        return {}
    try:
        folder = Path(local_folder(model, revision, getattr(arguments, "download_dir", None)))
    except WeightsMissing:
        return {"model": model, "revision": str(revision or "")}
    for name in _CONFIGS:
        try:
            config = json.loads((folder / name).read_text())
        except (FileNotFoundError, NotADirectoryError):  # weights of one file say themselves what they are
            continue
        except ValueError:
            return {}
        return config if isinstance(config, dict) else {}
    return {}


def _kv_heads(config: dict[str, Any]) -> int:
    """0: not known."""
    text = config.get("text_config") if isinstance(config.get("text_config"), dict) else config
    heads = text.get("num_key_value_heads", text.get("num_attention_heads"))  # type: ignore[union-attr]
    return heads if isinstance(heads, int) and heads > 0 else 0


def engine_of(storage_config: Any, arguments: Any, weights: bytes, version: str | None) -> Engine:
    """@raises Unsupported, OSError"""

    def number(name: str, default: int) -> int:
        return int(getattr(storage_config, name, default) or 0)

    config = config_of(arguments)
    return Engine(
        version=version or "none",
        weights=weights,
        config=json.dumps(config, sort_keys=True) if config else "",
        arguments=decisive(arguments, config),
        tp_rank=number("tp_rank", 0),
        tp_size=number("tp_size", 1) or 1,
        pp_rank=number("pp_rank", 0),
        pp_size=number("pp_size", 1) or 1,
        cp_rank=number("attn_cp_rank", 0),
        cp_size=number("attn_cp_size", 1) or 1,
        replicated=bool(getattr(storage_config, "is_mla_model", False)),
        kv_heads=_kv_heads(config),
    )


#: Of the pools beside an MLA model's KV, those whose pages all tensor ranks hold alike. A draft model may have heads.
_ALIKE = frozenset({"MLATokenToKVPoolHost", "DSAIndexerPoolHost", "NSAIndexerPoolHost"})


def _replicated(engine: Engine, pool: str, facts: dict[str, Any]) -> bool:
    """Whether all tensor ranks hold the same pages; where that is not known they do not. `kv/`: flat pages of that pool."""
    return engine.replicated and (pool == "kv" or pool.startswith("kv/") or facts.get("class") in _ALIKE)


def writes(engine: Engine, pool: str, facts: dict[str, Any]) -> bool:
    """Whether this rank stores its pages: of ranks that hold the same, the first."""
    if engine.tp_size == 1:
        return True
    if _replicated(engine, pool, facts):
        return engine.tp_rank == 0
    heads = _heads(engine, pool)
    if heads is not None and heads.count * engine.tp_size > heads.total:
        return engine.tp_rank % (engine.tp_size // heads.total) == 0
    return True


def _heads(engine: Engine, pool: str) -> Heads | None:
    """The heads of this rank's pages; None: where that is not known, its rank stands for them."""
    if pool != "kv" or engine.replicated or not engine.kv_heads:
        return None
    heads, ranks = engine.kv_heads, engine.tp_size
    if heads % ranks == 0:
        return Heads(engine.tp_rank * (heads // ranks), heads // ranks, heads)
    if ranks % heads == 0:
        return Heads(engine.tp_rank // (ranks // heads), 1, heads)
    return None


def layout(engine: Engine, name: str, page_tokens: int, page_bytes: int, facts: dict[str, Any]) -> BlockLayout:
    """`name`: of the pool. `facts`: what gives the bytes of a page their meaning, which are for SGLang alone to read."""
    same = _replicated(engine, name, facts)
    known = same or _heads(engine, name) is not None
    return BlockLayout(
        page_tokens,
        (Layers(1, (Part("page", "u8", "block", (page_bytes,), "byte"),), page_bytes),),
        tensor_rank=(0, 1) if known else (engine.tp_rank, engine.tp_size),
        stage=(engine.pp_rank, engine.pp_size),
        engine={
            "name": "sglang",
            "version": engine.version,
            "pool": name,
            "facts": facts,
            "tensorRanks": 1 if same else engine.tp_size,
            "contextParallel": [engine.cp_rank, engine.cp_size],
        },
    )


def namespace(engine: Engine, name: str, page_tokens: int, page_bytes: int, facts: dict[str, Any], generation: bytes) -> bytes:
    """Of the pages of a pool."""
    model = fingerprint(
        "kvtier-sglang-model-1",
        {"weights": engine.weights, "config": engine.config, "arguments": engine.arguments, "generation": generation},
    )
    return Namespace(
        model_digest=model,
        kv_dtype=str(facts.get("dtype", "")),
        block_tokens=page_tokens,
        algorithm="sglang_sha256",
        root=_ROOT,
        layout=layout(engine, name, page_tokens, page_bytes, facts).fingerprint(),
        heads=_heads(engine, name),
    ).digest()


def flushed_together(engine: Engine, arguments: Any, own: str, agreed: Callable[[str], str | None]) -> str | None:
    """Names the ranks that count the same flushes, of this start of this engine: no other engine has the name, nor this one when it starts
    again, whatever process has started them. `own`: this rank's, drawn at random; `agreed`: what all ranks have agreed on. Replicas of data
    parallelism may each refuse a flush by itself. None: ranks that cannot agree, or that cannot be told from another replica's.
    """
    if engine.tp_size * engine.pp_size * engine.cp_size == 1:
        return own
    return agreed(own) if int(getattr(arguments, "dp_size", 1) or 1) <= 1 else None


def generation_name(count: int, kept: bool, together: str) -> bytes:
    """What was stored before a flush or a clear is not loaded any more by this engine: its ranks have the same name for each generation.
    `kept`: flushes are not counted. `together`: of `flushed_together`.
    """
    return hashlib.sha256(f"{together} {count}{' kept' if kept else ''}".encode()).digest() if count else b""


def pool_facts(view: PoolView) -> dict[str, Any]:
    return {**view.facts, "kind": "pages of a host pool"}
