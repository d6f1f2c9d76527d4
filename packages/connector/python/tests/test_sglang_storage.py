"""SGLang's third tier against a real cache node, by SGLang's calls in their order (``sglang_play``)."""

from __future__ import annotations

import os
import random
import signal
import sys
import time
import types
import unittest
from typing import Any
from unittest import mock

os.environ["KVTIER_WITHOUT_SGLANG"] = "1"

from kvtier.sglang import gauges, storage  # noqa: E402
from rig import Node, until  # noqa: E402
from sglang_case import StorageCase  # noqa: E402
from sglang_play import Engine, Extra, Flat, Pool, Transfer, chain, names  # noqa: E402


class Shapes(StorageCase):
    def test_what_one_engine_stored_another_loads_in_every_layout(self) -> None:
        node = self.shared()
        for layout in ("layer_first", "page_first"):
            for page_size in (1, 4, 16):
                with self.subTest(layout=layout, page_size=page_size):
                    first = self.sglang(node, Pool(40, page_size, layout))
                    keys = names(page_size, 20, page_size)
                    self.assertEqual((first.exists(keys), first.backup(keys), first.exists(keys)), (0, 20, 20))
                    second = self.sglang(node, Pool(40, page_size, layout))
                    self.assertEqual(second.prefetch(keys + names(99, 3)), (20, []))
                    self.unharmed(first, second)

    def test_what_nobody_holds_is_not_asked_for(self) -> None:
        node = self.node()
        engine = self.sglang(node)
        keys = names(8, 12)
        tables = [share.session for share in engine.storage.shares._shares.values()]
        until("the tables are read", lambda: all(one.attachment and one.attachment.held for one in tables))
        with mock.patch("kvtier.session.Session.lookup", side_effect=AssertionError("the node was asked")):
            self.assertEqual(engine.exists(keys), 0)
        self.unharmed(engine)
        self.assertEqual((engine.backup(keys), engine.exists(keys)), (12, 12))
        self.unharmed(engine)

    def test_more_pages_than_a_call_or_a_piece_has(self) -> None:
        node = self.node(arena_bytes=64 << 20)
        pool = Pool(300, row=2048)  # 48 KiB a page: a piece of 1 MiB has 21
        engine = self.sglang(node, pool, piece_bytes=1 << 20)
        keys = names(3, 290)
        self.assertEqual((engine.backup(keys), engine.prefetch(keys)), (290, (290, [])))
        self.unharmed(engine)

    def test_sglang_is_told_of_each_batch_once(self) -> None:
        node = self.shared()
        engine = self.sglang(node, Pool(200))
        keys = names(5, 150)
        self.assertIsNone(engine.storage.get_stats())
        self.assertEqual(engine.backup(keys), 150)
        told = engine.storage.get_stats()
        self.assertEqual((told.backup_pgs, told.prefetch_pgs, told.prefetch_bandwidth), ([128, 22], [], []))
        self.assertTrue(all(0 < one < 1_000 for one in told.backup_bandwidth) and len(told.backup_bandwidth) == 2)
        self.assertEqual(engine.prefetch(keys + names(6, 9)), (150, []))
        told = engine.storage.get_stats()
        self.assertEqual((told.backup_pgs, told.prefetch_pgs, len(told.prefetch_bandwidth)), ([], [128, 22], 2))
        self.assertIsNone(engine.storage.get_stats())
        self.unharmed(engine)

    def test_whether_it_is_attached_is_at_sglangs_metrics(self) -> None:
        """0 from the start on; 1 while every session has a node; of all processes the minimum, which prometheus_client tells. Made once."""
        made: list[Any] = []
        values: dict[str, int] = {}

        class Gauge:
            def __init__(self, name: str, documentation: str, labelnames: list[str], multiprocess_mode: str) -> None:
                made.append((name, labelnames, multiprocess_mode))

            def labels(self, model: str) -> Any:
                return types.SimpleNamespace(set=lambda value: values.__setitem__(model, value))

        theirs = types.SimpleNamespace(Gauge=Gauge)
        self.enterContext(mock.patch.object(gauges, "_made", []))
        self.enterContext(mock.patch.dict(sys.modules, {"prometheus_client": theirs}))  # type: ignore[dict-item]
        self.sglang(None, socket="/nowhere/node.sock", attached=False, metrics=True)
        self.assertEqual((made, values), ([], {}))  # SGLang has no folder for them: without --enable-metrics
        self.enterContext(mock.patch.dict(os.environ, {"PROMETHEUS_MULTIPROC_DIR": "/tmp"}))
        self.sglang(None, socket="/nowhere/node.sock", attached=False)
        self.assertEqual((made, values), ([], {}))
        nobody = self.sglang(None, socket="/nowhere/node.sock", attached=False, metrics=True)
        self.assertEqual((made, values), ([("sglang:kvtier_attached", ["model_name"], "min")], {"model": 0}))
        self.assertIsNone(nobody.storage.get_stats())
        self.assertEqual(values, {"model": 0})
        node = self.node()
        engine = self.sglang(node, metrics=True)
        self.assertIsNone(engine.storage.get_stats())
        self.assertEqual((len(made), values), (1, {"model": 1}))
        node.send(signal.SIGKILL)
        until("it is not", lambda: engine.storage.get_stats() is None and values == {"model": 0})
        refused = self.sglang(self.shared(), metrics=True)
        refused.storage.get_stats()
        self.assertEqual(values, {"model": 1})
        refused.storage.shares.refuse("on purpose")
        refused.storage.get_stats()
        self.assertEqual(values, {"model": 0})

    def test_ranks_that_hold_the_same_store_once_and_all_load(self) -> None:
        node = self.shared()
        keys = names(4, 12)
        ranks = [self.sglang(node, Pool(32, sides=1), rank=rank, ranks=2, mla=True) for rank in range(2)]
        self.assertEqual(ranks[1].backup(keys), 12)
        self.assertEqual(ranks[0].exists(keys), 0)
        self.assertEqual(ranks[0].backup(keys), 12)
        self.assertEqual([one.prefetch(keys) for one in ranks], [(12, []), (12, [])])
        self.unharmed(*ranks)

    def test_ranks_with_heads_of_their_own_do_not_see_each_others_pages(self) -> None:
        node = self.shared()
        keys = names(5, 6)
        ranks = [self.sglang(node, rank=rank, ranks=2) for rank in range(2)]
        self.assertEqual((ranks[0].backup(keys), ranks[1].exists(keys)), (6, 0))
        self.assertEqual(ranks[1].backup(keys), 6)
        self.assertEqual([one.prefetch(keys) for one in ranks], [(6, []), (6, [])])
        self.unharmed(*ranks)

    def test_tensors_instead_of_host_pages_and_pages_of_a_draft_model(self) -> None:
        node = self.shared()
        keys = names(6, 10)
        first = self.sglang(node, zero_copy=False)
        self.assertEqual((first.backup(keys), first.exists(keys), first.prefetch(keys)), (10, 10, (10, [])))
        second = self.sglang(node, zero_copy=False)
        self.assertEqual(second.prefetch(keys), (10, []))
        self.assertTrue(second.storage.exists(keys[3]))
        self.assertFalse(second.storage.exists(names(7, 1)[0]))
        self.assertIsNone(second.storage.get(names(7, 1)[0], Flat(bytes(second.pool.page_bytes))))
        drafts = [f"{key}.draft" for key in keys]
        pages = [Flat(os.urandom(96)) for _ in keys]
        until("stored", lambda: first.storage.batch_set(drafts, pages))
        targets: list[Any] = [Flat(bytes(96)) for _ in keys]

        def loaded() -> bool:
            found = second.storage.batch_get(drafts, targets)
            return None not in found

        until("loaded", loaded)
        self.assertEqual([one.bytes() for one in targets], [one.bytes() for one in pages])
        self.unharmed(first, second)

    def test_pools_beside_the_kv_shorten_a_prefix_to_what_all_bring(self) -> None:
        node = self.shared()
        engine = self.sglang(node)
        extra = {"indexer": Pool(64, 4, "page_first", sides=1, layers=2, row=16), "mamba": Pool(64, 1, sides=1, layers=2, row=64)}
        for name, pool in extra.items():
            engine.storage.register_mem_host_pool_v2(pool, name)
        until("all are attached", lambda: engine.attached)
        keys = names(8, 10)
        self.assertEqual(engine.backup(keys), 10)
        nothing = engine.storage.batch_exists_v2(keys, [Transfer("indexer")])
        self.assertEqual((nothing.kv_hit_pages, nothing.extra_pool_hit_pages), (0, {"kv": 10}))

        def moved(call: Any, name: str, some: list[str], fill: bool) -> Any:
            pool = extra[name]
            indices = engine.fill(some, pool, name) if fill else engine._take(some, pool)
            said = call([Transfer(name, some, indices)])[name]
            wrong = engine.wrong([key for key, good in zip(some, said) if good], indices, pool, name)
            pool.free(indices)
            return said, wrong

        self.assertEqual(moved(engine.storage.batch_set_v2, "indexer", keys[:7], True), ([True] * 7, []))
        self.assertEqual(moved(engine.storage.batch_set_v2, "mamba", [keys[2], keys[5]], True), ([True] * 2, []))
        asked = lambda *transfers: engine.storage.batch_exists_v2(keys, list(transfers))  # noqa: E731
        one = asked(Transfer("indexer"))
        self.assertEqual((one.kv_hit_pages, one.extra_pool_hit_pages), (7, {"kv": 10, "indexer": 7}))
        one = asked(Transfer("mamba", [keys[-1]], hit_policy="trailing_pages"))
        self.assertEqual((one.kv_hit_pages, one.extra_pool_hit_pages), (6, {"kv": 10, "mamba": 6}))
        one = asked(Transfer("mamba", keys[-2:], hit_policy="trailing_pages"))
        self.assertEqual(one.kv_hit_pages, 0)
        self.assertEqual(asked(Transfer("unheard")).kv_hit_pages, 0)
        self.assertEqual(moved(engine.storage.batch_get_v2, "indexer", keys[:7], False), ([True] * 7, []))
        self.assertEqual(moved(engine.storage.batch_get_v2, "mamba", [keys[5]], False), ([True], []))
        self.assertEqual(engine.storage.batch_get_v2([Transfer("mamba", [keys[5]], None)]), {"mamba": [False]})
        self.unharmed(engine)

    def test_pages_whose_prefix_is_told_are_stored_also_when_it_is_gone(self) -> None:
        node = self.shared()
        engine = self.sglang(node)
        keys = names(9, 12)
        self.assertEqual(engine.backup(keys[:6]), 6)
        self.assertEqual(engine.backup(keys[6:9], prefix=keys[:6]), 3)
        self.assertEqual(engine.backup(keys[10:], prefix=keys[:10]), 2)
        self.assertEqual((engine.exists(keys), engine.exists(keys[10:])), (9, 2))
        self.unharmed(engine)

    def test_calls_with_nonsense_are_misses(self) -> None:
        node = self.shared()
        engine = self.sglang(node)
        indices = engine.pool.alloc(4)
        call = engine.storage
        self.assertEqual((call.batch_exists(["zz"]), call.batch_exists([]), call.batch_exists(["ab"])), (0, 0, 0))
        self.assertEqual(call.batch_get_v1(["ab" * 31 + "zz"], indices), [False])
        self.assertEqual(call.batch_get_v1(names(1, 2), indices), [False, False])
        self.assertEqual(call.batch_set_v1(names(1, 1), None), [False])
        self.assertEqual(call.batch_set_v1(names(1, 1), engine.pool.alloc(3)), [False])
        self.assertEqual(call.batch_get(["x"], [None]), [None])
        self.assertFalse(call.batch_set(["x"], [None]))
        self.assertFalse(call.batch_set(names(1, 1), None))
        self.unharmed(engine)


