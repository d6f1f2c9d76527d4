"""What of SGLang's arguments decides what KV is, beside the weights and their configuration.

Invariant: where an argument of `_MORE` or `_FILES` is what it is by itself, the names are those of an SGLang that does not have it: as it is
by default, or as SGLang sets it for each engine of the model. A file that an argument names counts by its content: its path is another one in
each container.
"""

from __future__ import annotations

import dataclasses
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
#: Said where they are something else than this, and than this SGLang's own default.
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
    "kt_amx_method": ("AMXINT4",),
    "kt_num_gpu_experts": (),
    "kt_max_deferred_experts_per_token": (),
    "speculative_draft_load_format": (),
    # What is computed with them.
    "model_impl": ("auto",),
    "model_config_parser": ("auto",),
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
#: Of these models SGLang sets `enable_tf32_matmul` by itself, whatever was said.
_TF32_MODELS = ("MiniMaxM2ForCausalLM", "Glm4MoeForCausalLM")
#: Scales of KV, profiles, configurations in place of the model's own.
_FILES = ("quantization_param_path", "rl_quant_profile", "dllm_algorithm_config", "decrypted_config_file", "decrypted_draft_config_file")
#: Weights that are used instead of, or beside, the model's.
WEIGHTS = ("kt_weight_path", "kt_amx_weight_path", "modelopt_checkpoint_restore_path")


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
    defaults = _defaults(arguments)
    architectures = config.get("architectures") or ()
    for name, usual in _MORE.items():
        value = getattr(arguments, name, None)
        if not value or value in usual or (name in defaults and value == defaults[name]):
            continue
        if name == "enable_tf32_matmul" and any(model in architectures for model in _TF32_MODELS):
            continue
        found[name] = _text(value)
    draft = "speculative_draft_model_quantization"
    if hasattr(arguments, draft) and getattr(arguments, "speculative_algorithm", None):
        # SGLang fills in for a draft model what is said of the model: None there is another thing, a draft that is not quantized.
        if str(getattr(arguments, draft)) != found["quantization"]:
            found[draft] = str(getattr(arguments, draft))
    for name in _FILES:
        path = getattr(arguments, name, None)
        if path:
            found[name] = _content(name, str(path))
    lengths = _lengths(arguments, config)
    return {**found, "longrope": lengths} if lengths else found


def _defaults(arguments: Any) -> dict[str, Any]:
    """Of this SGLang: another one's may be something else, and names then begin with what its users never said."""
    return {one.name: one.default for one in dataclasses.fields(arguments)} if dataclasses.is_dataclass(arguments) else {}


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
