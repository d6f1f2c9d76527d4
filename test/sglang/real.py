"""The storage backend under SGLang's own controller, host pools and backend factory, on a CPU: what its threads back up and prefetch."""

from __future__ import annotations

import os
import random
import signal
import sys
import threading
import time
import unittest
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "packages/connector/python/tests"))

import torch  # noqa: E402
import torch.distributed  # noqa: E402
from rig import NodeCase, until  # noqa: E402
from sglang.srt.managers.cache_controller import HiCacheController  # noqa: E402
from sglang.srt.mem_cache.hicache_storage import PoolHitPolicy, PoolName, PoolTransfer  # noqa: E402
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool  # noqa: E402
from sglang.srt.mem_cache.pool_host import base  # noqa: E402
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost  # noqa: E402
from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost  # noqa: E402
from sglang.srt.runtime_context import get_parallel  # noqa: E402
from sglang_play import names  # noqa: E402

PAGE = 4
TOKENS = 1024
LAYERS = 3

#: SGLang keeps 10 GB of the machine free: more than a test needs.
base.HICACHE_HOST_MEMORY_RESERVE_BYTES = 0


def single_process() -> None:
    if not torch.distributed.is_initialized():
        torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)


class Allocator:
    """The controller asks it for its pool, and nothing else."""

    def __init__(self, pool: Any) -> None:
        self._pool = pool

    def get_kvcache(self) -> Any:
        return self._pool


