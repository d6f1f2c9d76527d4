"""What a connector is made of in each process of vLLM: the scheduler's half in one, a worker's half in each of the others."""

from __future__ import annotations

import logging
from typing import Any, Callable, TypeVar

from kvtier.vllm import versions
from kvtier.vllm.bases import KVConnectorRole, vllm_version
from kvtier.vllm.guard import Troubles
from kvtier.vllm.logs import follow_vllm
from kvtier.vllm.options import Options
from kvtier.vllm.worker import WorkerHalf
from kvtier.vllm.wrapping import wrappers

log = logging.getLogger("kvtier.vllm")

_Scheduler = TypeVar("_Scheduler")


def halves(
    scheduler: Callable[[Options, Any, Any, Troubles], _Scheduler],
    options: Options,
    vllm_config: Any,
    role: Any,
    kv_cache_config: Any,
    troubles: Troubles,
) -> tuple[_Scheduler | None, WorkerHalf | None, str]:
    """The half of this role, made; or neither and why, in one line. Never raises."""
    try:
        follow_vllm()
        # Whatever fails to load is computed, and never ends a request; read by the scheduler right after this.
        vllm_config.kv_transfer_config.kv_load_failure_policy = "recompute"
        for outer in wrappers():
            _recompute(outer)
        version = vllm_version()
        row = versions.find(version, options.accept_versions)
        if row is None:
            refusal = versions.refusal(version)
            if role == KVConnectorRole.SCHEDULER:
                log.warning("kvtier: %s", refusal)
            return None, None, refusal
        if role == KVConnectorRole.SCHEDULER:
            caution = versions.caution(version, row)
            if caution:
                log.warning("kvtier: %s", caution)
            return scheduler(options, vllm_config, kv_cache_config, troubles), None, ""
        return None, WorkerHalf(options, vllm_config, kv_cache_config, troubles), ""
    except Exception as error:
        troubles.note("the start", error)
        return None, None, f"the start failed ({error})"


def _recompute(outer: Any) -> None:
    """The scheduler reads it of the MultiConnector, for all that is in it."""
    try:
        outer.kv_transfer_config.kv_load_failure_policy = "recompute"
    except Exception as error:
        log.warning(
            "kvtier: the MultiConnector's configuration cannot be set (%s): a load that fails ends its request; give it "
            '"kv_load_failure_policy": "recompute"',
            error,
        )
