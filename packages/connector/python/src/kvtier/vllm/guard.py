"""What stands between vLLM and everything here (kvtier/guard.py). A connector has two halves, each with troubles of its own: both may
live in one process.
"""

import logging

from kvtier import guard
from kvtier.guard import TROUBLES_TO_STOP, harmless

__all__ = ["TROUBLES_TO_STOP", "Troubles", "harmless"]


class Troubles(guard.Troubles):
    def __init__(self) -> None:
        super().__init__(logging.getLogger("kvtier.vllm"))
