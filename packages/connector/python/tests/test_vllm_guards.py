"""No callback raises into the engine, whatever of ours does: both connectors, every method that an engine's call goes through."""

from __future__ import annotations

import errno
import hashlib
import inspect
import itertools
import os
import threading
import unittest
from dataclasses import replace
from typing import Any, Callable, Iterator
from unittest import mock

import offload_double

offload_double.install()

from engine_case import EngineCase, prompts, record_releases  # noqa: E402
from engine_parts import GroupShape, Shape  # noqa: E402
from engine_play import Engine  # noqa: E402
from engine_versions import V0_30  # noqa: E402
from rig import slow_sessions, until  # noqa: E402
from kvtier.errors import KvError  # noqa: E402
from kvtier.retries import Pauses  # noqa: E402
from kvtier.session import Session  # noqa: E402
from kvtier.vllm import identity  # noqa: E402
from kvtier.vllm import node as node_module  # noqa: E402
from kvtier.vllm.claims import Claims  # noqa: E402
from kvtier.vllm.guard import Troubles  # noqa: E402
from kvtier.vllm.connector import KvtierConnector  # noqa: E402
from kvtier.vllm.offload_scheduler import Manager, OffloadHalf  # noqa: E402
from kvtier.vllm.offload_worker import OffloadWorker  # noqa: E402
from kvtier.vllm.offloading import KvtierOffloadingConnector  # noqa: E402
from kvtier.vllm.scheduler import SchedulerHalf  # noqa: E402
from kvtier.vllm.staging import Stage  # noqa: E402
from kvtier.vllm.storing import Stores  # noqa: E402
from kvtier.vllm.worker import WorkerHalf  # noqa: E402

#: Where it is made: a fault there leaves the engine without a cache.
AT_THE_START = {"bind_pool", "handshake", "register"}
#: Called by nobody but tests and other methods that are broken here, or so small that nothing in them can go wrong.
SMALL = {"failed_blocks", "report", "storing", "loading", "refuse", "fail", "block_bytes", "has_copied", "tell"}
#: What answers where the methods that are broken here have failed.
INSTEAD = {"give_up", "spoil", "fail_load", "fail_plan", "loads", "hear", "end_all", "_end_all"}
#: Of vLLM's interface, what does nothing here but give a constant or hand on.
CONSTANT = {
    "requires_kv_delivery", "prefer_cross_layer_blocks", "requires_piecewise_for_cudagraph", "get_required_kvcache_layout",
    "get_finished_count", "register_cross_layers_kv_cache", "set_host_xfer_buffer_ops", "handle_preemptions",
    "wait_for_layer_load", "save_kv_layer", "wait_for_save", "take_events", "get_kv_connector_kv_cache_events",
    "build_kv_connector_stats", "build_prom_metrics",
}


def methods(of: type, chosen: Callable[[str], bool]) -> Iterator[tuple[type, str]]:
    """Of this class and those of ours beneath it, where each is defined."""
    for name in sorted(dir(of)):
        owner = next((cls for cls in of.__mro__ if name in vars(cls) and cls.__module__.startswith("kvtier.")), None)
        if owner is not None and not name.startswith("__") and chosen(name) and name not in SMALL | INSTEAD:
            if inspect.isfunction(vars(owner)[name]) or isinstance(vars(owner)[name], property):
                yield owner, name


def public(name: str) -> bool:
    return not name.startswith("_")


