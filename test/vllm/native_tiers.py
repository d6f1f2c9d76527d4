"""vLLM's own offloading on a CPU: its connector, its policies, its tiers, with copies that a CPU can do. Its worker copies by CUDA's
streams and refuses any other platform; what is here in its place copies rows of tensors by torch, at once.

For figures only, as the other side of a comparison: `spec_module_path: "native_tiers"`.
"""
import time

import torch
from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec


class PlainWorker(OffloadingWorker):
    def __init__(self, caches, tier):
        if len(caches.group_data_refs) != 1:
            raise ValueError("one group of layers, all with one kind of attention")
        self.engine = [one.tensor.view(torch.int8).view(-1, one.page_size_bytes) for one in caches.tensors]
        self.tier = tier
        self.done = []

    def copy(self, job, source, source_rows, target, target_rows):
        began = time.perf_counter()
        rows, places = torch.from_numpy(source_rows.block_ids), torch.from_numpy(target_rows.block_ids)
        for one, other in zip(source, target):
            other.index_copy_(0, places, one.index_select(0, rows))
        size = len(rows) * sum(one.shape[1] for one in source)
        self.done.append(TransferResult(job_id=job, success=True, transfer_size=size, transfer_time=time.perf_counter() - began))
        return True

    def submit_store(self, job_id, src_spec, dst_spec):
        return self.copy(job_id, self.engine, src_spec, self.tier, dst_spec)

    def submit_load(self, job_id, src_spec, dst_spec):
        return self.copy(job_id, self.tier, src_spec, self.engine, dst_spec)

    def get_finished(self):
        done, self.done = self.done, []
        return done

    def wait(self, job_ids):
        pass  # each has ended


class PlainCpu(CPUOffloadingSpec):
    """CPU memory alone."""

    def get_worker(self, kv_caches):
        tier = [torch.zeros((self.num_blocks, one.page_size_bytes), dtype=torch.int8) for one in kv_caches.tensors]
        return PlainWorker(kv_caches, tier)


class PlainTiers(TieringOffloadingSpec):
    """CPU memory, and behind it vLLM's file system tier."""

    def get_worker(self, kv_caches):
        region = SharedOffloadRegion(engine_id=self.config.engine_id, num_blocks=self.num_blocks, rank=0,
                                     kv_bytes_per_block=self.kv_bytes_per_chunk, cpu_page_size=self.cpu_page_size_per_worker)
        return PlainWorker(kv_caches, [region.create_next_worker_view(one.page_size_bytes) for one in kv_caches.tensors])
