"""What an engine may load after its cache was flushed or its backend cleared, against a real cache node."""

from __future__ import annotations

import os
import threading
import unittest
from types import SimpleNamespace
from unittest import mock

os.environ["KVTIER_WITHOUT_SGLANG"] = "1"

from kvtier.sglang import identity, shares, storage  # noqa: E402
from kvtier.sglang.identity import engine_of  # noqa: E402
from rig import until  # noqa: E402
from sglang_case import StorageCase  # noqa: E402
from sglang_play import Pool, names  # noqa: E402


class Generations(StorageCase):
    def test_after_a_flush_or_clear_nothing_older_is_loaded(self) -> None:
        node = self.shared()
        engine, other, keeps = self.sglang(node), self.sglang(node), self.sglang(node, keep_on_flush=True)
        keys = names(1, 8)
        self.assertEqual(engine.backup(keys), 8)
        for begin in (engine.storage.clear, engine.pool.clear):
            begin()
            until("attached again", lambda: engine.attached)
            self.assertEqual((engine.exists(keys), other.exists(keys)), (0, 8))
            self.assertEqual((engine.backup(keys), engine.prefetch(keys)), (8, (8, [])))
        keeps.pool.clear()
        self.assertEqual(keeps.prefetch(keys), (8, []))
        self.unharmed(engine, other, keeps)

    def test_generations_of_another_engine_are_not_loaded_whoever_started_both(self) -> None:
        node = self.shared()
        engine, other = self.sglang(node), self.sglang(node)
        for one in (engine, other):
            one.pool.clear()
        until("attached again", lambda: engine.attached and other.attached)
        self.assertEqual(engine.backup(names(1, 8)), 8)
        self.assertEqual((engine.exists(names(1, 8)), other.exists(names(1, 8))), (8, 0))
        self.unharmed(engine, other)

    @mock.patch.object(shares, "_ASK_AFTER_S", (0.0, 0.0, 0.0))
    def test_ranks_that_cannot_agree_share_nothing_any_more_after_a_flush(self) -> None:
        node = self.shared()
        engine = self.sglang(node, Pool(32, sides=1), rank=0, ranks=2, mla=True)
        engine.pool.clear()
        with self.assertLogs("kvtier.sglang", "WARNING") as logs, mock.patch.object(shares, "agreed", return_value=None) as asked:
            self.assertEqual((engine.backup(names(2, 5)), engine.exists(names(2, 5))), (0, 0))
            until("it is given up", lambda: engine.storage.shares.refusal)
        self.assertIn("its ranks cannot agree", "".join(logs.output))
        self.assertEqual((asked.call_count, len(logs.output)), (3, 2))
        engine.storage.clear()
        self.assertEqual((engine.backup(names(2, 5)), engine.exists(names(2, 5))), (0, 0))
        self.assertEqual(engine.storage.shares._shares, {})

    @mock.patch.object(shares, "_ASK_AFTER_S", (0.0, 0.0, 0.0))
    def test_no_call_waits_until_ranks_have_agreed_and_then_they_share(self) -> None:
        node, keys = self.shared(), names(2, 5)
        answers, waited = threading.Event(), []

        def slow(_own: str) -> str | None:
            waited.append(answers.wait(5))
            return "all ranks" if len(waited) > 2 else None

        with mock.patch.object(shares, "agreed", slow), self.assertLogs("kvtier.sglang", "WARNING"):
            ranks = [self.sglang(node, Pool(32, sides=1), rank=rank, ranks=2, mla=True) for rank in range(2)]
            for one in ranks:
                one.storage.clear()
                one.pool.clear()
                self.assertEqual((one.backup(keys), one.exists(keys)), (0, 0))
            self.assertEqual(waited, [])
            answers.set()
            until("attached again", lambda: all(one.attached for one in ranks))
        self.assertEqual(ranks[0].backup(keys), 5)
        self.assertEqual(ranks[1].prefetch(keys), (5, []))
        self.unharmed(*ranks)

    def test_ranks_that_cannot_be_told_from_another_replicas_are_not_asked(self) -> None:
        said = SimpleNamespace(dp_size=2)
        with mock.patch.object(storage, "server_args", return_value=said), mock.patch.object(shares, "agreed") as asked:
            engine = self.sglang(self.shared(), Pool(32, sides=1), rank=0, ranks=2, mla=True)
            with self.assertLogs("kvtier.sglang", "WARNING") as logs:
                engine.storage.clear()
        self.assertIn("not all of its replicas", "".join(logs.output))
        asked.assert_not_called()
        self.assertEqual(engine.exists(names(2, 5)), 0)

    @mock.patch.object(shares, "agreed", lambda own: "all ranks")
    def test_ranks_have_the_same_generation(self) -> None:
        node = self.shared()
        ranks = [self.sglang(node, Pool(32, sides=1), rank=rank, ranks=2, mla=True) for rank in range(2)]
        for one in ranks:
            one.storage.clear()
        until("attached again", lambda: all(one.attached for one in ranks))
        self.assertEqual(ranks[0].backup(names(2, 5)), 5)
        self.assertEqual(ranks[1].prefetch(names(2, 5)), (5, []))

    @mock.patch.object(shares, "agreed", return_value="all ranks")
    def test_ranks_that_are_not_called_count_each_flush(self, asked: mock.Mock) -> None:
        node = self.shared()
        ranks = [self.sglang(node, Pool(32, sides=1), rank=rank, ranks=2, mla=True) for rank in range(2)]
        for seed in (2, 3):
            for one in ranks:
                one.pool.clear()
            if seed == 2:  # the second one is not asked for anything until the next flush
                until("attached again", lambda: ranks[0].attached)
                self.assertEqual(ranks[0].backup(names(2, 5)), 5)
        until("attached again", lambda: all(one.attached for one in ranks))
        self.assertEqual([one.exists(names(2, 5)) for one in ranks], [0, 0])
        self.assertEqual(ranks[0].backup(names(3, 5)), 5)
        self.assertEqual(ranks[1].prefetch(names(3, 5)), (5, []))
        self.assertEqual(asked.call_count, len(ranks))  # what they have agreed on they keep
        self.unharmed(*ranks)

    def test_a_backend_that_is_attached_again_goes_on_counting(self) -> None:
        """Also of flushes while there was none."""
        node = self.shared()
        engine, keys = self.sglang(node), names(4, 6)
        self.assertEqual(engine.backup(keys), 6)
        engine.pool.clear()
        engine.close()
        engine = self.sglang(node, engine.pool)
        self.assertEqual(engine.exists(keys), 0)
        self.assertEqual((engine.backup(keys), engine.prefetch(keys)), (6, (6, [])))
        engine.close()
        engine.pool.clear()
        engine = self.sglang(node, engine.pool)
        self.assertEqual(engine.exists(keys), 0)
        engine.storage.clear()
        until("attached again", lambda: engine.attached)
        self.assertEqual(engine.backup(keys[:3]), 3)
        engine.close()
        self.assertEqual(self.sglang(node, engine.pool).exists(keys), 3)
        self.assertEqual(self.sglang(node).exists(keys), 6)  # another process: what was stored with the weights of its start

    def test_a_backend_that_is_attached_at_run_time_finds_nothing_older(self) -> None:
        """Its weights may have been replaced since it was started."""
        node = self.shared()
        first, keys = self.sglang(node), names(5, 6)
        self.assertEqual(first.backup(keys), 6)
        ours = '{"module_path": "kvtier.sglang.storage", "class_name": "KvtierStorage"}'
        for backend, extra, found in (("dynamic", ours, 6), (None, None, 0), ("file", None, 0), ("dynamic", '{"class_name": "Other"}', 0)):
            said = SimpleNamespace(hicache_storage_backend=backend, hicache_storage_backend_extra_config=extra)
            same = first.storage.shares._arguments
            with mock.patch.object(identity, "engine_of", lambda config, _, *more: engine_of(config, same, *more)):
                with mock.patch.object(storage, "server_args", return_value=said):
                    self.assertEqual(self.sglang(node).exists(keys), found, said)
                    self.assertEqual(self.sglang(node, keep_on_flush=True).exists(keys), 6)
        self.assertEqual(first.exists(keys), 6)

    def test_a_cache_that_is_made_is_not_flushed(self) -> None:
        """SGLang's caches clear their pool when the backend has it already, at the end of their constructor."""
        node = self.shared()
        first, keys = self.sglang(node), names(6, 6)
        self.assertEqual(first.backup(keys), 6)
        make = self.sglang

        class Cache:
            def __init__(self) -> None:
                self.engine = make(node)
                self.reset()

            def reset(self) -> None:
                self.engine.pool.clear()

        class Host:
            """Its loop runs in its constructor."""

            def __init__(self, cache: Cache) -> None:
                self.loop(cache)

            def loop(self, cache: Cache) -> None:
                cache.reset()

        cache = Cache()
        self.assertEqual(cache.engine.exists(keys), 6)
        self.assertEqual(cache.engine.backup(keys), 6)
        Host(cache)
        self.assertEqual(cache.engine.exists(keys), 0)

    def test_a_pool_that_is_cleared_is_not_loaded_into_any_more(self) -> None:
        """Also where flushes keep what is stored: its pages may be others' by now."""
        node, keys = self.shared(), names(8, 6)
        for engine in (self.sglang(node, keep_on_flush=True), self.sglang(node)):
            self.assertEqual(engine.backup(keys), 6)
            indices = engine.fill(["others'"] * 6, engine.pool)
            mapped = engine.storage.shares.arena
            with mock.patch.object(engine.storage.shares, "arena", lambda attachment: (engine.pool.clear(), mapped(attachment))[1]):
                self.assertEqual(engine.storage.batch_get_v1(keys, indices), [False] * 6)
            self.assertEqual(engine.wrong(["others'"] * 6, indices, engine.pool), [])
            until("attached again", lambda engine=engine: engine.attached)
            self.unharmed(engine)

    def test_a_flush_that_was_not_counted_ends_it(self) -> None:
        node = self.shared()
        engine, keeps, keys = self.sglang(node), self.sglang(node, keep_on_flush=True), names(7, 6)
        self.assertEqual(engine.backup(keys), 6)
        for one in (engine, keeps):
            type(one.pool).clear(one.pool)
        with self.assertLogs("kvtier.sglang", "WARNING") as logs:
            self.assertEqual((engine.exists(keys), engine.backup(keys), engine.prefetch(keys)), (0, 0, (0, [])))
        self.assertEqual(len(logs.output), 1)
        self.assertEqual(keeps.prefetch(keys), (6, []))


if __name__ == "__main__":
    unittest.main()