def broken(owner: type, name: str, told: list[str], times: int = 2, after: int = 0) -> Any:
    """Raises at its first calls `after` so many, and works from then on."""
    real = vars(owner)[name]
    calls = [0]

    def one(self: Any, *args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        if after < calls[0] <= after + times:
            told.append(name)
            raise RuntimeError("on purpose")
        return real.fget(self) if isinstance(real, property) else real(self, *args, **kwargs)

    return mock.patch.object(owner, name, property(one) if isinstance(real, property) else one)


class Guards(EngineCase):
    def setUp(self) -> None:
        super().setUp()
        self.texts = prompts(3)
        self.wanted = self.serve(self.alone(), self.texts)

    def survives(self, shape: Shape, owner: type, name: str, outputs: int = 4, times: int = 2) -> bool:
        """Whether it was called at all. `times`: how often it fails."""
        told: list[str] = []
        start = name in AT_THE_START
        engine: Engine | None = None if start else self.play(self.shared(), shape)
        if engine is not None and name == "reset":
            self.serve(engine, self.texts)
        with broken(owner, name, told, times), self.quietly():
            engine = engine or self.play(self.shared(), shape, attached=False)
            names = [f"{name} {i}" for i in range(len(self.texts))]
            for one, text in zip(names, self.texts):
                engine.add(one, text, outputs)
            engine.run(20)
            self.assertEqual([engine.done[one].output_tokens() for one in names], self.wanted)
            self.assertEqual(engine.wrong, [])
            if name == "reset":
                self.assertIs(engine.connector.reset_cache(), False)
                found, stored = engine.external_tokens, self.stored(engine)
                engine.pool.cached.clear()
                for i, text in enumerate(self.texts + prompts(2, seed=5)):
                    engine.add(f"on {i}", text, 4)
                engine.run(20)
                self.assertEqual(engine.external_tokens, found, "what is stored may be another model's")
                self.assertEqual(self.stored(engine), stored)
            if name == "shutdown":
                engine.close()
        if not start and name != "shutdown":
            self.assertTrue(engine.all_free(), "blocks are still held")
            self.no_leases(engine)
        return bool(told)

    def quietly(self) -> Any:
        return mock.patch("logging.Logger.error")

    def test_the_connector(self) -> None:
        shape = self.own(Shape(prefix_caching=False))
        self.serve(self.play(self.shared(), shape), self.texts)
        cases = [*methods(SchedulerHalf, public), *methods(WorkerHalf, public)]
        self.assertGreater(len(cases), 15)
        for owner, name in cases:
            if name in ("options", "flush", "gone", "frees_soon"):  # other names of the same call, of the other connector, of newer engines
                continue
            with self.subTest(name=f"{owner.__name__}.{name}"):
                self.assertTrue(self.survives(shape, owner, name), "no call of the engine came to it")

    def test_native_offloading(self) -> None:
        shape = self.own(Shape(prefix_caching=False, connector=KvtierOffloadingConnector))
        self.serve(self.play(self.shared(), shape), self.texts)

        def of_the_worker(name: str) -> bool:
            return name == "start" or (name.startswith("_") and not getattr(getattr(OffloadWorker, name), "is_harmless", False))

        cases = [*methods(OffloadHalf, public), *methods(WorkerHalf, public), *methods(OffloadWorker, of_the_worker)]
        self.assertGreater(len(cases), 25)
        for owner, name in cases:
            with self.subTest(name=f"{owner.__name__}.{name}"):
                self.survives(shape, owner, name)

    def test_for_good(self) -> None:
        """A method that fails at every call, for each connector: after so many faults what it leaves open ends without it."""
        shape = self.own(Shape(prefix_caching=False))
        self.serve(self.play(self.shared(), shape), self.texts)
        native = replace(shape, connector=KvtierOffloadingConnector)
        loads = ("matched", "allocated", "metadata", "start", "finished", "holds", "plan_load", "_begin", "_collect", "_end")
        cases = [*methods(SchedulerHalf, loads.__contains__), *methods(WorkerHalf, loads.__contains__)]
        natives = [*methods(OffloadHalf, loads.__contains__), *methods(OffloadWorker, loads.__contains__)]
        for kind, of in ((shape, cases), (native, [*natives, *methods(WorkerHalf, loads.__contains__)])):
            for owner, name in of:
                with self.subTest(name=f"{owner.__name__}.{name}", native=kind is native):
                    self.survives(kind, owner, name, times=10**9)

    def test_newer_engines(self) -> None:
        """A model of several groups, where only a failed request does not end the engine, at once and for good; blocks that are waited for."""
        groups = [GroupShape(), GroupShape("window", window=9)]
        shape = self.own(Shape(groups, blocks=160, prefix_caching=False, version=V0_30))
        self.serve(self.play(self.shared(), shape), self.texts)
        native = replace(shape, connector=KvtierOffloadingConnector)
        loads = ("allocated", "metadata", "start", "finished", "plan_load", "_begin", "_collect", "_end", "_settle", "come")
        cases = [(shape, of) for of in (SchedulerHalf, WorkerHalf)] + [(native, of) for of in (OffloadHalf, OffloadWorker, WorkerHalf)]
        for kind, of in cases:
            for (owner, name), times in itertools.product(methods(of, loads.__contains__), (2, 10**9)):
                with self.subTest(name=f"{owner.__name__}.{name}", native=kind is native, times=times):
                    self.survives(kind, owner, name, times=times)
        self.texts = prompts(6, 40, 8)
        self.wanted = self.serve(self.alone(), self.texts, outputs=16)
        small = Shape(blocks=30, step_tokens=48, prefix_caching=False, version=V0_30)
        for owner, name in ((SchedulerHalf, "frees_soon"), (Stores, "frees_soon")):
            self.assertTrue(self.survives(self.own(small), owner, name, 16), name)

    def test_blocks_that_are_given_away(self) -> None:
        """The worker's waits for stores, over native offloading."""
        self.texts = prompts(6, 40, 8)
        self.wanted = self.serve(self.alone(), self.texts, outputs=16)
        for owner, name in ((WorkerHalf, "flush"), (OffloadWorker, "_begin_early")):
            shape = Shape(blocks=30, step_tokens=48, connector=KvtierOffloadingConnector)
            with self.subTest(name=name):
                # Which blocks are given away while they are copied is a matter of time.
                self.assertTrue(any(self.survives(self.own(shape), owner, name, 16) for _ in range(8)))

    @mock.patch("kvtier.vllm.storing.RESERVE_DEADLINE_S", 30.0)  # what is not reserved in time is not stored, on a machine that is busy
    def test_what_a_step_that_failed_added_is_not_stored_by_other_names(self) -> None:
        """Prompts in chunks, and answers: blocks of later steps do not move up to the places of those that were not heard of."""
        texts = prompts(3, 60, 8)
        wanted = self.serve(self.alone(Shape(step_tokens=24)), texts, outputs=16)
        # Half of them may be held for stores, and of copies that are slow all 54 of the requests' are: what finds no room is left out.
        blocks = 2 * 3 * 18 + 20
        for owner, name in ((SchedulerHalf, "metadata"), (Stores, "plans"), (Stores, "offer")):
            for after in range(1, 6):
                with self.subTest(name=name, after=after):
                    shape = self.own(Shape(blocks=blocks, step_tokens=24, prefix_caching=False))
                    first = self.play(self.shared(), shape)
                    told: list[str] = []
                    with broken(owner, name, told, 1, after), self.quietly():
                        for i, text in enumerate(texts):
                            first.add(f"{i}", text, 16)
                        first.run()
                    self.assertEqual(len(told), 1)
                    self.assertEqual(([first.done[f"{i}"].output_tokens() for i in range(3)], first.wrong), (wanted, []))
                    self.assertTrue(first.all_free(), "blocks are still held")
                    if name != "offer":  # what was offered there was not stored; all else is, at the latest when its request ends
                        for request in first.done.values():
                            until("all is held", lambda request=request: self.held(first, request) >= 72)
                    second = self.play(self.shared(), shape)
                    self.assertEqual(self.serve(second, texts, outputs=16), wanted)
                    self.assertGreater(second.external_tokens, 0)

    def test_a_load_that_was_not_planned_fails_none_of_the_blocks_that_others_use(self) -> None:
        texts = prompts(2, 41)
        shape = self.own(Shape())
        wanted = self.serve(self.alone(shape), texts, outputs=24)
        first = self.play(self.shared(), shape)
        self.serve(first, texts)
        self.until_held(self.shared(), first, 40)
        for owner, name in ((Stage, "parts"), (Claims, "allocated"), (SchedulerHalf, "allocated")):
            with self.subTest(name=name), self.quietly():
                engine = self.play(self.shared(), shape)
                failed: list[set[int]] = []
                take_back = engine._take_back
                engine._take_back = lambda blocks, failed=failed, take_back=take_back: (failed.append(blocks), take_back(blocks))
                engine.add("runs", texts[0], 24)
                while not engine.running:
                    engine.step()
                engine.step()
                told: list[str] = []
                with broken(owner, name, told, 1):
                    engine.add("comes", texts[1], 24)
                    engine.step()
                    theirs = {block for table in engine.requests["runs"].tables for block in table}
                    engine.run()
                self.assertEqual(([engine.done[one].output_tokens() for one in ("runs", "comes")], engine.wrong), (wanted, []))
                self.assertEqual((told, len(failed)), ([name], 1))
                self.assertEqual(failed[0] & theirs, set())
                self.assertTrue(failed[0])
                self.assertTrue(engine.all_free())
                self.no_leases(engine)

    def test_every_callback_is_guarded(self) -> None:
        """Of what the engine calls and we define; the native connector's with its own parts hand on (the loops above)."""
        for boundary in (KvtierConnector, Manager):
            for name, made in vars(boundary).items():
                if public(name) and name not in CONSTANT and callable(made):
                    self.assertTrue(getattr(made, "is_harmless", False), f"{boundary.__name__}.{name}")
        for name in ("submit_store", "submit_load", "wait", "shutdown"):
            self.assertTrue(vars(OffloadWorker)[name].is_harmless, name)

    def test_a_load_that_cannot_begin_is_not_said_to_be_corrupt(self) -> None:
        """What lies in the arena is sound, and its request is computed; another one loads it."""
        node, shape, (text,) = self.shared(), self.own(Shape()), prompts(1)
        first = self.play(node, shape)
        (wanted,) = self.serve(first, [text])
        self.until_held(node, first, 40)
        for broken in ("_load", "start"):  # of a load, of a whole step
            said, second = record_releases(self), self.play(node, shape)
            busy = mock.patch.object(WorkerHalf, broken, side_effect=KvError("BUSY", "4096 copies are under way"))
            second.add("r", text, 4)
            with self.assertLogs("kvtier.vllm", "ERROR" if broken == "start" else "WARNING"), busy:
                until("it is computed", lambda second=second: (second.step(), "r" in second.done)[1])
            second.run()
            counters = second.connector._scheduler.counters
            self.assertEqual((second.done["r"].output_tokens(), second.wrong, second.lost_blocks), (wanted, [], 10))
            self.assertEqual((said, counters.get("corrupt_blocks"), counters["loads"]), ([[]], None, 1))
        third = self.play(node, shape)
        self.assertEqual((self.serve(third, [text]), third.external_tokens), ([wanted], 40))


class Starts(EngineCase):
    """What the system refuses at the start is asked for again: it is nobody's fault, and no callback's."""

    def quick(self) -> list[float]:
        """Pauses take no time, and are told."""
        asked: list[float] = []

        class Quick(Pauses):
            def take(self) -> float:
                asked.append(super().take())
                return 0.0

        self.enterContext(mock.patch.object(node_module, "Pauses", Quick))
        return asked

    def test_a_file_system_that_is_away_is_asked_again_until_it_is_back(self) -> None:
        asked, content = self.quick(), hashlib.sha256(os.urandom(16)).digest()

        def digest(*_args: Any) -> bytes:
            if len(asked) < 40:
                raise OSError(errno.ESTALE, "Stale file handle", "/models/m")
            return content

        self.enterContext(mock.patch.object(node_module, "weights_digest", digest))
        self.enterContext(mock.patch.object(identity, "weight_folders", lambda _config: ["/models/m"]))
        with self.assertLogs("kvtier.vllm", "WARNING") as logs:
            engine = self.play(self.shared(), Shape(options={"weights_digest": ""}))
        self.assertEqual(len([line for line in logs.output if "Stale file handle" in line]), 1)
        self.assertEqual((asked[:7], set(asked[5:]), len(asked)), ([1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0], {30.0}, 40))
        self.serve(engine, prompts(2))
        self.assertFalse(engine.connector.troubles.stopped)

    def test_threads_that_the_system_refuses_are_nobodys_fault(self) -> None:
        self.quick()
        refused, start = [], threading.Thread.start

        def at_the_limit(thread: threading.Thread) -> None:
            if thread.name == "kvtier-session" and len(refused) < 40:
                refused.append(thread)
                raise RuntimeError("can't start new thread")
            start(thread)

        self.enterContext(mock.patch.object(threading.Thread, "start", at_the_limit))
        engine = self.play(self.shared(), self.own(Shape()))
        self.serve(engine, prompts(2))
        self.assertEqual((len(refused), engine.connector.troubles.count), (40, 0))

    def test_closing_waits_once_for_all_sessions(self) -> None:
        node = node_module.Node(node_module.Options("/tmp/kvtier-nobody.sock"), None, [], Troubles())
        with slow_sessions(5) as (sessions, clock):
            node._sessions = tuple(sessions)
            node.close()
        self.assertEqual(clock, [0.1])

    def test_of_sessions_that_the_system_refused_none_is_left(self) -> None:
        self.quick()
        made: list[Session | None] = []

        def session(*args: Any, **kwargs: Any) -> Session:
            if len(made) == 1:
                made.append(None)
                raise OSError(errno.EMFILE, "Too many open files")
            made.append(Session(*args, **kwargs))
            return made[-1]

        self.enterContext(mock.patch.object(node_module, "Session", session))
        engine = self.play(self.shared(), self.own(Shape([GroupShape(), GroupShape("window", window=9)], blocks=160)))
        self.assertEqual(engine.connector._scheduler._node._sessions, tuple(made[2:]))
        until("the first has ended", lambda: made[0].close(0.1))
        self.check(engine)


if __name__ == "__main__":
    unittest.main()
