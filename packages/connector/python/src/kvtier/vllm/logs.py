"""Our lines where vLLM's are: it gives handlers and a level (VLLM_LOGGING_LEVEL) to its own logger alone, and what others say at INFO is
lost: that an engine is attached, for one.
"""

from __future__ import annotations

import logging


def follow_vllm() -> None:
    """Not where somebody has set up our logger, or one for all, or has forbidden vLLM to do so (VLLM_CONFIGURE_LOGGING=0)."""
    ours, theirs = logging.getLogger("kvtier"), logging.getLogger("vllm")
    if ours.handlers or ours.level or logging.getLogger().handlers or not theirs.handlers:
        return
    for handler in theirs.handlers:
        ours.addHandler(handler)
    ours.setLevel(theirs.getEffectiveLevel())
    ours.propagate = False
