"""Whether this engine has a cache node, as a gauge at SGLang's `/metrics`.

SGLang asks a storage backend for histograms only. But what any process of it makes with prometheus_client is put together from files in one
folder (PROMETHEUS_MULTIPROC_DIR), as SGLang's own metrics are: of all ranks and replicas, the minimum is told.
"""

from __future__ import annotations

import logging
import os
from typing import Any

log = logging.getLogger("kvtier.sglang")

NAME = "sglang:kvtier_attached"
_TEXT = "kvtier: 1 while each rank has a cache node; 0: some rank computes all."
#: A backend may be taken away and given again at run time; a process makes a metric once.
_made: list[Any] = []


class AttachedGauge:
    """0 from its making on. `wanted`: SGLang keeps metrics of its storage."""

    def __init__(self, wanted: bool, model: str) -> None:
        self._gauge: Any = None
        self._said: bool | None = None
        # Imported before the folder is named, prometheus_client would keep to this process for good.
        if not wanted or not os.environ.get("PROMETHEUS_MULTIPROC_DIR"):
            return
        try:
            from prometheus_client import Gauge  # type: ignore[import-not-found]

            if not _made:
                _made.append(Gauge(NAME, _TEXT, labelnames=["model_name"], multiprocess_mode="min"))
            self._gauge = _made[0].labels(model)
            self.say(False)
        except Exception as error:
            self._gauge = None
            log.warning("kvtier: no gauge at SGLang's metrics (%s)", error)

    @property
    def is_kept(self) -> bool:
        return self._gauge is not None

    def say(self, attached: bool) -> None:
        """Often: only news cost anything."""
        if self._gauge is not None and attached != self._said:
            self._said = attached
            self._gauge.set(int(attached))
