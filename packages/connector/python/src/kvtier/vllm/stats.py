"""Counters of both halves, and what the node says of its tiers, through vLLM's own interface for metrics: one line in its log, Prometheus
counters and gauges at its endpoint.
"""

from __future__ import annotations

import functools
import time
from typing import Any

from kvtier.vllm.bases import KVConnectorPromMetrics, KVConnectorStats
from kvtier.vllm.known import DENIALS
from kvtier.vllm.tiers import TIER_FIGURES, tiers_of

PREFIX = "vllm:kvtier_"
#: Of gauges of the node's tiers: as our own engine's worker names them.
TIER_PREFIX = "kvtier_tier_"
#: Counter -> what it counts; the name of its metric is `vllm:kvtier_` + the counter + `_total`.
COUNTERS: dict[str, str] = {
    "lookups": "requests that the cache node was asked about",
    "unasked": "requests that the cache node need not be asked about: its table of held blocks has nothing of them",
    "unasked_hits": "requests that the cache node need not be asked about: by its table of held blocks, all of it lies in its arena",
    "loads": "prefixes that were leased",
    "loaded_tokens": "prompt tokens that were claimed from the tier",
    "loaded_blocks": "blocks that were claimed from the tier over native offloading",
    "loaded_bytes": "bytes that were copied from the arena",
    "promises": "requests that waited for what another pod computed",
    "pins_ended": "requests whose blocks another pod pinned for them, and need not keep any more",
    "hints_done": "actions of KV hints that were done as they say",
    "hints_clipped": "actions of KV hints that keep blocks more shortly than they say",
    "hints_ignored": "actions of KV hints that are not known here, not sound, or of requests with nothing to keep",
    "restaged": "prefixes that were leased anew because the local hit shrank, or the rest of a promised one did not come",
    "leases_expired": "leases that ended because the request was not admitted",
    "bad_blocks": "blocks that were found bad in the arena before they were claimed",
    "corrupt_blocks": "blocks that did not match their checksum while they were copied",
    "stored_blocks": "blocks that were committed",
    "stored_bytes": "bytes that were copied to the arena",
    "store_left_out_blocks": "blocks that are not stored because as many blocks were held for stores as may be",
    "store_refused_blocks": "blocks that the node had no space for",
    "store_unanswered_blocks": "blocks whose reserve was not answered in time",
    "bounced_bytes": "bytes that went to or from a GPU over a buffer, since the arena was not pinned",
    "late_blocks": "blocks that a GPU has not copied within its deadline",
    "pins_refused": "arenas that the system did not pin",
    "unknown_answers": "frames of a newer node, of a kind that is not known here; skipped",
    "troubles": "callbacks that failed",
}
#: The one counter with a label besides vLLM's: `reason`, of `DENIALS`; told as "denied_" + the reason.
DENIED = "requests that were computed although something might have been held"
#: Gauge -> what it says; the name of its metric is `vllm:kvtier_` + the gauge.
GAUGES: dict[str, str] = {
    "attached": "1 while the engine has a cache node, and all of its ranks have mapped the arena; 0: all is computed",
}
#: A gauge is told when it changes, and again so often: several API servers may take turns in hearing it, and one may be made anew.
_TELL_AGAIN_S = 5.0


class KvtierStats(KVConnectorStats):  # type: ignore[misc]
    """Sums of one interval; of gauges and of tiers, under "gauges" and "tiers", what was said last."""

    def reset(self) -> None:
        self.data: dict[str, Any] = {}

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        for name, count in other.data.items():
            if isinstance(count, (int, float)):
                self.data[name] = self.data.get(name, 0) + count
        gauges = {**gauges_of(self.data), **gauges_of(other.data)}
        if gauges:
            self.data["gauges"] = gauges
        mine = dict(tiers_of(self.data))
        for tier, figures in tiers_of(other.data).items():
            mine[tier] = {**mine.get(tier, {}), **figures}
        if mine:
            self.data["tiers"] = mine
        return self

    def reduce(self) -> dict[str, int | float]:
        told = {name: count for name, count in sorted(self.data.items()) if isinstance(count, (int, float))}
        told.update(gauges_of(self.data))
        for tier, figures in sorted(tiers_of(self.data).items()):
            if "bytes" in figures:
                told[f"tier_{tier}_bytes"] = figures["bytes"]
        return told

    def is_empty(self) -> bool:
        return not any(self.data.values())


