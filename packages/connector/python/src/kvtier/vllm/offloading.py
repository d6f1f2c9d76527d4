"""vLLM's native offloading with a cache node beneath it: vLLM's own policies of what is looked up, loaded and stored, and its own metrics.

    --kv-transfer-config '{"kv_connector": "KvtierOffloadingConnector", "kv_connector_module_path": "kvtier.vllm.offloading",
                           "kv_role": "kv_both", "kv_connector_extra_config": {"socket": "/run/kvtier/node.sock"}}'

`KvtierOffloadingSpec` is what the native connector asks for a manager and a worker. `KvtierOffloadingConnector` is the native one with
what its interface has no room for: the workers' layouts on their way to the scheduler, checksums on their way back, blocks that could
not be loaded (the native worker ends the engine instead), and an end to every wait.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

from kvtier.vllm import naming
from kvtier.vllm import options as options_module
from kvtier.vllm.bases import takes_failed_requests
from kvtier.vllm.guard import Troubles, harmless
from kvtier.vllm.halves import halves
from kvtier.vllm.messages import KvtierHandshake, KvtierMetadata, KvtierWorkerMetadata
from kvtier.vllm.offload_bases import OffloadingConnector, OffloadingCounterMetadata, OffloadingGaugeMetadata, OffloadingSpec
from kvtier.vllm.offload_messages import OffloadMetadata, OffloadWorkerMetadata
from kvtier.vllm.offload_scheduler import Manager, OffloadHalf
from kvtier.vllm.offload_worker import OffloadWorker
from kvtier.vllm.stats import COUNTERS, GAUGES, PREFIX, TIER_PREFIX, Since, forget_tier_metrics, gauges_of, latest_of
from kvtier.vllm.tiers import TIER_FIGURES, tiers_of
from kvtier.vllm.worker import WorkerHalf
from kvtier.vllm.wrapping import wrappers

naming.register()

log = logging.getLogger("kvtier.vllm")

#: Keys of `kv_connector_extra_config` that are the native connector's.
_NATIVE = frozenset({"spec_name", "spec_module_path", "offload_prompt_only", "self_describing_kv_events"})


def _with_spec(extra: Any) -> dict[str, Any]:
    return {**(extra or {}), "spec_name": "KvtierOffloadingSpec", "spec_module_path": __name__}


class KvtierOffloadingSpec(OffloadingSpec):  # type: ignore[misc]
    #: While a connector is made: whose spec this is.
    owner: KvtierOffloadingConnector | None = None

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        if KvtierOffloadingSpec.owner is None:
            raise ValueError(
                'KvtierOffloadingSpec comes with a connector of its own: give "kv_connector": "KvtierOffloadingConnector" and '
                '"kv_connector_module_path": "kvtier.vllm.offloading" instead of "OffloadingConnector"'
            )
        self._owner = KvtierOffloadingSpec.owner

    @classmethod
    def build_metric_definitions(cls, extra_config: dict[str, Any]) -> dict[str, Any]:
        """A metric that is not declared here ends vLLM's logger, and the process with it."""
        declared = {PREFIX + name: OffloadingCounterMetadata(documentation=f"kvtier: {text}.") for name, text in COUNTERS.items()}
        for name, text in GAUGES.items():
            declared[PREFIX + name] = OffloadingGaugeMetadata(documentation=f"kvtier: {text}.")
        for name, text in TIER_FIGURES.items():
            declared[TIER_PREFIX + name] = OffloadingGaugeMetadata(documentation=f"kvtier: {text}.", labelnames=("tier",))
        return declared

    def get_manager(self) -> Manager:
        return Manager(self._owner._scheduler, self._owner.troubles)

    def get_worker(self, kv_caches: Any) -> OffloadWorker:
        return self._owner.worker


