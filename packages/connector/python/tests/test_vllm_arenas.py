"""Arenas of a vLLM worker: each is mapped once, and stays so until it is not announced any more or its session has ended."""

from __future__ import annotations

import os
import tempfile
import threading
import types
import unittest
from dataclasses import replace
from typing import Any
from unittest import mock

os.environ.setdefault("KVTIER_WITHOUT_VLLM", "1")

from rig import until
from kvtier import hold
from kvtier.vllm import arenas as arenas_of
from kvtier.vllm.arenas import Arenas
from kvtier.vllm.messages import ArenaPlace

BYTE = 9


class Mapped:
    def __init__(self) -> None:
        self.closed = False

    def close(self) -> None:
        self.closed = True


class Looks(threading.Event):
    """Ends the looking, and counts the looks that were begun."""

    def __init__(self) -> None:
        super().__init__()
        self.begun = 0

    def wait(self, timeout: float | None = None) -> bool:
        self.begun += 1
        return super().wait(timeout)

    def more(self) -> None:
        """One whole look after now: what was waited for last may have begun before."""
        enough = self.begun + 3
        until("it is looked", lambda: self.begun >= enough)


class BetweenLooks:
    """A lock; what is to happen when this thread has let it go for the first time."""

    def __init__(self, happens: Any) -> None:
        self._lock = threading.Lock()
        self._thread = threading.current_thread()
        self._happens = [happens]

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *_: Any) -> None:
        self._lock.release()
        if threading.current_thread() is self._thread and self._happens:
            self._happens.pop()()


