"""Which of vLLM's MultiConnectors make a connector: it gives each of its connectors a configuration of its own, and tells it nothing.

What the scheduler reads is the outermost one's configuration, and the workers' handshake is one for all of them: of the first that has one.
"""

from __future__ import annotations

import sys
from typing import Any


def wrappers() -> list[Any]:
    """Configurations of those that are being made, and make what is made now; the innermost first. Called while a connector is made."""
    found = []
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == "__init__":
            said = frame.f_locals
            if any(cls.__name__ == "MultiConnector" for cls in type(said.get("self")).__mro__):
                found.append(said.get("vllm_config"))
        frame = frame.f_back  # type: ignore[assignment]
    return found