class Since:
    """What was counted since it was last asked."""

    def __init__(self) -> None:
        self._told: dict[str, int] = {}
        self._attached: bool | None = None
        self._tell_at = 0.0

    def of(self, scheduler: Any, worker: Any, troubles: int) -> KvtierStats | None:
        """What the halves of this process have counted; either may be None."""
        now: dict[str, int] = scheduler.counted() if scheduler is not None else {}
        if worker is not None:
            now["loaded_bytes"] = worker.loaded_bytes
            now["stored_bytes"] = worker.stored_bytes
            now.update(worker.device_counters())
        now["troubles"] = troubles
        # The scheduler's half alone knows of all ranks: attached is what the least of them is.
        attached = scheduler.attached if scheduler is not None else None
        tiers = scheduler.tiers() if scheduler is not None else {}
        told = self.take(now)
        if attached is not None and self._is_news(attached):
            told = told or KvtierStats(data={})
            told.data["gauges"] = {"attached": int(attached)}
        if tiers:
            told = told or KvtierStats(data={})
            told.data["tiers"] = tiers
        return told

    def _is_news(self, attached: bool) -> bool:
        now = time.monotonic()
        if attached == self._attached and now < self._tell_at:
            return False
        self._attached, self._tell_at = attached, now + _TELL_AGAIN_S
        return True

    def take(self, now: dict[str, int]) -> KvtierStats | None:
        grown: dict[str, Any] = {}
        for name, count in now.items():
            more = count - self._told.get(name, 0)
            if more:
                grown[name] = more
        if not grown:
            return None
        self._told = dict(now)
        return KvtierStats(data=grown)


def gauges_of(data: dict[str, Any]) -> dict[str, int]:
    """Of the data of statistics, which come from another process."""
    found = data.get("gauges")
    return {name: value for name, value in found.items() if name in GAUGES and isinstance(value, int)} if isinstance(found, dict) else {}


def latest_of(metric_types: Any) -> Any:
    """The same types; of a gauge that several API servers have, what was said last, and not one series for each of them."""
    try:
        from prometheus_client import Gauge  # type: ignore[import-not-found]
    except ImportError:
        return metric_types
    if Gauge not in metric_types:
        return metric_types
    return {**metric_types, Gauge: functools.partial(metric_types[Gauge], multiprocess_mode="mostrecent")}


def forget_tier_metrics() -> None:
    """vLLM makes its metrics anew in the same process, and takes away those before by their prefix, which these have not."""
    try:
        from prometheus_client import REGISTRY

        for collector in set(REGISTRY._collector_to_names):
            if str(getattr(collector, "_name", "")).startswith(TIER_PREFIX):
                REGISTRY.unregister(collector)
    except (ImportError, AttributeError, KeyError):
        return


class KvtierPromMetrics(KVConnectorPromMetrics):  # type: ignore[misc]
    def __init__(self, vllm_config: Any, metric_types: Any, labelnames: Any, per_engine_labelvalues: Any) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        from prometheus_client import Counter, Gauge

        forget_tier_metrics()
        made, gauge = metric_types[Counter], latest_of(metric_types)[Gauge]
        self._by_name: dict[str, dict[int, Any]] = {}
        for name, text in COUNTERS.items():
            counter = made(name=PREFIX + name, documentation=f"kvtier: {text}.", labelnames=labelnames)
            self._by_name[name] = {engine: counter.labels(*values) for engine, values in per_engine_labelvalues.items()}
        denied = made(name=PREFIX + "denied", documentation=f"kvtier: {DENIED}.", labelnames=[*labelnames, "reason"])
        for why in sorted(DENIALS):
            self._by_name[f"denied_{why}"] = {engine: denied.labels(*values, why) for engine, values in per_engine_labelvalues.items()}
        self._gauges: dict[str, dict[int, Any]] = {}
        for name, text in GAUGES.items():
            of_all = gauge(name=PREFIX + name, documentation=f"kvtier: {text}.", labelnames=labelnames)
            self._gauges[name] = {engine: of_all.labels(*values) for engine, values in per_engine_labelvalues.items()}
            for one in self._gauges[name].values():
                one.set(0)  # so long as nobody has said otherwise: an engine that never attaches says nothing
        self._engines = per_engine_labelvalues
        labels = [*labelnames, "tier"]
        self._of_tiers = {
            name: gauge(name=TIER_PREFIX + name, documentation=f"kvtier: {text}.", labelnames=labels)
            for name, text in TIER_FIGURES.items()
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        for name, count in transfer_stats_data.items():
            counter = self._by_name.get(name, {}).get(engine_idx)
            if counter is not None and isinstance(count, (int, float)) and count > 0:
                counter.inc(count)
        for name, value in gauges_of(transfer_stats_data).items():
            of_engine = self._gauges[name].get(engine_idx)
            if of_engine is not None:
                of_engine.set(value)
        engine = self._engines.get(engine_idx)
        for tier, figures in tiers_of(transfer_stats_data).items():
            for name, value in figures.items():
                if name in self._of_tiers and engine is not None:
                    self._of_tiers[name].labels(*engine, tier).set(value)


class NoPromMetrics(KVConnectorPromMetrics):  # type: ignore[misc]
    """Where they cannot be made: vLLM asks beside other connectors for the metrics of each that tells statistics."""

    def __init__(self) -> None:
        pass

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        pass