class KvtierOffloadingConnector(OffloadingConnector):  # type: ignore[misc]
    """See the module. With options that are wrong it is not made: the operator sees it at the start, in one line."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        self.troubles = Troubles()
        self._since = Since()
        self._wrapped = bool(wrappers())
        self._scheduler: OffloadHalf | None
        self._worker: WorkerHalf | None
        transfer = vllm_config.kv_transfer_config
        extra = dict(getattr(transfer, "kv_connector_extra_config", None) or {})
        options = options_module.parse({key: value for key, value in extra.items() if key not in _NATIVE})
        transfer.kv_connector_extra_config = _with_spec(extra)
        self._scheduler, self._worker, self._refusal = halves(
            OffloadHalf, options, vllm_config, role, kv_cache_config, self.troubles
        )
        self.worker = OffloadWorker(self._worker, self.troubles)
        KvtierOffloadingSpec.owner = self
        try:
            super().__init__(vllm_config, role, kv_cache_config)
        finally:
            KvtierOffloadingSpec.owner = None

    # ---- what it is ---------------------------------------------------------------------------------------------------

    @property
    def prefer_cross_layer_blocks(self) -> bool:
        """Layers by themselves, as the connector takes them: both share their blocks."""
        return False

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: Any) -> str | None:
        return None

    # ---- the worker's half -----------------------------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        self._register(kv_caches)
        super().register_kv_caches(kv_caches)

    @harmless(lambda: None)
    def _register(self, kv_caches: dict[str, Any]) -> None:
        if self._worker is not None:
            self._worker.register(kv_caches)

    @harmless(lambda: KvtierHandshake(refusal="the handshake failed"))
    def get_handshake_metadata(self) -> KvtierHandshake | None:
        """None beside other connectors, which would be given it as theirs: the scheduler's half asks for it with a step."""
        if self._wrapped:
            return None
        if self._worker is None:
            return KvtierHandshake(refusal=self._refusal or "no worker's half")
        return self._worker.handshake()

    def handle_preemptions(self, kv_connector_metadata: Any) -> None:
        if isinstance(kv_connector_metadata, OffloadMetadata):
            self.worker.coming = kv_connector_metadata.kvtier
        super().handle_preemptions(kv_connector_metadata)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        self._come()
        super().start_load_kv(forward_context, **kwargs)
        self._start_planned()

    @harmless(lambda: None)
    def _come(self) -> None:
        self.worker.come(self._connector_metadata.load_jobs)

    def _not_started(self) -> None:
        self.worker.give_up(self._connector_metadata)

    @harmless(lambda: None, _not_started)
    def _start_planned(self) -> None:
        if isinstance(self._connector_metadata, OffloadMetadata):
            self.worker.start(self._connector_metadata)

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        """What asks `get_finished`, in engines that take failures by request."""
        if not takes_failed_requests():
            return super().get_transfer_results(finished_req_ids)
        with self.worker.by_request() as failed:
            results = super().get_transfer_results(finished_req_ids)
        return replace(results, failed_recving=results.failed_recving | failed)

    @harmless(set)
    def get_block_ids_with_load_errors(self) -> set[int]:
        return self._worker.failed_blocks() if self._worker is not None else set()

    def build_connector_worker_meta(self) -> Any:
        native, told = super().build_connector_worker_meta(), self._report()
        if native is None and told is None:
            return None
        # Never the native class: the first rank's decides what is put together.
        ours = OffloadWorkerMetadata(kvtier=told or KvtierWorkerMetadata())
        if native is not None:
            ours.completed_jobs, ours.transfer_stats = native.completed_jobs, native.transfer_stats
        return ours

    @harmless(lambda: None)
    def _report(self) -> KvtierWorkerMetadata | None:
        return self._worker.report() if self._worker is not None else None

    # ---- the scheduler's half --------------------------------------------------------------------------------------------

    @harmless(lambda: None)
    def set_xfer_handshake_metadata(self, metadata: dict[int, Any]) -> None:
        self.set_xfer_handshake_metadata_pp_aware({(0, rank): one for rank, one in metadata.items()})

    @harmless(lambda: None)
    def set_xfer_handshake_metadata_pp_aware(self, metadata: dict[tuple[int, int], Any]) -> None:
        if self._scheduler is not None:
            self._scheduler.handshake(metadata)

    def on_new_request(self, request: Any) -> None:
        super().on_new_request(request)
        self._came(request)

    @harmless(lambda: None)
    def _came(self, request: Any) -> None:
        if self._scheduler is not None:
            self._scheduler.new_request(request)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        if not self._ready(request, num_computed_tokens):
            return None, False
        found: tuple[int | None, bool] = super().get_num_new_matched_tokens(request, num_computed_tokens)
        self._looked_up(request.request_id, found[0])
        return found

    @harmless(lambda: None)
    def _looked_up(self, name: str, found: int | None) -> None:
        if self._scheduler is not None:
            self._scheduler.looked_up(name, found)

    @harmless(lambda: True)
    def _ready(self, request: Any, local_tokens: int) -> bool:
        return self._scheduler is None or self._scheduler.ready(request, local_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        if self._scheduler is None:
            return super().build_connector_meta(scheduler_output)
        # First: what is offered in this step is copied in the next one at the earliest.
        planned = self._plan(scheduler_output)
        native = super().build_connector_meta(scheduler_output)
        return OffloadMetadata(native.load_jobs, native.store_jobs, native.jobs_to_flush, kvtier=planned, ended=self._ended())

    def _only_loads(self, _scheduler_output: Any) -> KvtierMetadata:
        return self._scheduler.loads() if self._scheduler is not None else KvtierMetadata()

    @harmless(KvtierMetadata, _only_loads)
    def _plan(self, scheduler_output: Any) -> KvtierMetadata:
        return self._scheduler.metadata(scheduler_output) if self._scheduler is not None else KvtierMetadata()

    @harmless(list)
    def _ended(self) -> list[int]:
        return self._scheduler.ended() if self._scheduler is not None else []

    def update_connector_output(self, connector_output: Any) -> None:
        self._heard(connector_output)
        super().update_connector_output(connector_output)

    @harmless(lambda: None)
    def _heard(self, connector_output: Any) -> None:
        told = getattr(connector_output, "kv_connector_worker_meta", None)
        if self._scheduler is not None:
            bad = getattr(connector_output, "invalid_block_ids", None) or ()
            self._scheduler.hear(told.kvtier if isinstance(told, OffloadWorkerMetadata) else None, bad)

    def reset_cache(self) -> bool | None:
        ours, natives = self._reset(), super().reset_cache()
        return False if ours is False else natives

    def _not_reset(self) -> bool:
        """What is stored may be another model's: nothing of it is served any more."""
        self.troubles.stop()
        return False

    @harmless(lambda: False, _not_reset)
    def _reset(self) -> bool:
        return self._scheduler.reset() if self._scheduler is not None else True

    # ---- metrics, end ----------------------------------------------------------------------------------------------------

    def get_kv_connector_stats(self) -> Any:
        return self._counted(super().get_kv_connector_stats())

    def _natives_alone(self, natives: Any) -> Any:
        return natives

    @harmless(lambda: None, _natives_alone)
    def _counted(self, natives: Any) -> Any:
        """vLLM's own numbers, with ours beside them; of ours only what is declared."""
        grown = self._since.of(self._scheduler, self._worker, self.troubles.count)
        if grown is None:
            return natives
        both = natives if natives is not None else self.build_kv_connector_stats()
        for name, count in grown.data.items():
            if name in COUNTERS:
                both.increase_counter(PREFIX + name, count)
        for name, value in gauges_of(grown.data).items():
            both.set_gauge(PREFIX + name, value)
        for tier, figures in tiers_of(grown.data).items():
            for name, value in figures.items():
                both.set_gauge(TIER_PREFIX + name, value, (tier,))
        return both

    @classmethod
    def build_prom_metrics(cls, vllm_config: Any, metric_types: Any, labelnames: Any, per_engine_labelvalues: Any) -> Any:
        """In the API server, where no connector is made: vLLM's class asks the spec what it declares."""
        transfer = vllm_config.kv_transfer_config
        transfer.kv_connector_extra_config = _with_spec(transfer.kv_connector_extra_config)
        forget_tier_metrics()
        # Of vLLM's own metrics of offloading none is a gauge.
        made = super().build_prom_metrics(vllm_config, latest_of(metric_types), labelnames, per_engine_labelvalues)
        try:
            for engine in per_engine_labelvalues:
                none_yet = cls.build_kv_connector_stats()
                for name in GAUGES:
                    none_yet.set_gauge(PREFIX + name, 0)  # an engine that never attaches says nothing
                made.observe(none_yet.data, engine)
        except Exception as error:
            log.warning("kvtier: no gauges at the start (%s)", error)
        return made

    @harmless(lambda: None)
    def shutdown(self) -> None:
        try:
            super().shutdown()
        finally:
            if self._scheduler is not None:
                self._scheduler.shutdown()
