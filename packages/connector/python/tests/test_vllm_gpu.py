"""The connector for vLLM with KV in the memory of a GPU, on the emulator: the played engine's tensors lie in what CUDA's driver gave, and
its stream is the one that torch would name."""

from __future__ import annotations

import functools
import logging
import sys
import types
import unittest
from typing import Any
from unittest import mock

import engine_memory
from engine_case import EngineCase, prompts, record_releases
from engine_parts import GroupShape, Shape
from engine_play import Engine
from kvtier.copies import Copies, Layout
from rig import until
from standin import NOT_SUPPORTED, OUT_OF_MEMORY, Driver

DRIVER = Driver()


class GpuCase(EngineCase):
    def setUp(self) -> None:
        super().setUp()
        self.stream = DRIVER.held_stream()
        self.stream.let_go()
        self.streams_asked = 0
        self.addCleanup(DRIVER.heal)
        self.addCleanup(DRIVER.refuse_pinning, 0)
        self.addCleanup(DRIVER.refuse_memory, 0)

        def current_stream(device: int) -> types.SimpleNamespace:
            self.assertEqual(device, 0)
            self.streams_asked += 1
            return types.SimpleNamespace(cuda_stream=self.stream.stream)

        cuda = types.SimpleNamespace(current_stream=current_stream, synchronize=lambda device: None)
        for patch in (
            mock.patch.dict(sys.modules, {"torch": types.SimpleNamespace(cuda=cuda)}),
            mock.patch.object(engine_memory, "ALLOCATOR", DRIVER),
        ):
            patch.start()
            self.addCleanup(patch.stop)
        DRIVER.current()


class Shapes(GpuCase):
    def test_every_layout(self) -> None:
        for layout in engine_memory.LAYOUTS:
            with self.subTest(layout=layout):
                self.both(Shape([GroupShape(layout=layout)]))
        self.assertGreater(self.streams_asked, 0)

    def test_ranks_windows_and_mla(self) -> None:
        self.both(Shape(tp=2))
        self.both(Shape([GroupShape("mla")], tp=2, heads=1))
        groups = [GroupShape("full"), GroupShape("window", window=9)]
        self.both(Shape(groups, blocks=160), 0.9, [[n * 100 + i for i in range(48)] for n in range(4)])
        self.both(Shape(asynchronous=True))