class Rank:
    """One scheduler's controller; its radix tree is played."""

    def __init__(self, socket_path: str, layout: str, kind: str = "mha", interface: int = 1, ranks: int = 1, rank: int = 0) -> None:
        single_process()
        if kind == "mha":
            device = MHATokenToKVPool(TOKENS, PAGE, torch.bfloat16, 2, 8, LAYERS, "cpu", False)
            self.pool = MHATokenToKVPoolHost(device, 2.0, 0, PAGE, layout, False, "cpu")
        else:
            device = MLATokenToKVPool(TOKENS, PAGE, torch.bfloat16, 24, 8, LAYERS, "cpu", False)
            self.pool = MLATokenToKVPoolHost(device, 2.0, 0, PAGE, layout, False, "cpu")
        self.content_rank = 0 if kind == "mla" else rank
        options = {"socket": socket_path, "weights_digest": "ab" * 32, "accept_versions": ["0.0"], "lookup_deadline_ms": 2000}
        extra = {
            "backend_name": "kvtier",
            "module_path": "kvtier.sglang.storage",
            "class_name": "KvtierStorage",
            "kvtier": options,
            **({"interface_v1": 1} if interface else {}),
        }
        with get_parallel().override(tp_rank=rank, tp_size=ranks, pp_rank=0, pp_size=1):
            self.controller = HiCacheController(
                Allocator(device),
                self.pool,
                PAGE,
                torch.distributed.group.WORLD,
                threading.Event(),
                io_backend="direct",
                storage_backend="dynamic",
                prefetch_threshold=PAGE,
                model_name="model",
                storage_backend_extra_config=extra,
            )
        self.storage = self.controller.storage_backend

    @property
    def attached(self) -> bool:
        shares = list(self.storage.shares._shares.values())
        return len(shares) == len(self.storage.shares._memory) and all(share.session.attachment for share in shares)

    def _content(self, key: str) -> torch.Tensor:
        like = self.pool.get_dummy_flat_data_page()
        generator = torch.Generator().manual_seed(int(key[:12], 16) + self.content_rank)
        return torch.randn(like.shape, generator=generator).to(like.dtype)

    def backup(self, tokens: list[int], prefix: list[str] | None = None) -> int:
        """Tokens that the backup thread stored."""
        keys = self.controller.get_hash_str(tokens, prefix[-1] if prefix else None, page_size=PAGE)
        indices = self.pool.alloc(len(tokens))
        for i, key in enumerate(keys):
            self.pool.set_from_flat_data_page(int(indices[i * PAGE]), self._content(key))
        self.controller.write_storage(indices, tokens, keys, list(prefix) if prefix else None)
        operation = self.controller.ack_backup_queue.get(timeout=30)
        for i in range(len(keys)):  # the tree may evict it now
            self.pool.set_from_flat_data_page(int(indices[i * PAGE]), torch.full_like(self._content("0" * 12), 7))
        self.pool.free(indices)
        return operation.completed_tokens

    def prefetch(self, tokens: list[int], last: str | None = None) -> tuple[int, list[str]]:
        """Tokens that the prefetch threads brought, and pages that hold something else."""
        controller = self.controller
        operation = controller.prefetch(f"request {time.monotonic_ns()}", tokens, last)
        assert controller.prefetch_hit_queue.get(timeout=30) is operation
        wanted = len(operation.hash_value) * PAGE
        if wanted == 0:
            return 0, []
        operation.host_indices = self.pool.alloc(wanted)
        controller.prefetch_buffer.put(operation)
        until("the prefetch ends", lambda: operation.completed_tokens == wanted or operation.is_terminated())
        keys = operation.hash_value[: operation.completed_tokens // PAGE]
        wrong = [
            key
            for i, key in enumerate(keys)
            if not torch.equal(self.pool.get_data_page(int(operation.host_indices[i * PAGE])), self._content(key))
        ]
        until("nothing is released any more", lambda: operation.completed_tokens == wanted or self._released(wanted, operation))
        self.pool.free(operation.host_indices)
        return operation.completed_tokens, wrong

    def _released(self, wanted: int, operation: Any) -> bool:
        """What was not brought comes back through a queue, after the last call of the storage backend."""
        queue = self.controller.host_mem_release_queue
        return sum(int(page.numel()) for page in list(queue.queue)) >= wanted - operation.completed_tokens

    def close(self) -> None:
        self.controller.detach_storage_backend()


class Real(NodeCase):
    def rank(self, node: Any, layout: str, attached: bool = True, **more: Any) -> Rank:
        rank = Rank(node.socket_path, layout, **more)
        self.addCleanup(rank.close)
        if attached:
            until("the backend is attached", lambda: rank.attached)
        return rank

    def unharmed(self, *ranks: Rank) -> None:
        for rank in ranks:
            self.assertEqual((rank.storage.troubles.count, rank.storage.shares.refusal), (0, ""))
            self.assertTrue(rank.controller.prefetch_thread.is_alive() and rank.controller.backup_thread.is_alive())
            self.assertTrue(rank.controller.prefetch_io_aux_thread.is_alive())

    def test_every_layout_of_every_pool(self) -> None:
        node = self.node(arena_bytes=64 << 20)
        for kind, layouts in (
            ("mha", ("layer_first", "page_first", "page_first_direct", "page_head")),
            ("mla", ("layer_first", "page_first", "page_first_direct")),
        ):
            for layout in layouts:
                for interface in (1, 0):
                    with self.subTest(kind=kind, layout=layout, interface=interface):
                        first = self.rank(node, layout, kind=kind, interface=interface)
                        tokens = list(range(160 * PAGE))
                        self.assertEqual(first.prefetch(tokens), (0, []))
                        self.assertEqual((first.backup(tokens), first.prefetch(tokens)), (len(tokens), (len(tokens), [])))
                        # Another process's, and one that has only what comes after a prefix.
                        second = self.rank(node, layout, kind=kind, interface=interface)
                        more = tokens + list(range(9000, 9000 + 10 * PAGE))
                        self.assertEqual(second.prefetch(more), (len(tokens), []))
                        keys = second.controller.get_hash_str(tokens, None, page_size=PAGE)
                        self.assertEqual(second.backup(more[len(tokens) :], keys), 10 * PAGE)
                        self.assertEqual(first.prefetch(more), (len(more), []))
                        self.assertEqual(first.prefetch(more[80 * PAGE :], keys[79]), (90 * PAGE, []))
                        self.unharmed(first, second)
                        first.close()
                        second.close()

    def test_names_are_those_of_the_played_engine(self) -> None:
        node = self.node()
        rank = self.rank(node, "page_first")
        self.assertEqual(rank.controller.get_hash_str(list(range(3000, 3000 + 5 * PAGE)), None, page_size=PAGE), names(3, 5, PAGE))

    def test_ranks_of_mla_store_once_and_all_load(self) -> None:
        node = self.node()
        ranks = [self.rank(node, "page_first", kind="mla", ranks=2, rank=rank) for rank in range(2)]
        tokens = list(range(20 * PAGE))
        self.assertEqual((ranks[1].backup(tokens), ranks[0].prefetch(tokens)), (0, (0, [])))
        self.assertEqual(ranks[0].backup(tokens), len(tokens))
        self.assertEqual([one.prefetch(tokens) for one in ranks], [(len(tokens), [])] * 2)
        heads = [self.rank(node, "page_first", ranks=2, rank=rank) for rank in range(2)]
        self.assertEqual((heads[0].backup(tokens), heads[1].prefetch(tokens)), (len(tokens), (0, [])))
        self.unharmed(*ranks, *heads)

    def test_a_flush_and_a_clear_begin_a_new_generation(self) -> None:
        node = self.node()
        rank = self.rank(node, "page_first")
        tokens = list(range(8 * PAGE))
        for begin in (self._flush, lambda one: one.storage.clear()):
            self.assertEqual((rank.backup(tokens), rank.prefetch(tokens)), (len(tokens), (len(tokens), [])))
            begin(rank)
            rank.prefetch(tokens)
            until("attached again", lambda: rank.attached)
            self.assertEqual(rank.prefetch(tokens), (0, []))
        self.unharmed(rank)

    def _flush(self, rank: Rank) -> None:
        """As its radix tree does it."""
        rank.controller.reset()
        rank.pool.clear()

    def test_a_pool_of_another_kind_beside_the_kv(self) -> None:
        node = self.node()
        rank = self.rank(node, "page_first")
        tokens = list(range(8 * PAGE))
        keys = rank.controller.get_hash_str(tokens, None, page_size=PAGE)
        device = MLATokenToKVPool(TOKENS, PAGE, torch.bfloat16, 24, 8, LAYERS, "cpu", False)
        other = MLATokenToKVPoolHost(device, 2.0, 0, PAGE, "page_first", False, "cpu")
        rank.storage.register_mem_host_pool_v2(other, PoolName.INDEXER)
        until("attached", lambda: rank.attached)
        rank.backup(tokens)
        indices = other.alloc(5 * PAGE)
        for i in range(5):
            other.set_from_flat_data_page(int(indices[i * PAGE]), torch.full_like(other.get_dummy_flat_data_page(), i + 1))
        transfer = PoolTransfer(name=PoolName.INDEXER, host_indices=indices, keys=keys[:5])
        self.assertEqual(rank.storage.batch_set_v2([transfer]), {PoolName.INDEXER: [True] * 5})
        all_pages = PoolTransfer(name=PoolName.INDEXER)
        found = rank.storage.batch_exists_v2(keys, [all_pages])
        self.assertEqual((found.kv_hit_pages, found.extra_pool_hit_pages), (5, {PoolName.KV: 8, PoolName.INDEXER: 5}))
        tail = PoolTransfer(name=PoolName.INDEXER, keys=keys[-1:], hit_policy=PoolHitPolicy.TRAILING_PAGES)
        self.assertEqual(rank.storage.batch_exists_v2(keys, [tail]).kv_hit_pages, 5)
        for i in range(5):
            other.set_from_flat_data_page(int(indices[i * PAGE]), torch.zeros_like(other.get_dummy_flat_data_page()))
        self.assertEqual(rank.storage.batch_get_v2([transfer]), {PoolName.INDEXER: [True] * 5})
        for i in range(5):
            page = other.get_data_page(int(indices[i * PAGE]))
            self.assertTrue(torch.equal(page, torch.full_like(page, i + 1)))
        self.unharmed(rank)

    def test_whatever_the_node_does_its_threads_live_and_no_page_is_wrong(self) -> None:
        node = self.node()
        rank = self.rank(node, "page_first")
        draw = random.Random(int(os.environ.get("KVTIER_TEST_SEEDS") or 1))
        tokens = list(range(200 * PAGE))
        for blow in ("kill", "stop", "end", "stop", "kill"):
            rank.backup(tokens[: draw.randrange(1, 200) * PAGE])
            self.assertEqual(rank.prefetch(tokens)[1], [])
            if blow == "stop":
                node.send(signal.SIGSTOP)
            else:
                node.end(signal.SIGKILL if blow == "kill" else signal.SIGTERM)
            began = time.monotonic()
            for _ in range(5):
                self.assertEqual(rank.prefetch(tokens), (0, []))
                self.assertEqual(rank.backup(tokens[: 4 * PAGE]), 0)
            # One deadline, and not one a call: ten calls of 2 s each would take longer.
            self.assertLess(time.monotonic() - began, 15)
            if blow == "stop":
                node.send(signal.SIGCONT)
            else:
                node.start()
            until("attached again", lambda: rank.attached)
        until("all is stored", lambda: rank.backup(tokens) == len(tokens))
        self.assertEqual(rank.prefetch(tokens), (len(tokens), []))
        self.unharmed(rank)


if __name__ == "__main__":
    unittest.main()
