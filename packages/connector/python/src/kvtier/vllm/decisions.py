"""What vLLM decides for a model by its own settings, and what changes its KV all the same: no configuration of the model says it.

     longrope            long factors for every position, where the engine's longest request is longer than the model was trained on
     dynamic, of a few   the base is made of the longest request's length
     llama4              queries are tempered, by default where the longest request has more than 32768 tokens

Invariant: of a model that none of this is about there is nothing, and its names stay what they are.
"""

from __future__ import annotations

from typing import Any

from kvtier.ropes import LONG, above, rope_type, ropes

#: Of a model's configuration, what does not change results.
_VOLATILE = frozenset({"_name_or_path", "name_or_path", "transformers_version", "_commit_hash", "architectures_note"})
#: They hand vLLM's longest request to their embedding.
_OF_LENGTH = frozenset({"plamo3", "minimax_m2"})
_TEMPERED = frozenset({"llama4", "llama4_text"})
_TEMPERED_FROM = 32_768


def plain(value: Any) -> Any:
    """As JSON takes it, without what does not change results."""
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items() if key not in _VOLATILE}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, (str, int, float, bool)) or value is None:
        return value
    return str(value)


def plain_config(model_config: Any) -> dict[str, Any]:
    """The model's own configuration, without what does not change results."""
    config = getattr(model_config, "hf_config", None)
    fields = config.to_dict() if config is not None and hasattr(config, "to_dict") else dict(getattr(config, "__dict__", {}))
    return plain(fields)  # type: ignore[no-any-return]


def _kinds(config: Any) -> set[str]:
    if isinstance(config, list):
        return set().union(*map(_kinds, config))
    if not isinstance(config, dict):
        return set()
    return {str(config.get("model_type"))}.union(*map(_kinds, config.values()))


def decided(model_config: Any, draft_config: Any = None) -> list[Any]:
    """As a fingerprint takes it; empty where the configuration alone decides."""
    longest = getattr(model_config, "max_model_len", None)
    # It is fitted to the memory after the model was made: what it was made with follows from its configuration.
    if getattr(model_config, "original_max_model_len", None) == -1:
        longest = "auto"
    found: list[Any] = []
    for config in (plain_config(one) for one in (model_config, draft_config) if one is not None):
        for rope, original, kind in ropes(config):
            if rope_type(rope) in LONG:
                found.append(["longrope", above(longest, original)])
            elif rope_type(rope) == "dynamic" and kind in _OF_LENGTH:
                found.append(["dynamic", longest])
        if _kinds(config) & _TEMPERED:
            found.append(["tempered", _tempered(model_config, longest)])
    return found


def _tempered(model_config: Any, longest: Any) -> Any:
    """As Llama4ForCausalLM reads it."""
    key = "attn_temperature_tuning"
    read = getattr(model_config, "try_get_generation_config", dict)
    said = {**(read() or {}), **(getattr(model_config, "override_generation_config", None) or {})}
    return str(said[key]) if key in said else above(longest, _TEMPERED_FROM)