class Oracle(StorageCase):
    def test_any_run_of_calls_brings_what_a_table_of_pages_says(self) -> None:
        """Enough space, so that nothing is evicted: the node holds exactly what was stored, over restarts and generations."""
        node = self.node(arena_bytes=32 << 20, disk_bytes=128 << 20)
        for seed in range(int(os.environ.get("KVTIER_TEST_SEEDS", "4"))):
            draw = random.Random(seed)
            sizes = draw.choice((1, 4))
            layout = draw.choice(("layer_first", "page_first"))
            zero_copy = draw.random() < 0.8
            digest = f"{seed:064x}"
            make = lambda: self.sglang(  # noqa: E731
                node, Pool(96, sizes, layout), zero_copy=zero_copy, weights_digest=digest, piece_bytes=1 << 20
            )
            engines = [make(), make()]
            table: set[str] = set()
            trees = [names(seed * 10 + i, 40, sizes) for i in range(3)]
            trees.append(trees[0][:20] + chain([7] * (20 * sizes), sizes, trees[0][19]))
            for step in range(60):
                which = draw.randrange(2)
                engine = engines[which]
                tree = draw.choice(trees)
                first = draw.randrange(len(tree))
                some = tree[first : first + draw.randrange(1, 30)]
                kind = draw.random()
                run = next((i for i, key in enumerate(some) if key not in table), len(some))
                if kind < 0.4:
                    told = tree[:first] if draw.random() < 0.5 else None
                    self.assertEqual(engine.backup(some, told), len(some))
                    table.update(some)
                elif kind < 0.6:
                    self.assertEqual(engine.exists(some), run, (seed, step))
                elif kind < 0.95:
                    self.assertEqual(engine.prefetch(some), (run, []), (seed, step))
                elif kind < 0.98:
                    engine.close()
                    engines[which] = make()
                else:
                    engine.storage.clear()
                    until("attached again", lambda: engine.attached)
                    self.assertEqual(engine.exists(some), 0)
                    self.assertEqual((engine.backup(some), engine.prefetch(some)), (len(some), (len(some), [])))
                    engine.close()
                    engines[which] = make()  # another process: the first generation again, as after a restart
            self.unharmed(*engines)
            for one in engines:
                one.close()


