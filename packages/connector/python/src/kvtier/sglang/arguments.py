"""What of SGLang's arguments decides what KV is, beside the weights and their configuration.

Invariant: where an argument of `_MORE` or `_FILES` is what it is by itself, the names are those of an SGLang that does not have it. A file
that an argument names counts by its content: its path is another one in each container.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from kvtier.ropes import LONG, ORIGINAL, above, rope_type, ropes
from kvtier.sglang.pools import Unsupported

#: Always said, whatever they are.
_ALWAYS = (
    "dtype",
    "quantization",
    "kv_cache_dtype",
    "json_model_override_args",
    "attention_backend",
    "prefill_attention_backend",
    "decode_attention_backend",
    "speculative_algorithm",
    "device",
)
#: Said where they are something else than this.
_MORE: dict[str, tuple[Any, ...]] = {
    # What becomes of the weights while they are loaded. The usual formats bring what lies in the files.
    "load_format": (
        *("auto", "safetensors", "pt", "npcache", "dummy", "gguf", "mistral", "layered", "sharded_state", "presharded"),
        *("fastsafetensors", "runai_streamer"),
    ),
    "model_loader_extra_config": ("{}",),
    "custom_weight_loader": (),
    "torchao_config": (),
    "modelopt_quant": (),
    "quantize_and_serve": (),
    "kt_method": ("AMXINT4",),
    "kt_num_gpu_experts": (),
    "kt_max_deferred_experts_per_token": (),
    "speculative_draft_load_format": (),
    "speculative_draft_model_quantization": (),
    # What is computed with them.
    "model_impl": ("auto",),
    "model_config_parser": ("auto",),
    "is_embedding": (),
    "rl_on_policy_target": (),
    "enable_tf32_matmul": (),
    "enable_w4a4_mxfp4_megamoe": (),
    "flashinfer_mxfp4_moe_precision": ("default",),
    "enable_quant_communications": (),
    "enable_hisparse": (),
    "hisparse_config": (),
    "dllm_algorithm": (),
    "forward_hooks": (),
    "mm_process_config": (),
    "enable_precise_embedding_interpolation": (),
    # What is kept of it.
    "speculative_draft_kv_cache_dtype": ("auto",),
    "enable_deepseek_v4_fp4_indexer": (),
    "enable_dsa_cache_layer_split": (),
    "mamba_ssm_dtype": (),
    "enable_mamba_cache_stochastic_rounding": (),
    "mamba_cache_philox_rounds": (0,),
    "enable_int8_mamba_checkpoint": (),
}
#: Scales of KV, profiles, configurations in place of the model's own.
_FILES = ("quantization_param_path", "rl_quant_profile", "dllm_algorithm_config", "decrypted_config_file", "decrypted_draft_config_file")
#: Weights that are used instead of, or beside, the model's.
WEIGHTS = ("kt_weight_path", "modelopt_checkpoint_restore_path")


def _text(value: Any) -> str:
    return json.dumps(value, sort_keys=True, default=str) if isinstance(value, (dict, list, tuple)) else str(value)


def _content(name: str, path: str) -> str:
    """@raises Unsupported where it is not to be had; OSError where its file system does not answer now"""
    try:
        return hashlib.sha256(Path(path).read_bytes()).hexdigest()
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError, PermissionError, ValueError) as error:
        flag = name.replace("_", "-")
        raise Unsupported(f"the file of --{flag} decides what KV is, and cannot be read ({error}); make it readable here") from error


def decisive(arguments: Any, config: Any) -> dict[str, str]:
    """`config`: the model's own, as its file says it. @raises Unsupported, OSError"""
    found = {name: str(getattr(arguments, name, None)) for name in _ALWAYS}
    for name, usual in _MORE.items():
        value = getattr(arguments, name, None)
        # SGLang fills in for a draft model what is said of the model.
        if value and value not in usual and (name, str(value)) != ("speculative_draft_model_quantization", found["quantization"]):
            found[name] = _text(value)
    for name in _FILES:
        path = getattr(arguments, name, None)
        if path:
            found[name] = _content(name, str(path))
    lengths = _lengths(arguments, config)
    return {**found, "longrope": lengths} if lengths else found


def _lengths(arguments: Any, config: Any) -> str:
    """Whether long factors may be used: SGLang takes them for a whole batch, where one of its positions is behind what the model was trained
    on. "": the model has none, or its configuration alone says how long requests are."""
    longest = getattr(arguments, "context_length", None)
    if not isinstance(longest, int):
        return ""
    try:
        changed = json.loads(str(getattr(arguments, "json_model_override_args", None) or "{}"))
    except ValueError:
        changed = {}
    original = next((of for _, of, _ in ropes(config) if of), None) or config.get(ORIGINAL)
    found = [*ropes(config), *ropes(changed, original)]
    return " ".join(str(above(longest, of)) for rope, of, _ in found if rope_type(rope) in LONG)
