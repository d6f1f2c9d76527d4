"""What the connector for vLLM is made of, each part by itself; no node."""

from __future__ import annotations

import os
import pickle
import random
import re
import sys
import types
import unittest
from array import array
from pathlib import Path
from typing import Any
from unittest import mock

os.environ.setdefault("KVTIER_WITHOUT_VLLM", "1")

from engine_memory import LAYOUTS, Storage, Tensor, contiguous, make_layers
from engine_parts import FullAttentionSpec, MambaSpec, SlidingWindowSpec
from kvtier.vllm import layouts
from kvtier.vllm import options as options_module
from kvtier.vllm.claims import Claims
from kvtier.vllm.connector import KvtierConnector
from kvtier.vllm.device import Device
from kvtier.errors import KvError
from kvtier.requests import TierState, ranges_of
from kvtier.vllm.groups import Group, Prefixes, Unsupported, groups_of
from kvtier.vllm.guard import TROUBLES_TO_STOP, Troubles, harmless
from kvtier.vllm.hints import Hints
from kvtier.vllm.known import DENIALS, Known, denial
from kvtier.vllm.messages import KvtierWorkerMetadata, Part, Rank, StorePlan, packed
from kvtier.vllm.staging import _Leased
from kvtier.vllm.stats import COUNTERS, GAUGES, KvtierPromMetrics, KvtierStats, Since
from kvtier.vllm.store_jobs import StoreJobs
from kvtier.vllm.tiers import Tiers


def group(index: int, block_tokens: int, window: int = 0) -> Group:
    return Group(index, "window" if window else "full", block_tokens, 1, window, False, ("layer",), (64,), False)


def _read(place: int, size: int) -> bytes:
    return Device().read(None, place, size)  # type: ignore[arg-type]


def _write(place: int, data: bytes) -> None:
    Device().write(None, place, data)  # type: ignore[arg-type]


class StoreCopies(unittest.TestCase):
    """Of each part something is told, once, and not before nothing writes to its slots any more."""

    class Job:
        def __init__(self) -> None:
            self.done = False
            self.abandoned = False
            self.count = 2

        def ended(self, wait_s: float = 0.0) -> bool:
            return self.done

        def abandon(self) -> None:
            self.abandoned = True

        def take(self) -> Any:
            return types.SimpleNamespace(bad=[], checksums=array("Q", [7, 8]))

    def setUp(self) -> None:
        self.begun: list[StoreCopies.Job] = []

        def begin(part: Part) -> Any:
            if part.share == 9:
                raise RuntimeError("no arena")
            self.begun.append(self.Job())
            return self.begun[-1]

        self.troubles = Troubles()
        self.jobs = StoreJobs((0, 0), begin, lambda part: 100, self.troubles)
        self.plan = StorePlan(5, [self.part(1), self.part(9), self.part(2, (1, 0))])

    @staticmethod
    def part(share: int, rank: Rank = (0, 0)) -> Part:
        return Part(share, 0, (rank,), 1, b"", b"", b"")

    def told(self) -> dict[Any, bytes]:
        self.jobs.poll()
        return self.jobs.take()

    def test_what_could_not_be_begun_and_what_has_ended(self) -> None:
        self.jobs.start(self.plan)
        self.jobs.give_up(self.plan)  # of the same step: what is under way goes on
        self.assertEqual(self.told(), {(5, 9): b""})
        self.assertEqual((self.jobs.under_way(5), self.told()), (True, {}))
        self.begun[0].done = True
        self.assertEqual(self.told(), {(5, 1): packed([7, 8])})
        self.assertEqual((self.told(), self.jobs.stored_bytes, self.troubles.count, self.jobs.under_way(5)), ({}, 200, 1, False))

    def test_what_has_ended_is_known_also_when_it_was_told(self) -> None:
        """The step that it was told with may be under way, and no other follow."""
        ended = lambda share: self.jobs.has_ended((5, share), 0.0)  # noqa: E731
        self.assertFalse(ended(1))
        self.jobs.start(self.plan)
        self.assertEqual((ended(1), ended(9), ended(2)), (False, True, False))
        self.begun[0].done = True
        self.assertTrue(ended(1))
        self.jobs.poll()
        self.assertTrue(ended(1))
        self.jobs.take()
        self.assertEqual((ended(1), ended(9), ended(2)), (True, True, False))
        self.jobs.start(StorePlan(6, [self.part(1)]))
        self.jobs.flush(6, 0.0)  # its blocks are given away, and still written from
        self.told()
        self.assertFalse(self.jobs.has_ended((6, 1), 0.0))
        self.begun[1].done = True
        self.told()
        self.assertTrue(self.jobs.has_ended((6, 1), 0.0))

    def test_what_is_given_away(self) -> None:
        self.jobs.start(self.plan)
        self.told()
        self.jobs.flush(4, 0.0)
        self.assertFalse(self.begun[0].abandoned)
        self.jobs.flush(5, 0.0)
        self.jobs.give_up(StorePlan(5, [self.part(1)]))
        self.assertEqual((self.begun[0].abandoned, self.told()), (True, {}))
        self.begun[0].done = True
        self.assertEqual([self.told(), self.told(), self.jobs.stored_bytes], [{(5, 1): b""}, {}, 0])

    def test_what_is_refused_or_never_begun(self) -> None:
        self.jobs.refuse(self.plan)
        self.assertEqual(self.told(), {(5, 1): b"", (5, 9): b""})
        self.jobs.give_up(self.plan)
        self.assertEqual((self.told(), self.begun), ({(5, 1): b"", (5, 9): b""}, []))