class Faults(GpuCase):
    def test_pinning_refused_is_one_line_and_the_buffer_serves(self) -> None:
        DRIVER.refuse_pinning(NOT_SUPPORTED)
        with self.assertLogs("kvtier.vllm", logging.WARNING) as said:
            _, second = self.both(Shape())
            until("it was told", lambda: (second.step(), len(said.output) >= 2)[1])
        for engine_line in said.output:
            self.assertIn("the arena cannot be pinned for GPU 0 (GPU: pinning", engine_line)
        counters = second.workers[0].connector._worker.device_counters()
        self.assertEqual(counters["pins_refused"], 1)
        self.assertGreater(counters["bounced_bytes"], 0)

    def test_bytes_flipped_between_the_check_and_the_copy_are_computed(self) -> None:
        node = self.node()
        texts = prompts(3)
        wanted = self.serve(self.alone(), texts)
        first = self.play(node, Shape())
        self.assertEqual(self.serve(first, texts), wanted)
        self.until_held(node, first, 40)
        self.flip(first)
        second = self.play(node, Shape())
        self.assertEqual(self.serve(second, texts), wanted)
        self.assertEqual(second.external_tokens, 0)

    def test_a_step_that_takes_longer_than_a_copy_may_is_waited_for(self) -> None:
        second, text, wanted, copies = self.stored()
        self.stream = step = DRIVER.held_stream()
        self.addCleanup(step.let_go)
        second.add("r", text, 4)

        def decided() -> bool:
            second.step()
            counts = copies.counts()
            return counts.standing + counts.late_blocks > 0

        until("the load stands behind it", decided)
        step.let_go()
        second.run()
        self.check(second)
        self.assertEqual((second.done["r"].output_tokens(), second.external_tokens, copies.counts().late_blocks), (wanted, 40, 0))
        self.assertEqual(second.lost_blocks, 0)

    def test_what_a_gpu_does_not_copy_in_time_is_not_said_to_be_corrupt(self) -> None:
        second, text, wanted, copies = self.stored()
        said = record_releases(self)
        DRIVER.hang()
        second.add("r", text, 4)
        until("it is computed", lambda: (second.step(), "r" in second.done)[1])
        DRIVER.heal()
        second.run()
        self.check(second)
        counters = second.connector._scheduler.counters
        self.assertEqual((second.done["r"].output_tokens(), counters.get("corrupt_blocks"), counters["loads"]), (wanted, None, 1))
        self.assertEqual((said, copies.counts().bad_blocks, second.lost_blocks), ([[]], 0, 10))

    def stored(self) -> tuple[Engine, list[int], list[int], Copies]:
        """An engine with short deadlines, for which a prompt of another lies in the arena."""
        node, shape, (text,) = self.shared(), self.own(Shape()), prompts(1)
        first = self.play(node, shape)
        (wanted,) = self.serve(first, [text])
        self.until_held(node, first, 40)
        with mock.patch("kvtier.vllm.worker.Copies", functools.partial(Copies, device_deadline_s=1.0)):
            second = self.play(node, shape)
        half = second.workers[0].connector._worker
        until("the arena is pinned", lambda: (second.step(), half._live().counts().pinned_bytes > 0)[1])
        return second, text, wanted, half._live()

    def test_a_rank_whose_cache_cannot_be_used_keeps_nothing_of_the_gpu(self) -> None:
        """The second group has no room: what the first one got in the GPU is given back. Threads that have a moment have long enough."""
        layout, close, free = Copies.layout, Copies.close, [0]

        def first(copies: Copies, *arguments: Any) -> Layout:
            free[0] = free[0] or DRIVER.free_bytes
            made = layout(copies, *arguments)
            DRIVER.refuse_memory(OUT_OF_MEMORY)
            return made

        self.enterContext(mock.patch.object(Copies, "layout", first))
        self.enterContext(mock.patch.object(Copies, "close", lambda copies, wait_s: close(copies, wait_s and 60.0)))
        engine = self.play(None, Shape([GroupShape("full"), GroupShape("window", window=9)], blocks=160), "/nowhere/node.sock", False)
        worker = engine.workers[0].connector
        self.assertRegex(worker.get_handshake_metadata().refusal, "out of memory|OUT_OF_MEMORY")
        self.assertIsNone(worker._worker._copies)
        until("it is given back", lambda: DRIVER.free_bytes == free[0])

    def test_a_rank_whose_cache_cannot_be_read_copies_nothing(self) -> None:
        """The canary hangs. No arena is pinned for a rank that nothing is planned for, and the GPU gets its memory back."""
        layout, free = Copies.layout, [0]

        def hanging(copies: Copies, *arguments: Any) -> Layout:
            free[0] = free[0] or DRIVER.free_bytes
            made = layout(copies, *arguments)
            DRIVER.hang()
            return made

        self.enterContext(mock.patch.object(Copies, "layout", hanging))
        self.enterContext(mock.patch("kvtier.vllm.worker.Copies", functools.partial(Copies, device_deadline_s=0.3)))
        engine = self.play(None, Shape(), "/nowhere/node.sock", False)
        worker = engine.workers[0].connector
        self.assertRegex(worker.get_handshake_metadata().refusal, "has not ended a small copy")
        self.assertIsNone(worker._worker._copies)
        self.assertLess(DRIVER.free_bytes, free[0])
        DRIVER.heal()
        until("it is given back", lambda: DRIVER.free_bytes == free[0])

    def test_no_driver_is_one_line_and_all_is_computed(self) -> None:
        node = self.node()
        refusal = mock.patch("kvtier.copies.Copies.layout", side_effect=kvtier_error())
        with refusal, self.assertLogs("kvtier.vllm", logging.WARNING) as said:
            engine = self.play(node, Shape(), attached=False)
            self.serve(engine, prompts(2))
        self.assertEqual(engine.external_tokens, 0)
        self.assertTrue(any("no NVIDIA driver" in line for line in said.output), said.output)


def kvtier_error() -> Exception:
    from kvtier import KvError

    return KvError("SETUP", "GPU: no NVIDIA driver (libcuda.so.1) on this machine; install one")


if __name__ == "__main__":
    unittest.main()