class ArenasOfAWorker(unittest.TestCase):
    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        path = os.path.join(folder.name, "arena")
        for name in (path, f"{path}.lock"):
            open(name, "w").close()
        self.place = ArenaPlace(path, 4096, 7, 8, BYTE, 1)
        self.mapped: list[Mapped] = []
        self.may_map = threading.Event()
        self.may_map.set()
        self.looks = Looks()
        self.arenas = Arenas(lambda: types.SimpleNamespace(map=self.map), None)  # type: ignore[arg-type, return-value]
        self.arenas._closed = self.looks
        self.addCleanup(self.arenas.close)
        look = mock.patch.object(arenas_of, "_LOOK_S", 0.01)
        look.start()
        self.addCleanup(look.stop)

    def map(self, _ref: Any, _folder: Any) -> Mapped:
        self.mapped.append(Mapped())
        self.may_map.wait(60)
        return self.mapped[-1]

    def session(self) -> int:
        """That has not ended until this is closed."""
        held = hold.hold(f"{self.place.path}.lock", BYTE)
        assert held is not None
        return held

    def follow(self, place: ArenaPlace) -> None:
        self.arenas.follow([place])
        until("it is mapped", lambda: self.arenas.adopt(None) == [place.id])

    def test_no_step_waits_while_one_is_unmapped(self) -> None:
        stepped, unmapped = threading.Event(), threading.Event()
        waited: list[bool] = []

        class Slow:
            def close(self) -> None:
                waited.append(stepped.wait(60))
                unmapped.set()

        copies = types.SimpleNamespace(map=lambda _ref, _folder: Slow())
        arenas = Arenas(lambda: copies, None)  # type: ignore[arg-type, return-value]
        arenas.follow([ArenaPlace("/a", 1, 7, 0)])
        until("it is mapped", lambda: arenas.adopt(None) == [7])
        arenas.follow([])
        stepped.set()
        self.assertTrue(unmapped.wait(60))
        self.assertEqual(waited, [True])
        with self.assertRaises(KeyError):
            arenas[7]
        arenas.close()

    def test_one_whose_mapping_ends_while_it_is_announced_is_not_mapped_again(self) -> None:
        self.addCleanup(os.close, self.session())
        self.may_map.clear()
        self.arenas.follow([self.place])
        (mapping,) = self.arenas._under_way.values()

        def ends() -> None:
            self.may_map.set()
            mapping.join(60)

        self.arenas._lock = BetweenLooks(ends)  # type: ignore[assignment]
        self.arenas.follow([self.place])
        self.assertFalse(mapping.is_alive())
        self.assertEqual(self.arenas._under_way, {})
        self.assertEqual((len(self.mapped), self.arenas.adopt(None)), (1, [7]))

    def test_one_that_is_announced_anew_without_a_byte_is_told_by_steps_alone(self) -> None:
        held = self.session()
        self.follow(self.place)
        self.follow(replace(self.place, session_byte=0, life=2))
        os.close(held)
        self.looks.more()
        self.assertEqual((self.arenas[7], self.mapped[0].closed, self.arenas._watches), (self.mapped[0], False, {}))
        self.arenas.follow([])
        until("it is unmapped", lambda: self.mapped[0].closed)
        self.assertEqual(len(self.mapped), 1)

    def test_one_that_is_announced_anew_with_a_byte_goes_without_a_step_when_its_session_ends(self) -> None:
        held = self.session()
        self.follow(replace(self.place, session_byte=0))
        self.follow(replace(self.place, life=2))
        self.looks.more()
        self.assertFalse(self.mapped[0].closed)
        os.close(held)
        until("it is unmapped", lambda: self.mapped[0].closed)
        with self.assertRaises(KeyError):
            self.arenas[7]
        self.assertEqual((self.arenas._watches, len(self.mapped)), ({}, 1))

    def test_one_that_is_announced_anew_when_its_node_has_gone_goes_without_a_step(self) -> None:
        self.follow(replace(self.place, session_byte=0))
        os.unlink(f"{self.place.path}.lock")
        self.arenas.follow([replace(self.place, life=2)])
        until("it is unmapped", lambda: self.mapped[0].closed)
        with self.assertRaises(KeyError):
            self.arenas[7]
        self.assertEqual((self.arenas.adopt(None), self.arenas._watches, len(self.mapped)), ([], {}, 1))

    def refuses(self, name: str) -> Any:
        """The next thread of this name; and from then on none."""
        begin, left = threading.Thread.start, [name]

        def once(thread: threading.Thread) -> None:
            if thread.name in left:
                left.remove(thread.name)
                raise RuntimeError("can't start new thread")
            begin(thread)

        return mock.patch.object(threading.Thread, "start", once)

    def test_a_thread_that_is_refused_costs_time_alone(self) -> None:
        for name in ("kvtier-map", "kvtier-arenas"):
            with self.subTest(name), mock.patch.object(arenas_of, "_RETRY_S", 0.01), mock.patch.object(arenas_of.log, "warning") as said:
                self.doCleanups()
                self.setUp()
                held = self.session()
                with self.refuses(name):
                    self.arenas.follow([self.place])
                    until("it was complained", lambda said=said: said.called)
                    self.assertEqual(self.arenas.adopt(None), [])

                    def told() -> bool:
                        self.arenas.follow([self.place])
                        return self.arenas.adopt(None) == [7]

                    until("it is mapped", told)
                self.assertEqual((said.call_count, len(self.mapped)), (1, 1))
                os.close(held)
                until("it is unmapped", lambda: self.mapped[0].closed)

    def test_one_that_is_announced_anew_while_a_thread_is_refused_is_told_in_the_next_step(self) -> None:
        held = self.session()
        self.follow(replace(self.place, session_byte=0))
        with self.refuses("kvtier-arenas"), mock.patch.object(arenas_of.log, "warning") as said:
            self.arenas.follow([replace(self.place, life=2)])
            self.assertEqual((self.arenas.adopt(None), said.call_count), ([], 1))
            self.arenas.follow([replace(self.place, life=2)])
            self.assertEqual((self.arenas.adopt(None), said.call_count), ([7], 1))
        os.close(held)
        until("it is unmapped", lambda: self.mapped[0].closed)

    def test_one_that_no_thread_unmaps_goes_with_the_next_look_or_step(self) -> None:
        for byte in (BYTE, 0):
            with self.subTest(session_byte=byte):
                self.doCleanups()
                self.setUp()
                self.addCleanup(os.close, self.session())
                self.follow(replace(self.place, session_byte=byte))
                with self.refuses("kvtier-unmap"):
                    self.arenas.follow([])
                    if not byte:
                        self.assertFalse(self.mapped[0].closed)
                        self.arenas.follow([])
                    until("it is unmapped", lambda: self.mapped[0].closed)


if __name__ == "__main__":
    unittest.main()
