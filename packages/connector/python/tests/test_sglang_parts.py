"""What SGLang's storage backend is made of, by itself: options, pools, names."""

from __future__ import annotations

import ctypes
import os
import random
import struct
import tempfile
import threading
import types
import unittest
from array import array
from collections.abc import Callable
from typing import Any
from unittest import mock

os.environ["KVTIER_WITHOUT_SGLANG"] = "1"

import kvtier  # noqa: E402
from kvtier.sglang import bases, flushes, identity, options, pools, storage, tensors, transfers  # noqa: E402
from kvtier.sglang.pages import Pages  # noqa: E402
from rig import until  # noqa: E402
from sglang_play import Config, Engine, Flat, Pool, names  # noqa: E402


class Store:
    """What of torch's stores is leaned on."""

    def __init__(self) -> None:
        self.held: dict[str, str] = {}

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        if self.held.get(key, "") == expected:
            self.held[key] = desired
        return self.held[key].encode()


class Replicas(unittest.TestCase):
    """Who counts the same flushes: ranks of one start of one engine, and nobody else."""

    def torch(self, default_store: Callable[[], Any]) -> Any:
        modules: dict[str, Any] = {name: types.ModuleType(name) for name in ("torch", "torch.distributed")}
        modules["torch.distributed"].distributed_c10d = types.SimpleNamespace(_get_default_store=default_store)
        return mock.patch.dict("sys.modules", modules)

    def together(self, dp: int, own: str, **ranks: int) -> str | None:
        arguments = types.SimpleNamespace(dp_size=dp)
        engine = identity.engine_of(Config({}, **ranks), arguments, b"w", "0.5.1")
        return identity.flushed_together(engine, arguments, own, lambda own: "agreed")

    def test_one_rank_has_a_name_of_its_own_and_several_that_on_which_they_agreed(self) -> None:
        for dp in (1, 2):
            self.assertEqual(self.together(dp, "mine"), "mine")
        for rank in range(2):
            self.assertEqual(self.together(1, f"of {rank}", tp_rank=rank, tp_size=2), "agreed")
        first, second = (identity.generation_name(1, False, name) for name in ("mine", "other"))
        self.assertNotEqual(first, second)
        self.assertEqual(identity.generation_name(0, False, "mine"), identity.generation_name(0, False, "other"))

    def test_ranks_that_cannot_be_told_from_another_replicas_have_no_name_for_it(self) -> None:
        self.assertIsNone(self.together(2, "mine", tp_rank=0, tp_size=2))

    def test_ranks_agree_by_the_store_of_their_process_group(self) -> None:
        self.assertIsNone(bases.agreed("without torch"))
        for start in range(2):
            store = Store()
            with self.torch(lambda store=store: store):
                first = f"of start {start}"
                self.assertEqual([bases.agreed(first), bases.agreed("later")], [first, first])

    def test_a_group_whose_store_does_not_answer_has_not_agreed(self) -> None:
        stands = threading.Event()
        self.addCleanup(stands.set)
        with self.torch(stands.wait), mock.patch.object(bases, "_AGREE_S", 0.05):
            self.assertIsNone(bases.agreed("mine"))

    def test_a_backend_of_another_kind_at_the_start_means_that_weights_may_have_been_replaced(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            files = {}
            for name, text in (("ours", '{"module_path": "kvtier.sglang.storage"}'), ("other", '{"module_path": "else"}')):
                files[name] = os.path.join(folder, f"{name}.json")
                with open(files[name], "w") as file:
                    file.write(text)
            for said, later in ((f"@{files['ours']}", False), (f"@{files['other']}", True), (f"@{folder}/none.json", True)):
                arguments = types.SimpleNamespace(hicache_storage_backend="dynamic", hicache_storage_backend_extra_config=said)
                self.assertEqual(identity.attached_later(arguments), later, said)

    def test_a_decode_engine_that_offloads_by_a_pool_of_its_own_is_refused(self) -> None:
        arguments = types.SimpleNamespace(disaggregation_decode_enable_offload_kvcache=True)
        self.assertIn("keep_on_flush", identity.refusal(arguments, Config({}), False))
        self.assertEqual(identity.refusal(arguments, Config({}), True), "")


class Parts(unittest.TestCase):
    def test_options_are_refused_in_one_line(self) -> None:
        for given, said in (
            (None, "is missing"),
            ({"kvtier": {}}, '"socket" is missing'),
            ({"kvtier": {"socket": "/s", "soket": 1}}, "unknown key 'soket' (did you mean 'socket'?); known are"),
            ({"kvtier": {"socket": "/s", "group": 1.5}}, "group is the name of a group or its number, not 1.5"),
            ({"kvtier": {"socket": "/s", "weights_cache": "kept"}}, "weights_cache is the whole path of a folder"),
            ({"kvtier": {"socket": "/s", "piece_bytes": 1}}, "piece_bytes is a whole number"),
            ({"kvtier": {"socket": "/s", "load": 1}}, "load is true or false"),
            ({"kvtier": {"socket": "/s", "weights_digest": "AB"}}, "64 hex digits"),
            ({"kvtier": {"socket": "/" + "s" * 200}}, "107 bytes"),
        ):
            with self.assertRaises(options.BadOptions) as caught:
                options.parse(given)
            self.assertIn(said, str(caught.exception))
            self.assertNotIn("\n", str(caught.exception))
        self.assertEqual(options.parse({"kvtier": {"socket": "/s", "group": 2000}}).group, "2000")

    def test_transfers_that_nobody_asks_for_stay_few(self) -> None:
        kept = transfers.Transfers(bases.storage_metrics())
        for pages in range(3 * transfers.MOST):
            kept.loaded(pages, pages * 2_000_000, 0.5)
        told = kept.take()
        self.assertEqual(told.prefetch_pgs, list(range(2 * transfers.MOST, 3 * transfers.MOST)))
        self.assertAlmostEqual(told.prefetch_bandwidth[0], 2 * transfers.MOST * 4e-3)
        self.assertIsNone(kept.take())
        none = transfers.Transfers(None)  # a version without such figures
        none.stored(1, 1, 1.0)
        self.assertIsNone(none.take())

    def test_every_layout_is_understood_and_a_pool_that_lies_is_not(self) -> None:
        for layout in ("layer_first", "page_first"):
            for sides in (1, 2):
                pool = Pool(7, layout=layout, sides=sides)
                seen = pools.view("kv", pool)
                self.assertEqual((seen.pages, seen.payload_bytes, len(pool.free_slots)), (7, pool.page_bytes, 28))

        class Skewed(Pool):
            def get_page_buffer_meta(self, indices: Any) -> Any:
                pointers, sizes = super().get_page_buffer_meta(indices)
                return [one + 8 for one in pointers], [size - 8 for size in sizes]

        class Outside(Pool):
            def get_page_buffer_meta(self, indices: Any) -> Any:
                pointers, sizes = super().get_page_buffer_meta(indices)
                return [one + self.kv_buffer.nbytes for one in pointers], sizes

        class Uneven(Pool):
            def get_page_buffer_meta(self, indices: Any) -> Any:
                pointers, sizes = super().get_page_buffer_meta(indices)
                return [one + 64 * (indices.tolist()[0] // self.page_size == 3) for one in pointers], sizes

        class Elsewhere(Pool):
            """Says where other pages lie."""

            def set_from_flat_data_page(self, index: int, page: Flat) -> None:
                super().set_from_flat_data_page(index + self.page_size, page)

        for kind, said in ((Skewed, "has"), (Outside, "outside"), (Uneven, "one stride"), (Elsewhere, "is not found")):
            pool = kind(9)
            with self.assertRaises(pools.Unsupported) as caught:
                pools.view("kv", pool)
            self.assertIn(said, str(caught.exception))
            self.assertEqual(len(pool.free_slots), 36)
        full = Pool(2)
        full.free_slots = []
        with self.assertRaises(pools.Unsupported):
            pools.view("kv", full)

    def test_a_pool_that_was_looked_at_holds_what_it_held(self) -> None:
        """Pages of one that goes by another pool's indices are in use, and its own allocator knows nothing of that."""
        for layout in ("layer_first", "page_first"):
            pool = Pool(3, layout=layout)
            held = [bytes([7 + page]) * pool.page_bytes for page in range(3)]
            for page, data in enumerate(held):
                pool.set_from_flat_data_page(page * pool.page_size, Flat(data))
            for _ in range(4):  # each time its allocator gives out another one
                pools.view("indexer", pool)
                self.assertEqual([pool.get_data_page(page * pool.page_size).bytes() for page in range(3)], held)

    def test_indices_that_are_no_pages_are_refused(self) -> None:
        seen = pools.view("kv", Pool(4))
        self.assertEqual(seen.blocks(array("q", [4, 5, 6, 7, 0, 1, 2, 3]), 2), [1, 0])
        for bad in ([4, 5, 6], [5, 6, 7, 8], [4, 5, 7, 6], [16, 17, 18, 19], [-4, -3, -2, -1]):
            self.assertIsNone(seen.blocks(array("q", bad), 1))

    def test_prefixes_with_whole_tails_are_those_that_a_naive_search_finds(self) -> None:
        draw = random.Random(5)
        for _ in range(3000):
            there = [draw.random() < 0.7 for _ in range(draw.randrange(12))]
            tail = draw.randrange(1, 5)
            naive = max((n for n in range(1, len(there) + 1) if all(there[max(0, n - tail) : n])), default=0)
            self.assertEqual(storage._longest_with_tail(there, tail), naive)

    def test_what_differs_has_another_name(self) -> None:
        class Arguments:
            def __init__(self, **more: Any) -> None:
                self.__dict__.update(more)

        def name(config: dict[str, Any] | None = None, arguments: Any = None, version: str = "0.5.1", heads: int = 8, **more: Any) -> bytes:
            engine = identity.engine_of(Config({}, **(config or {})), arguments, more.pop("weights", b"w"), version)
            engine = identity.Engine(**{**engine.__dict__, "kv_heads": heads})
            facts = more.pop("facts", pools.facts_of(Pool(4)))
            page, page_bytes = more.pop("page", 4), more.pop("page_bytes", 1024)
            return identity.namespace(engine, more.pop("pool", "kv"), page, page_bytes, facts, more.pop("generation", b""))

        different = [
            name(),
            name(weights=b"v"),
            name(version="0.5.2"),
            name(arguments=Arguments(dtype="float16")),
            name(arguments=Arguments(kv_cache_dtype="fp8_e4m3")),
            name({"tp_size": 2}),
            name({"tp_size": 2, "tp_rank": 1}),
            name({"tp_size": 2}, heads=0),
            name({"tp_size": 2, "tp_rank": 1}, heads=0),
            name({"pp_size": 2}),
            name({"attn_cp_size": 2}),
            name(page=8),
            name(page_bytes=2048),
            name(pool="indexer"),
            name(generation=b"g"),
            name(facts=pools.facts_of(Pool(4, layout="page_first"))),
        ]
        self.assertEqual([i for i, one in enumerate(different) if one in different[:i]], [])
        # What ranks hold alike has one name, and one writer.
        self.assertEqual(name({"tp_size": 4, "tp_rank": 3, "is_mla_model": True}), name({"tp_size": 4, "is_mla_model": True}))
        self.assertEqual(name({"tp_size": 8, "tp_rank": 1}, heads=4), name({"tp_size": 8, "tp_rank": 0}, heads=4))
        self.assertNotEqual(name({"tp_size": 8, "tp_rank": 2}, heads=4), name({"tp_size": 8, "tp_rank": 0}, heads=4))
        for config, heads, writers in (
            ({"tp_size": 4}, 8, [0, 1, 2, 3]),
            ({"tp_size": 8}, 4, [0, 2, 4, 6]),
            ({"tp_size": 4, "is_mla_model": True}, 8, [0]),
            ({"tp_size": 4}, 0, [0, 1, 2, 3]),
        ):
            found = []
            for rank in range(config["tp_size"]):
                engine = identity.engine_of(Config({}, tp_rank=rank, **config), None, b"w", "0.5.1")
                if identity.writes(identity.Engine(**{**engine.__dict__, "kv_heads": heads}), "kv", {}):
                    found.append(rank)
            self.assertEqual(found, writers)

    def test_a_draft_models_heads_are_each_ranks_own_beside_an_mla_model(self) -> None:
        engines = [identity.engine_of(Config({}, tp_rank=rank, tp_size=4, is_mla_model=True), None, b"w", "0.5.1") for rank in range(4)]
        heads, alike = {"class": "MHATokenToKVPoolHost"}, {"class": "MLATokenToKVPoolHost"}
        flat = {"kind": "flat pages", "of": alike}  # of the KV, whatever they are pages of
        for pool, facts, apart in (
            ("kv", alike, False),
            ("indexer", {"class": "DSAIndexerPoolHost"}, False),
            ("draft", alike, False),
            ("draft", heads, True),
            ("draft_swa", heads, True),
            ("draft", flat, True),
            ("draft/1024 torch.float16", flat, True),
            ("kv/1024 torch.float16", flat, False),
            ("mamba", {"class": "MambaPoolHost"}, True),
        ):
            names = {identity.namespace(engine, pool, 4, 1024, facts, b"") for engine in engines}
            writers = [identity.writes(engine, pool, facts) for engine in engines]
            self.assertEqual((len(names), writers), (4, [True] * 4) if apart else (1, [True, False, False, False]), (pool, facts))

    def test_engines_that_cannot_be_named_are_left_alone_in_one_line(self) -> None:
        class Lora:
            enable_lora = True

        class Nameless:
            model_path = None

        for arguments, version, more, said in (
            (Lora(), "0.5.3", {}, "LoRA"),
            (None, "0.9.0", {}, "0.9.0 is not one of the versions"),
            (Nameless(), "0.5.3", {"weights_digest": ""}, "does not say which model"),
        ):
            with mock.patch.object(storage, "server_args", return_value=arguments):
                with mock.patch.object(storage, "sglang_version", return_value=version):
                    with self.assertLogs("kvtier.sglang", "WARNING") as logs:
                        engine = Engine("/tmp/kvtier-nobody.sock", **more)
                        self.addCleanup(engine.close)
                        until("it is refused", lambda: engine.storage.shares.refusal)
            self.assertIn(said, engine.storage.shares.refusal)
            self.assertEqual(len(logs.output), 1)
            self.assertEqual((engine.backup(names(1, 3)), engine.prefetch(names(1, 3))), (0, (0, [])))


class Cleared(unittest.TestCase):
    """A pool that is cleared while its pages are loaded: SGLang waits for no load of its own."""

    def setUp(self) -> None:
        order = self.order = []

        class Told(Pool):
            def clear(self) -> None:
                super().clear()
                order.append("cleared")

        self.pool = Told(4)
        self.order.clear()
        self.loading = flushes.Loading(flushes.flushes_of(self.pool, False))
        self.may_end = threading.Event()
        self.begun: list[list[int]] = []

        class Job:
            count = 1

            def ended(_, wait_s: float = 0.0) -> bool:
                return self.may_end.wait(wait_s)

            def abandon(_) -> bool:
                order.append("given up")
                return self.may_end.is_set()

            def take(_) -> Any:
                order.append("copied")
                return types.SimpleNamespace(bad=[], corrupt=[])

        class Copies:
            def load(_, arena: Any, layout: Any, blocks: list[int], *more: Any) -> Job:
                self.begun.append(list(blocks))
                return Job()

        self.pages = Pages(types.SimpleNamespace(arena=lambda _: None, copies=Copies()), 64)  # type: ignore[arg-type]

    def load(self, ready: int, wait: Callable[[Any], None]) -> tuple[list[bool], list[str]]:
        """One page of one that is asked for; `wait`: where it has not come yet."""
        ended: list[str] = []
        load = types.SimpleNamespace(
            done=ready == 1, ready=ready, attachment=types.SimpleNamespace(alive=True, usable=True), end=ended.append,
            wait=lambda _: wait(load), release=lambda corrupt: None, slots=lambda *_: types.SimpleNamespace(offsets=[0], checksums=[0]),
        )
        share = types.SimpleNamespace(session=types.SimpleNamespace(load=lambda *_, **__: load), layout=None, payload_bytes=64)
        return self.pages.load(share, b"x" * 32, [3], 5.0, self.loading), ended  # type: ignore[arg-type]

    def test_no_copy_begins_any_more(self) -> None:
        self.may_end.set()
        for comes in (1, 0):  # the page, or nothing more

            def cleared(load: Any, comes: int = comes) -> None:
                self.pool.clear()
                load.ready, load.done = comes, comes == 1

            self.loading = flushes.Loading(flushes.flushes_of(self.pool, False))
            self.assertEqual(self.load(0, cleared), ([False], ["flushed"]))
        self.assertEqual((self.begun, self.order), ([], ["cleared"] * 2))

    def test_it_is_cleared_when_copies_that_run_have_ended(self) -> None:
        """However long they take."""
        found: list[Any] = []
        threads = [threading.Thread(target=lambda: found.append(self.load(1, lambda _: None)), daemon=True)]
        threads[0].start()
        until("it is copied", lambda: self.begun)
        threads.append(threading.Thread(target=self.pool.clear, daemon=True))
        with mock.patch.object(flushes, "_LONG_COPY_S", 0.01), self.assertLogs("kvtier.sglang", "WARNING") as said:
            threads[1].start()
            until("it is told that it takes long", lambda: said.output)
        self.assertEqual(self.order, ["given up"])
        self.may_end.set()
        for one in threads:
            one.join(20)
        self.assertEqual((self.order, found), (["given up", "cleared"], [([False], [])]))

    def test_of_a_copy_that_runs_no_more_is_begun(self) -> None:
        """Many pieces of the library, in which all pages of the pool would be written again and again."""
        size, many = 3 << 20, 20_000
        handle, path = tempfile.mkstemp(prefix="kvtier-arena-", dir="/dev/shm")
        self.addCleanup(os.unlink, path)
        os.write(handle, struct.pack("<8sIIQQ", b"KVTIERAR", 1, 4096, size + 4096, 7))
        os.truncate(path, size + 4096)
        os.close(handle)
        copies, memory = kvtier.Copies(), ctypes.create_string_buffer(size)
        self.addCleanup(lambda: (copies.close(20), memory))  # which stays until then
        arena = copies.map(kvtier.ArenaRef(path, size + 4096, 7))
        layout = copies.layout([kvtier.Part(ctypes.addressof(memory), size, size)], 1)
        job = self.loading.copy(lambda: copies.load(arena, layout, [0] * many, [4096] * many, [0] * many))
        self.pool.clear()
        self.assertEqual((self.order, copies.counts().jobs), (["cleared"], 0))
        assert job is not None
        self.assertFalse(self.loading.copied(job))
        ctypes.memset(memory, 0x55, size)  # others' by now
        self.assertTrue(copies.close(20))
        self.assertEqual(memory.raw, b"\x55" * size)


class Deadlines(unittest.TestCase):
    """Of tensors, whose pages go in parts through memory of our own."""

    def tensors(self, move: Callable[[float], None]) -> tensors.Tensors:
        class Moves:
            def load(self, share: Any, names: bytes, blocks: Any, left_s: float) -> list[bool]:
                move(left_s)
                return [True] * len(blocks)

            def store(self, share: Any, before: bytes, names: bytes, blocks: Any, left_s: float) -> list[bool]:
                return self.load(share, names, blocks, left_s)

        shares = types.SimpleNamespace(
            copies=types.SimpleNamespace(layout=lambda *_: None), page_tokens=lambda: 4, page_facts=dict, add_memory=lambda *_: None,
            share=lambda _: types.SimpleNamespace(writes=True),
        )
        return tensors.Tensors(shares, Moves())  # type: ignore[arg-type]

    def test_a_call_of_several_parts_has_one_deadline(self) -> None:
        keys, pages = names(1, 512), [Flat(bytes(64)) for _ in range(512)]  # four parts
        for load in (True, False):
            now, left = [100.0], []

            def move(left_s: float, now: list[float] = now, left: list[float] = left) -> None:
                left.append(left_s)
                now[0] += 0.75

            held = self.tensors(move)
            with mock.patch.object(tensors, "time", types.SimpleNamespace(monotonic=lambda now=now: now[0])):
                if load:
                    self.assertEqual(held.load(keys, pages, 2.0), pages[:384] + [None] * 128)
                else:
                    self.assertFalse(held.store(keys, pages, 2.0))
            self.assertEqual(left, [2.0, 1.25, 0.5])

    def test_to_wait_for_the_memory_counts(self) -> None:
        moves, goes_on, keys, pages = [], threading.Event(), names(1, 1), [Flat(bytes(64))]

        def move(left_s: float) -> None:
            moves.append(left_s)
            goes_on.wait(10)

        held = self.tensors(move)
        first = threading.Thread(target=held.load, args=(keys, pages, 20.0), daemon=True)
        first.start()
        until("the memory is in use", lambda: moves)
        self.assertEqual((held.load(keys, pages, 0.01), held.store(keys, pages, 0.01), len(moves)), ([None], False, 1))
        goes_on.set()
        first.join(20)


if __name__ == "__main__":
    unittest.main()
