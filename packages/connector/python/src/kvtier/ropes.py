"""Scaled position embeddings in a model's configuration: some change with the longest request that an engine takes, which is said elsewhere."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

#: Long factors where positions pass the length that the model was trained on; "su" is what it was called first.
LONG = frozenset({"longrope", "su"})
#: The length that a model was trained on.
ORIGINAL = "original_max_position_embeddings"


def rope_type(rope: dict[str, Any]) -> str:
    said = rope.get("rope_type") or rope.get("type")
    return said if isinstance(said, str) else ""


def ropes(config: Any, original: Any = None, kind: str = "") -> Iterator[tuple[dict[str, Any], Any, str]]:
    """Every embedding that a configuration names, nested ones too: with the length that the model was trained on, as it says itself or
    the configuration around it, and the kind of the model around it. Always in the same order."""
    if isinstance(config, list):
        for item in config:
            yield from ropes(item, original, kind)
    if not isinstance(config, dict):
        return
    original = config.get(ORIGINAL) or original
    kind = str(config.get("model_type") or kind)
    if rope_type(config):
        yield config, original, kind
    for _, value in sorted(config.items()):
        yield from ropes(value, original, kind)


def above(longest: Any, limit: Any) -> Any:
    """Where the limit is not known, or the length, each length is another engine."""
    return longest > limit if isinstance(longest, int) and isinstance(limit, (int, float)) else longest