class Groups(unittest.TestCase):
    def test_the_longest_prefix_is_that_of_a_naive_search(self) -> None:
        draw = random.Random(7)
        for _ in range(3000):
            sizes = [draw.choice((2, 4, 8)) for _ in range(draw.randint(1, 3))]
            groups = [group(i, size, draw.choice((0, 3, 9, 17))) for i, size in enumerate(sizes)]
            held = [[draw.random() < 0.8 for _ in range(64 // size)] for size in sizes]
            align = max(sizes)
            local, limit = align * draw.randint(0, 3), draw.randint(0, 64)

            def brings(end: int) -> bool:
                for one, flags in zip(groups, held):
                    # A token at `end` looks at the window before it; blocks of the local hit are there.
                    first = max(local, end - one.window_tokens + 1) if one.window_tokens else local
                    if not all(flags[t // one.block_tokens] for t in range(first, end)):
                        return False
                return True

            wanted = max((end for end in range(local, limit + 1, align) if brings(end)), default=local)
            ranges = [ranges_of([("arena" if flag else "", 1) for flag in flags], len(flags)) for flags in held]
            self.assertEqual(Prefixes(groups).longest(ranges, local, limit), max(wanted, local))

    def test_a_chain_with_many_holes_is_gone_through_once(self) -> None:
        """131072 tokens, a third of the blocks lost: ranges are looked at a few times each, and not once for each end of a block."""

        class Counted(list[tuple[int, int]]):
            looked = 0

            def __getitem__(self, index: Any) -> Any:
                self.looked += 1
                return super().__getitem__(index)

            def __iter__(self) -> Any:
                for one in super().__iter__():
                    self.looked += 1
                    yield one

        draw = random.Random(2)
        blocks = 8192
        for window, kept in ((1024, 0.7), (4096, 0.95), (1024, 0.9)):
            flags = [draw.random() < kept for _ in range(blocks)]
            ranges = Counted(ranges_of([("arena" if flag else "", 1) for flag in flags], blocks))
            self.assertEqual(Prefixes([group(0, 16), group(1, 16, window)]).longest([[(0, blocks)], ranges], 0, 16 * blocks) % 16, 0)
            self.assertLess(ranges.looked, 5 * len(ranges))

    def test_what_was_found_in_vain_is_not_looked_for_again(self) -> None:
        """An engine asks at each step for who waits in front of its queue."""
        options = options_module.parse({"socket": "/s"})
        claims = Claims(options, [group(0, 4), group(1, 4, 9)], 4, mock.Mock(), {})
        known = Known("a", [b"a" * 32] * 8, True, True, None)
        known.lookups = mock.Mock(done=True, spared=False, hashes=8, held=[[(0, 8)], [(0, 1), (4, 5)]])
        known.offered = [0, 0]
        request = mock.Mock(num_tokens=33)
        found = mock.patch.object(Prefixes, "longest", autospec=True, side_effect=Prefixes.longest)
        with found as longest:
            for local in (4, 4, 4):
                self.assertEqual(claims.matched(known, request, local), (0, False))
            self.assertEqual(longest.call_count, 1)
            claims.matched(known, request, 8)
            request.num_tokens = 34
            claims.matched(known, request, 8)
            known.held = [[(0, 8)], [(5, 6)]]
            claims.matched(known, request, 8)
            self.assertEqual(longest.call_count, 4)

    def test_what_could_not_be_checked_is_not_sound_whatever_else_is_bad(self) -> None:
        one = _Leased(mock.Mock(), 0)
        one.load = mock.Mock(ready=20)
        self.assertEqual(one.sound, 20)
        for unchecked, bad, sound in ((1 << 62, {7, 10}, 7), (5, set(), 5), (5, {10}, 5), (15, {10}, 10), (5, {30}, 5), (25, {30}, 20)):
            one.unchecked, one.bad = unchecked, bad
            self.assertEqual(one.sound, sound)

    def test_what_may_be_claimed(self) -> None:
        full, window = group(0, 4), group(1, 4, 9)
        drops = Group(0, "full", 4, 1, 0, False, ("layer",), (64,), True)
        self.assertEqual(Prefixes([full]).usable(40, 0, 40), 40)
        self.assertEqual(Prefixes([full, window]).usable(40, 0, 40), 36)
        self.assertEqual(Prefixes([full, window]).usable(40, 0, 41), 40)
        self.assertEqual(Prefixes([drops]).usable(40, 0, 64), 36)
        self.assertEqual(Prefixes([drops]).usable(8, 8, 64), 8)

    def test_kinds(self) -> None:
        def config(*specs: Any) -> Any:
            groups = [types.SimpleNamespace(layer_names=["layer"], kv_cache_spec=spec) for spec in specs]
            return types.SimpleNamespace(kv_cache_groups=groups)

        full = FullAttentionSpec(block_size=8, page_size_bytes=64, sliding_window=None)
        window = SlidingWindowSpec(block_size=4, page_size_bytes=64, sliding_window=10)
        made = groups_of(config(full, window), 4, False)
        self.assertEqual([(one.kind, one.hash_step, one.tail_blocks) for one in made], [("full", 2, 0), ("window", 1, 3)])
        self.assertEqual([made[1].first_live(tokens) for tokens in (4, 12, 13, 40)], [0, 0, 1, 7])
        for wrong in (MambaSpec(block_size=4), SlidingWindowSpec(block_size=4, page_size_bytes=64, sliding_window=None)):
            with self.assertRaises(Unsupported):
                groups_of(config(full, wrong), 4, False)
        with self.assertRaisesRegex(Unsupported, "in chunks"):
            groups_of(config(FullAttentionSpec(block_size=4, page_size_bytes=64, attention_chunk_size=8)), 4, False)
        ahead = FullAttentionSpec(block_size=4, page_size_bytes=64, sliding_window=None, non_causal=True)
        uniform = type("UniformTypeKVCacheSpecs", (types.SimpleNamespace,), {})(block_size=4, kv_cache_specs={"layer": ahead})
        for one in (ahead, uniform):
            with self.assertRaisesRegex(Unsupported, "looks ahead"):
                groups_of(config(one), 4, False)
        # By what newer engines say of it, though it is of a class that is known.
        replayed = SlidingWindowSpec(block_size=4, page_size_bytes=64, sliding_window=10, prefix_cacheable=False)
        inside = type(uniform)(block_size=4, kv_cache_specs={"layer": replayed}, prefix_cacheable=True)
        for one in (replayed, inside):
            with self.assertRaisesRegex(Unsupported, "group 1: SlidingWindowSpec is of no use as a prefix"):
                groups_of(config(full, one), 4, False)
        kept = config(full, SlidingWindowSpec(block_size=4, page_size_bytes=64, sliding_window=10, prefix_cacheable=True))
        kept.kv_cache_groups[1].enable_kv_transfer = True
        self.assertEqual(len(groups_of(kept, 4, False)), 2)
        kept.kv_cache_groups[1].enable_kv_transfer = False
        with self.assertRaisesRegex(Unsupported, "group 1 is not for connectors"):
            groups_of(kept, 4, False)


class Layouts(unittest.TestCase):
    def test_pieces_are_the_bytes_of_a_block(self) -> None:
        """In every layout: what the layer writes to a block is in its pieces, each byte once, and in no other block's."""
        for layout in LAYOUTS:
            for name, layer in make_layers(layout, ["a", "b"], 5, 4, 2, 3).items():
                view = layouts.view_of(name, layer.tensor, 5)
                self.assertEqual(view.block_bytes, 4 * 2 * 12, layout)
                layouts.check_canary(layer.tensor, view, 5, _read, _write)
                layer.poison(3)
                for block in range(5):
                    found = b"".join(_read(view.base + block * view.stride + at, size) for at, size in view.runs)
                    self.assertEqual(found, (b"\xdd" if block == 3 else b"\0") * len(found), layout)

    def test_a_canary_in_another_place(self) -> None:
        """A layout whose writes to block 0 are found elsewhere is refused, and memory is as it was."""

        class Moved(Tensor):
            def narrow(self, dimension: int, first: int, count: int) -> Tensor:
                return super().narrow(dimension, first + 1, count)

        shape = (4, 2, 4, 6)
        tensor = Moved(Storage(400), shape, contiguous(shape))
        with self.assertRaisesRegex(Unsupported, "found elsewhere"):
            layouts.check_canary(tensor, layouts.view_of("layer", tensor, 4), 4, _read, _write)

    def test_what_cannot_be_copied(self) -> None:
        def refused(why: str, shape: tuple[int, ...], strides: tuple[int, ...], blocks: int, size: int = 4096) -> None:
            with self.assertRaisesRegex(Unsupported, why):
                layouts.view_of("layer", Tensor(Storage(size), shape, strides), blocks)

        refused("counts 4 blocks", (3, 7), (7, 1), 4)
        refused("several elements", (4, 8), (8, 0), 4)
        refused("outside of their storage", (4, 8), (8, 1), 4, size=60)
        refused("more than 64 pieces", (4, 100, 2), (1000, 8, 1), 4, size=9000)
        refused("blocks overlap", (4, 8), (4, 1), 4)


    def test_a_view_of_less_than_a_page(self) -> None:
        """What lies beside the view (scales of a block, perhaps) would not be stored: refused. What is only padding is let go."""
        tensors = {"layer": make_layers("hnd", ["layer"], 5, 4, 2, 3)["layer"].tensor}  # 96 bytes a block
        for page, unpadded, refused in ((96, 96, False), (128, 96, False), (128, 97, True), (96, None, False)):
            spec = FullAttentionSpec(block_size=4, page_size_bytes=page, sliding_window=None)
            if unpadded is not None:
                spec.unpadded_page_size_bytes = unpadded
            made = types.SimpleNamespace(kv_cache_groups=[types.SimpleNamespace(layer_names=["layer"], kv_cache_spec=spec)])
            groups = groups_of(made, 4, False)
            if refused:
                with self.assertRaisesRegex(Unsupported, "layer layer: 96 bytes a block in its view, where the engine fills 97"):
                    layouts.views_of(groups, tensors, 5)
            else:
                self.assertEqual([len(views) for views in layouts.views_of(groups, tensors, 5)], [1])


class Guard(unittest.TestCase):
    def test_told_once_then_left_alone(self) -> None:
        class Half:
            troubles = Troubles()

            @harmless(lambda: "a miss")
            def callback(self) -> str:
                raise RuntimeError("on purpose")

        half = Half()
        with self.assertLogs("kvtier.vllm", "ERROR") as logs:
            for _ in range(TROUBLES_TO_STOP):
                self.assertEqual(half.callback(), "a miss")
        self.assertEqual(len(logs.records), 2)
        self.assertTrue(half.troubles.stopped)


class Heard(unittest.TestCase):
    def test_what_was_read_may_be_a_block_too_much(self) -> None:
        """The last one is offered again: where it is not held, what follows it would have no parent."""
        for spared, offered in ((True, 6), (False, 7)):
            said: Any = types.SimpleNamespace(done=True, held=[((0, 7),)], spared=spared)
            known = Known(name="r", hashes=[], loads=True, stores=True, tokens=None, lookups=said, offered=[0])
            self.assertTrue(known.hear([group(0, 4)]))
            self.assertEqual(known.offered, [offered])


class Messages(unittest.TestCase):
    def test_what_several_ranks_say(self) -> None:
        one = KvtierWorkerMetadata({7: {(0, 0)}}, {1: {(0, 0)}}, {1: {0: {2}}}, {(5, 0): b"a"})
        two = KvtierWorkerMetadata({7: {(0, 1)}}, {1: {(0, 1)}}, {1: {0: {3}, 1: {0}}}, {(5, 1): b"b"}, missed={1})
        both = pickle.loads(pickle.dumps(one)).aggregate(pickle.loads(pickle.dumps(two)))
        self.assertEqual(both.mapped, {7: {(0, 0), (0, 1)}})
        self.assertEqual(both.loaded, {1: {(0, 0), (0, 1)}})
        self.assertEqual(both.bad, {1: {0: {2, 3}, 1: {0}}})
        self.assertEqual((both.stored, both.missed), ({(5, 0): b"a", (5, 1): b"b"}, {1}))

    def test_metrics(self) -> None:
        since = Since()
        first = since.take({"lookups": 3, "denied_lookup": 1, "denied_missing": 1})
        self.assertEqual(first.data if first else None, {"lookups": 3, "denied_lookup": 1, "denied_missing": 1})
        self.assertIsNone(since.take({"lookups": 3, "denied_lookup": 1, "denied_missing": 1}))
        second = since.take({"lookups": 5, "denied_missing": 3})
        both = {"lookups": 5, "denied_lookup": 1, "denied_missing": 3}
        self.assertEqual(first.aggregate(second).data, both)  # type: ignore[union-attr, arg-type]

    def test_tiers_are_what_was_said_last(self) -> None:
        half = types.SimpleNamespace(
            counted=lambda: {"lookups": 1}, tiers=lambda: {"arena": {"bytes": 7, "in_service": 1}}, attached=None
        )
        since = Since()
        first, second = since.of(half, None, 0), since.of(half, None, 0)
        assert first is not None and second is not None
        self.assertEqual(second.data, {"tiers": {"arena": {"bytes": 7, "in_service": 1}}})
        self.assertFalse(second.is_empty())  # vLLM leaves out what is
        half.tiers = lambda: {"arena": {"in_service": 0}, "disk": {"bytes": 9}}
        both = KvtierStats(data={}).aggregate(first).aggregate(pickle.loads(pickle.dumps(since.of(half, None, 0))))
        self.assertEqual(both.data, {"lookups": 1, "tiers": {"arena": {"bytes": 7, "in_service": 0}, "disk": {"bytes": 9}}})
        self.assertEqual(both.reduce(), {"lookups": 1, "tier_arena_bytes": 7, "tier_disk_bytes": 9})

    def test_whether_it_is_attached_is_told_when_it_changes_and_now_and_then(self) -> None:
        half = types.SimpleNamespace(counted=dict, tiers=dict, attached=False)
        since, now = Since(), 100.0
        with mock.patch("kvtier.vllm.stats.time.monotonic", lambda: now):
            tell = lambda: (said := since.of(half, None, 0)) and said.data  # noqa: E731
            self.assertEqual([tell(), tell()], [{"gauges": {"attached": 0}}, None])
            half.attached = True
            self.assertEqual([tell(), tell()], [{"gauges": {"attached": 1}}, None])
            now += 5.1  # an API server may have been made anew
            self.assertEqual([tell(), tell()], [{"gauges": {"attached": 1}}, None])
            worker = types.SimpleNamespace(loaded_bytes=3, stored_bytes=0, device_counters=dict)
            self.assertEqual(Since().of(None, worker, 0).data, {"loaded_bytes": 3})  # type: ignore[union-attr]
        lost = KvtierStats(data={"gauges": {"attached": 0}})
        self.assertFalse(lost.is_empty())  # vLLM leaves out what is
        both = KvtierStats(data={"lookups": 2, "gauges": {"attached": 1}}).aggregate(pickle.loads(pickle.dumps(lost)))
        self.assertEqual(both.data, {"lookups": 2, "gauges": {"attached": 0}})
        self.assertEqual(both.reduce(), {"lookups": 2, "attached": 0})

    def test_metrics_of_prometheus(self) -> None:
        told: dict[Any, float] = {}
        modes: dict[str, str] = {}

        class Made:
            def __init__(self, name: str, documentation: str, labelnames: list[str], multiprocess_mode: str = "") -> None:
                self.name, self.labelnames, modes[name] = name, labelnames, multiprocess_mode

            def labels(self, *values: object) -> Any:
                assert len(values) == len(self.labelnames)
                told_of = lambda value: told.__setitem__((self.name, *values), value)  # noqa: E731
                return types.SimpleNamespace(inc=told_of, set=told_of)

        theirs = types.ModuleType("prometheus_client")  # vLLM brings it
        theirs.Counter, theirs.Gauge = "counter", "gauge"  # type: ignore[attr-defined]
        with mock.patch.dict(sys.modules, {"prometheus_client": theirs}):
            made = KvtierPromMetrics(None, {"counter": Made, "gauge": Made}, ["engine"], {0: ["0"], 1: ["1"]})
        # Of an engine that has not said anything yet, and perhaps never will.
        attached = "vllm:kvtier_attached"
        self.assertEqual(told, {(attached, "0"): 0, (attached, "1"): 0})
        # Several API servers are one series.
        self.assertEqual((modes[attached], modes["kvtier_tier_hits"], modes["vllm:kvtier_loads"]), ("mostrecent", "mostrecent", ""))
        made.observe({"gauges": {"attached": 1, "unknown": 1}}, 1)
        self.assertEqual((told.pop((attached, "0")), told.pop((attached, "1"))), (0, 1))
        made.observe({"gauges": {"attached": 1}}, 7)
        made.observe({"lookups": 5, "unknown": 1, "tiers": {"disk": {"hits": 3, "unknown": 1}}})
        made.observe({"tiers": {"disk": {"hits": 4}}}, 7)
        self.assertEqual(told, {("vllm:kvtier_lookups", "0"): 5, ("kvtier_tier_hits", "0", "disk"): 3})
        told.clear()
        made.observe({"denied_slow": 2, "denied_unheard_of": 1})
        self.assertEqual(told, {("vllm:kvtier_denied", "0", "slow"): 2})

    def test_what_a_node_says_makes_no_new_series(self) -> None:
        self.assertEqual([denial("not attached"), denial("tier"), denial("a reason of tomorrow")], ["not_attached", "tier", "other"])

    def test_metrics_of_prometheus_are_made_anew(self) -> None:
        """vLLM makes them twice in one process, and takes away those of its own prefix."""
        names: dict[Any, list[str]] = {}

        class Registry:
            _collector_to_names = names

            def unregister(self, collector: Any) -> None:
                del names[collector]

        class Made:
            def __init__(self, name: str, documentation: str, labelnames: list[str], multiprocess_mode: str = "") -> None:
                if any(made._name == name for made in names):
                    raise ValueError("Duplicated timeseries")
                self._name = name
                names[self] = [name]

            def labels(self, *values: object) -> Any:
                return types.SimpleNamespace(inc=lambda value: None, set=lambda value: None)

        theirs = types.ModuleType("prometheus_client")
        theirs.Counter, theirs.Gauge, theirs.REGISTRY = "counter", "gauge", Registry()  # type: ignore[attr-defined]
        theirs_alone = Made("vllm:requests", "", [])
        with mock.patch.dict(sys.modules, {"prometheus_client": theirs}):
            for _ in range(2):
                for made in [made for made in names if made._name.startswith("vllm:kvtier")]:
                    del names[made]  # as vLLM does
                made = KvtierConnector.build_prom_metrics(None, {"counter": Made, "gauge": Made}, ["engine"], {0: ["0"]})
                self.assertIsInstance(made, KvtierPromMetrics)
            self.assertIn(theirs_alone, names)
            with self.assertLogs("kvtier.vllm", "WARNING"):
                KvtierConnector.build_prom_metrics(None, {}, ["engine"], {0: ["0"]}).observe({"lookups": 1})

    def test_tiers_are_asked_now_and_then_and_go_out_of_service_with_their_node(self) -> None:
        asked: list[Any] = []

        def ask() -> Any:
            asked.append(types.SimpleNamespace(done=False, error=None, value=None))
            return asked[-1]

        session, tiers, now = types.SimpleNamespace(tiers=ask), Tiers(), 100.0
        with mock.patch("kvtier.vllm.tiers.time.monotonic", lambda: now):
            for _ in range(3):
                tiers.keep(session)  # type: ignore[arg-type]
            self.assertEqual((len(asked), tiers.take()), (1, {}))
            asked[0].value = {"arena": TierState(1, 2, 3, True, 4, 5, 6, 7), "disk": TierState(0, 0, 9, False)}
            asked[0].done = True
            tiers.keep(session)  # type: ignore[arg-type]
            said = tiers.take()
            self.assertEqual(list(said["arena"].values()), [1, 2, 3, 4, 5, 6, 7, 1])
            self.assertEqual((said["disk"]["in_service"], said["disk"]["capacity_bytes"], tiers.take()), (0, 9, {}))
            now += 6
            tiers.keep(session)  # type: ignore[arg-type]
            asked[1].done, asked[1].error = True, KvError("DEADLINE", "silent")
            tiers.keep(None)
            self.assertEqual((len(asked), tiers.take()), (2, {}))
            now += 7
            tiers.keep(None)
            tiers.keep(None)
            self.assertEqual(tiers.take(), {"arena": {"in_service": 0}})

    def test_every_counter_is_declared(self) -> None:
        """What is counted and not told is of no use to anybody."""
        counted = set()
        for file in Path(layouts.__file__).parent.glob("*.py"):
            counted.update(re.findall(r'_add\(f?"([a-z_]+)', file.read_text()))
        self.assertGreater(len(counted), 12)
        begun = {name for name in counted if name.endswith("_")}  # an f-string's beginning
        self.assertEqual(begun, {"denied_", "hints_"})
        self.assertEqual(counted - begun - COUNTERS.keys(), set())
        self.assertFalse(COUNTERS.keys() & GAUGES.keys())
        self.assertEqual({f"hints_{outcome}" for outcome in Hints().outcomes(True)} - COUNTERS.keys(), set())
        claims = (Path(layouts.__file__).parent / "claims.py").read_text()
        denied = {why.replace(" ", "_") for why in re.findall(r'(?:_deny|_unanswered)\([^"\n]*"([a-z ]+)"', claims)}
        self.assertEqual(denied, {"lookup", "not_attached", "detached", "too_often", "slow", "missing"})
        self.assertEqual(denied - DENIALS, set())


if __name__ == "__main__":
    unittest.main()
