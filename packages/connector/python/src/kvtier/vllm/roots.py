"""Whether vLLM's block hashes mean the same in two processes."""

from __future__ import annotations

import logging
import sys
import types
from typing import Any

#: What vLLM says of its root it has said already.
_UNHEARD = logging.Logger("kvtier.unheard", logging.CRITICAL + 1)


def is_drawn(vllm_config: Any) -> bool:
    """Each process of this vLLM begins its chains with random bytes: what is stored is found by nobody else, and by nobody after a restart.
    vLLM's function is run twice on names of its own, so that nothing of the engine's changes. What is not understood is not complained of."""
    module = sys.modules.get("vllm.v1.core.kv_cache_utils")
    make = getattr(module, "init_none_hash", None)
    if module is None or not isinstance(make, types.FunctionType):
        return False
    try:
        named = sys.modules["vllm.utils.hashing"].get_hash_fn_by_name
        hash_fn = named(vllm_config.cache_config.prefix_caching_hash_algo)
        made = set()
        for _ in range(2):
            names = {**vars(module), "logger": _UNHEARD}
            types.FunctionType(make.__code__, names, None, make.__defaults__, make.__closure__)(hash_fn)
            made.add(bytes(names["NONE_HASH"]))
        return len(made) > 1
    except Exception:
        return False
