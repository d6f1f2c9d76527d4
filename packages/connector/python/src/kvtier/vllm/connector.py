"""`KvtierConnector`: what vLLM loads by

    --kv-transfer-config '{"kv_connector": "KvtierConnector", "kv_connector_module_path": "kvtier.vllm.connector",
                           "kv_role": "kv_both", "kv_connector_extra_config": {"socket": "/run/kvtier/node.sock"}}'

One object in the process of the scheduler, one in each worker; this class only hands on. Invariant: no callback raises into the
engine or waits longer than its patience; what fails is a miss.
"""

from __future__ import annotations

import logging
from typing import Any

from kvtier.vllm import naming
from kvtier.vllm import options as options_module
from kvtier.vllm.bases import KVConnectorBase_V1, KVConnectorTransferResults, SupportsHMA, takes_failed_requests
from kvtier.vllm.guard import Troubles, harmless
from kvtier.vllm.halves import halves
from kvtier.vllm.messages import KvtierHandshake, KvtierMetadata, KvtierWorkerMetadata
from kvtier.vllm.scheduler import SchedulerHalf
from kvtier.vllm.stats import KvtierPromMetrics, KvtierStats, NoPromMetrics, Since
from kvtier.vllm.worker import WorkerHalf
from kvtier.vllm.wrapping import wrappers

naming.register()

log = logging.getLogger("kvtier.vllm")


class KvtierConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """See the module. With options that are wrong it is not made: the operator sees it at the start, in one line."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        self.troubles = Troubles()
        self._scheduler: SchedulerHalf | None
        self._worker: WorkerHalf | None
        self._since = Since()
        self._wrapped = bool(wrappers())
        transfer = vllm_config.kv_transfer_config
        options = options_module.parse(getattr(transfer, "kv_connector_extra_config", None))
        self._scheduler, self._worker, self._refusal = halves(
            SchedulerHalf, options, vllm_config, role, kv_cache_config, self.troubles
        )

    # ---- what it is ---------------------------------------------------------------------------------------------------

    @property
    def requires_kv_delivery(self) -> bool:
        """A store that is lost is a miss."""
        return False

    @property
    def prefer_cross_layer_blocks(self) -> bool:
        return False

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        return False

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: Any) -> str | None:
        return None

    def get_finished_count(self) -> int | None:
        return None

    # ---- the worker's half -----------------------------------------------------------------------------------------------

    @harmless(lambda: None)
    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        if self._worker is not None:
            self._worker.register(kv_caches)

    def register_cross_layers_kv_cache(self, kv_cache: Any, attn_backend: Any) -> None:
        """Not preferred; an engine that does it anyway gets misses."""

    def set_host_xfer_buffer_ops(self, copy_operation: Any) -> None:
        pass

    @harmless(lambda: KvtierHandshake(refusal="the handshake failed"))
    def get_handshake_metadata(self) -> KvtierHandshake | None:
        """None beside other connectors, which would be given it as theirs: the scheduler's half asks for it with a step."""
        if self._wrapped:
            return None
        if self._worker is None:
            return KvtierHandshake(refusal=self._refusal or "no worker's half")
        return self._worker.handshake()

    def handle_preemptions(self, kv_connector_metadata: Any) -> None:
        """Blocks that are copied are held by reference count: nobody else has them."""

    def _not_started(self, *_args: Any, **_kwargs: Any) -> None:
        if self._worker is not None:
            self._worker.give_up(self._connector_metadata)

    @harmless(lambda: None, _not_started)
    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        metadata = self._connector_metadata
        if self._worker is not None and isinstance(metadata, KvtierMetadata):
            self._worker.start(metadata)

    def wait_for_layer_load(self, layer_name: str) -> None:
        pass

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        pass

    def wait_for_save(self) -> None:
        pass

    def _ended(self, names: set[str], by_request: bool = False) -> tuple[set[str], set[str]]:
        return names, self._worker.tell(names, by_request) if self._worker is not None else set()

    def _end_all(self) -> set[str]:
        """Where `finished` has failed: it is asked again at the next step. Once it is given up, what nothing copies for has failed."""
        return self._worker.end_all() if self._worker is not None and self.troubles.stopped else set()

    def _not_finished(self, _finished_req_ids: set[str]) -> tuple[None, set[str] | None]:
        return None, self._ended(self._end_all())[0] or None

    @harmless(lambda: (None, None), _not_finished)
    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        if self._worker is None:
            return None, None
        return None, self._ended(self._worker.finished())[0] or None

    def _results(self, names: set[str]) -> Any:
        names, failed = self._ended(names, by_request=True)
        return KVConnectorTransferResults(finished_recving=names, failed_recving=failed)

    def _no_results(self, _finished_req_ids: set[str]) -> Any:
        return self._results(self._end_all())

    @harmless(lambda: KVConnectorTransferResults(), _no_results)
    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        """Instead of `get_finished`, by engines that take failures by request."""
        if not takes_failed_requests():
            return super().get_transfer_results(finished_req_ids)
        return self._results(self._worker.finished() if self._worker is not None else set())

    @harmless(set)
    def get_block_ids_with_load_errors(self) -> set[int]:
        return self._worker.failed_blocks() if self._worker is not None else set()

    @harmless(lambda: None)
    def build_connector_worker_meta(self) -> KvtierWorkerMetadata | None:
        return self._worker.report() if self._worker is not None else None

    # ---- the scheduler's half --------------------------------------------------------------------------------------------

    @harmless(lambda: None)
    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        if self._scheduler is not None:
            self._scheduler.bind_pool(gpu_block_pool)

    @harmless(lambda: None)
    def set_xfer_handshake_metadata(self, metadata: dict[int, Any]) -> None:
        self.set_xfer_handshake_metadata_pp_aware({(0, rank): one for rank, one in metadata.items()})

    @harmless(lambda: None)
    def set_xfer_handshake_metadata_pp_aware(self, metadata: dict[tuple[int, int], Any]) -> None:
        if self._scheduler is not None:
            self._scheduler.handshake(metadata)

    @harmless(lambda: None)
    def on_new_request(self, request: Any) -> None:
        if self._scheduler is not None:
            self._scheduler.new_request(request)

    @harmless(lambda: (0, False))
    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        if self._scheduler is None:
            return 0, False
        return self._scheduler.matched(request, num_computed_tokens)

    def _not_planned(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if self._scheduler is not None and num_external_tokens > 0:
            self._scheduler.fail_load(request.request_id, blocks)

    @harmless(lambda: None, _not_planned)
    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if self._scheduler is not None:
            self._scheduler.allocated(request, blocks, num_external_tokens)

    def _only_loads(self, _scheduler_output: Any) -> KvtierMetadata:
        return self._scheduler.loads() if self._scheduler is not None else KvtierMetadata()

    @harmless(KvtierMetadata, _only_loads)
    def build_connector_meta(self, scheduler_output: Any) -> KvtierMetadata:
        return self._scheduler.metadata(scheduler_output) if self._scheduler is not None else KvtierMetadata()

    @harmless(lambda: None)
    def update_connector_output(self, connector_output: Any) -> None:
        told = getattr(connector_output, "kv_connector_worker_meta", None)
        if self._scheduler is not None:
            bad = getattr(connector_output, "invalid_block_ids", None) or ()
            self._scheduler.hear(told if isinstance(told, KvtierWorkerMetadata) else None, bad)

    def _forgotten(self, request: Any, _block_ids: Any) -> tuple[bool, None]:
        if self._scheduler is not None:
            self._scheduler.gone(request.request_id)
        return False, None

    @harmless(lambda: (False, None), _forgotten)
    def request_finished_all_groups(self, request: Any, block_ids: Any) -> tuple[bool, dict[str, Any] | None]:
        return False, self._scheduler.finished(request, block_ids) if self._scheduler is not None else None

    @harmless(lambda: (False, None))
    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished_all_groups(request, (block_ids,))

    @harmless(lambda: False)
    def has_pending_push_work(self) -> bool:
        return self._scheduler.wants_steps if self._scheduler is not None else False

    @harmless(lambda: False)
    def has_pending_block_frees(self) -> bool:
        """Before it preempts a request, the engine waits for these."""
        return self._scheduler.frees_soon if self._scheduler is not None else False

    def take_events(self) -> tuple[()]:
        return ()

    def _not_reset(self) -> bool:
        """What is stored may be another model's: nothing of it is served any more."""
        self.troubles.stop()
        return False

    @harmless(lambda: False, _not_reset)
    def reset_cache(self) -> bool | None:
        return self._scheduler.reset() if self._scheduler is not None else True

    # ---- metrics, end ----------------------------------------------------------------------------------------------------

    @harmless(lambda: None)
    def get_kv_connector_stats(self) -> KvtierStats | None:
        return self._since.of(self._scheduler, self._worker, self.troubles.count)

    def get_kv_connector_kv_cache_events(self) -> None:
        return None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KvtierStats:
        return KvtierStats(data=dict(data or {}))

    @classmethod
    def build_prom_metrics(cls, vllm_config: Any, metric_types: Any, labelnames: Any, per_engine_labelvalues: Any) -> Any:
        try:
            return KvtierPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        except Exception as error:
            log.warning("kvtier: no metrics (%s)", error)
            return NoPromMetrics()

    @harmless(lambda: None)
    def shutdown(self) -> None:
        if self._scheduler is not None:
            self._scheduler.shutdown()
        if self._worker is not None:
            self._worker.shutdown()