class Faults(StorageCase):
    def test_without_a_node_all_is_missed_at_once_and_it_is_found_when_it_comes(self) -> None:
        node = Node()
        self.addCleanup(node.remove)
        deadlines = {"lookup_deadline_ms": 5_000, "load_deadline_ms": 60_000, "store_deadline_ms": 60_000}
        engine = self.sglang(None, socket=node.socket_path, attached=False, **deadlines)
        keys = names(1, 8)
        began = time.monotonic()
        for _ in range(50):
            self.assertEqual((engine.backup(keys), engine.prefetch(keys)), (0, (0, [])))
        self.assertLess(time.monotonic() - began, 50)  # a fifth of what the shortest deadline would cost
        node.start()
        until("the engine is attached", lambda: engine.attached)
        self.assertEqual((engine.backup(keys), engine.prefetch(keys)), (8, (8, [])))
        self.unharmed(engine)

    def test_a_killed_node_costs_misses_and_never_a_wrong_page(self) -> None:
        node = self.node()
        engine = self.sglang(node)
        keys = names(2, 30)
        self.assertEqual(engine.backup(keys), 30)
        draw = random.Random(1)
        for _ in range(4):
            node.end(signal.SIGKILL if draw.random() < 0.5 else signal.SIGTERM)
            self.assertEqual(engine.prefetch(keys), (0, []))
            node.start()
            until("attached again", lambda: engine.attached)
            self.assertEqual(engine.prefetch(keys)[1], [])
            self.assertEqual((engine.backup(keys), engine.prefetch(keys)), (30, (30, [])))
        self.unharmed(engine)

    def test_a_stopped_node_costs_one_deadline_and_not_one_a_call(self) -> None:
        node = self.node()
        engine = self.sglang(node, lookup_deadline_ms=1000, load_deadline_ms=1000, store_deadline_ms=1000)
        keys = names(3, 8)
        until("stored", lambda: engine.backup(keys) == 8)
        for call in (lambda: engine.prefetch(keys), lambda: (engine.backup(names(4, 8)), [])):
            node.send(signal.SIGSTOP)
            began = time.monotonic()
            for _ in range(20):
                self.assertEqual(call(), (0, []))
            self.assertLess(time.monotonic() - began, 10)  # a deadline for each of them would take 20
            node.send(signal.SIGCONT)
            until("it answers again", lambda: engine.attached)
            until("all is there again", lambda: engine.prefetch(keys) == (8, []))
        self.unharmed(engine)

    def test_a_node_that_stops_in_the_middle_of_a_load_leaves_no_page_in_use(self) -> None:
        node = self.node(arena_bytes=8 << 20)
        pool = Pool(160, row=4096)  # 48 KiB a page
        engine = self.sglang(node, pool, load_deadline_ms=300)
        keys = names(5, 100)
        engine.backup(keys)
        for _ in range(5):
            node.send(signal.SIGSTOP)
            self.assertEqual(engine.prefetch(keys), (0, []))
            node.send(signal.SIGCONT)
            until("it answers again", lambda: engine.attached)
            self.assertEqual(engine.prefetch(keys)[1], [])
        self.unharmed(engine)

    def test_flipped_bytes_are_found_and_the_page_is_stored_anew(self) -> None:
        node = self.node(disk_bytes=None)
        engine = self.sglang(node)
        keys = names(6, 6)
        self.assertEqual(engine.backup(keys), 6)
        share = engine.storage.shares.share("kv")
        assert share is not None
        load = share.session.load(bytes.fromhex("".join(keys)), deadline_s=5)
        until("the load ends", lambda: load.done)
        offset = load.slots().offsets[3]
        load.release()
        with open(load.attachment.arena.path, "r+b") as arena:
            arena.seek(offset + 17)
            byte = arena.read(1)
            arena.seek(-1, 1)
            arena.write(bytes([byte[0] ^ 4]))
        self.assertEqual(engine.prefetch(keys), (3, []))
        self.assertEqual(engine.storage.pages.counts["corrupt"], 1)
        until("the node dropped it", lambda: engine.exists(keys) == 3)
        self.assertEqual((engine.backup(keys), engine.prefetch(keys)), (6, (6, [])))
        self.unharmed(engine)

    def test_a_full_arena_refuses_what_is_leased_by_others_and_comes_back(self) -> None:
        node = self.node(arena_bytes=4 << 20, disk_bytes=None)
        engine = self.sglang(node, Pool(160, row=4096))
        for seed in range(20, 26):
            engine.backup(names(seed, 60))
            self.assertEqual(engine.prefetch(names(seed, 60))[1], [])
        self.unharmed(engine)

    def test_two_threads_a_kill_and_no_wrong_page(self) -> None:
        import threading

        node = self.node()
        engines = [self.sglang(node, Pool(64)) for _ in range(2)]
        wrong: list[str] = []
        ended = threading.Event()

        def work(engine: Engine, seed: int) -> None:
            draw = random.Random(seed)
            while not ended.is_set():
                keys = names(draw.randrange(4), 20)
                engine.backup(keys)
                wrong.extend(engine.prefetch(keys)[1])

        threads = [threading.Thread(target=work, args=(engine, i)) for i, engine in enumerate(engines)]
        for thread in threads:
            thread.start()
        try:
            for _ in range(3):
                node.end(signal.SIGKILL)
                node.start()
                until("attached again", lambda: all(one.attached for one in engines))
        finally:
            ended.set()
            for thread in threads:
                thread.join()
        self.assertEqual(wrong, [])
        self.unharmed(*engines)

    def test_a_defect_of_ours_is_told_once_and_ends_in_misses(self) -> None:
        node = self.shared()
        engine = self.sglang(node)
        with mock.patch.object(engine.storage.pages, "store", side_effect=RuntimeError("a defect")):
            with self.assertLogs("kvtier.sglang", "ERROR") as logs:
                for _ in range(40):
                    self.assertEqual(engine.storage.batch_set_v1(names(1, 1), engine.fill(names(1, 1), engine.pool), Extra()), [False])
                    engine.pool.free_slots = list(range(engine.pool.size))
        self.assertEqual(len(logs.output), 2)
        self.assertEqual((engine.storage.troubles.stopped, engine.backup(names(2, 2))), (True, 0))


if __name__ == "__main__":
    unittest.main()
