"""The connector beside others in vLLM's MultiConnector, streaming sessions, and which vLLM it is made for."""

from __future__ import annotations

import copy
import importlib.util
import itertools
import os
import subprocess
import sys
import tempfile
import types
import unittest
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

#: Before a double takes its name.
IS_INSTALLED = importlib.util.find_spec("vllm") is not None

import offload_double  # noqa: E402

offload_double.install()

from engine_case import EngineCase, prompts  # noqa: E402
from engine_parts import GroupShape, Shape  # noqa: E402
from engine_play import Engine  # noqa: E402
from rig import PROGRAM_S, until  # noqa: E402
from kvtier.vllm.bases import KVConnectorRole  # noqa: E402
from kvtier.vllm.connector import KvtierConnector  # noqa: E402
from kvtier.vllm.handshakes import Handshakes  # noqa: E402
from kvtier.vllm.messages import KvtierHandshake, KvtierWorkerMetadata, Rank  # noqa: E402
from kvtier.vllm.offloading import KvtierOffloadingConnector  # noqa: E402
from kvtier.vllm.staging import Stage  # noqa: E402
from kvtier.vllm.store_jobs import StoreJobs  # noqa: E402
from kvtier.vllm.storing import Stores  # noqa: E402
from kvtier.vllm.worker import WorkerHalf  # noqa: E402

SOURCES = Path(__file__).resolve().parent.with_name("src")


@dataclass
class NixlHandshake:
    agent: str = "nixl"


class Nixl:
    """Of NIXL's connector what others meet: a handshake that it wants back, and the keys of its answers."""

    def __init__(self, answer: dict[str, Any] | None) -> None:
        self._answer = answer

    def get_handshake_metadata(self) -> Any:
        return NixlHandshake()

    def set_xfer_handshake_metadata_pp_aware(self, metadata: dict[Any, Any]) -> None:
        if not all(isinstance(one, NixlHandshake) for one in metadata.values()):
            raise ValueError("NixlConnectorScheduler expects NixlHandshakePayload for handshake metadata.")

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> tuple[bool, dict[str, Any] | None]:
        return False, self._answer


class MultiConnector:
    """vLLM's, as far as its connectors feel it: configurations of their own, one handshake for all, no key twice."""

    nixl_first = False
    answer: dict[str, Any] | None = {"do_remote_prefill": True, "remote_host": "10.0.0.1"}
    ours: type = KvtierConnector

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        temp_config = copy.copy(vllm_config)
        temp_config.kv_transfer_config = copy.copy(vllm_config.kv_transfer_config)
        self._own = self.ours(temp_config, role, kv_cache_config)
        self._connectors = [self._own, Nixl(self.answer)]
        if self.nixl_first:
            self._connectors.reverse()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._own, name)

    def get_handshake_metadata(self) -> Any:
        return next((told for c in self._connectors if (told := c.get_handshake_metadata()) is not None), None)

    def set_xfer_handshake_metadata_pp_aware(self, metadata: dict[Any, Any]) -> None:
        for one in self._connectors:
            one.set_xfer_handshake_metadata_pp_aware(metadata)

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> tuple[bool, dict[str, Any] | None]:
        both: dict[str, Any] = {}
        for one in self._connectors:
            _, said = one.request_finished_all_groups(request, block_ids)
            clashes = set(both) & set(said or ())
            if clashes:
                raise RuntimeError(f"Key clash in kv_transfer_params from multiple connectors: {clashes}")
            both.update(said or {})
        return False, both or None


class NixlFirst(MultiConnector):
    nixl_first = True


class OffloadingFirst(MultiConnector):
    ours = KvtierOffloadingConnector


class Alone(MultiConnector):
    """Beside one that answers nothing."""

    answer = None


class Stranger(KvtierConnector):
    """Of a wrapper that nobody knows: it hands another connector's handshake on."""

    def get_handshake_metadata(self) -> Any:
        return NixlHandshake()


class Beside(EngineCase):
    def test_loads_and_stores_beside_nixl_in_either_order(self) -> None:
        """`Engine` sees to it that the outer configuration says "recompute"."""
        for shape in (
            Shape(connector=MultiConnector), Shape(connector=NixlFirst, tp=2), Shape(connector=NixlFirst, pp=2),
            Shape(connector=OffloadingFirst),
        ):
            with self.subTest(of=shape.connector.__name__):
                self.both(shape)

    def test_an_engine_that_has_nothing_to_do_is_attached(self) -> None:
        """Before its first request: it takes steps only while they are wanted."""
        engine = self.play(self.shared(), self.own(Shape(connector=MultiConnector)), attached=False)
        engine.run()
        half = engine.connector._scheduler
        until("it is attached", lambda: engine.run() or half._node.attached() is not None)
        self.assertFalse(half._handshakes.wants_steps)

    def test_a_worker_that_does_not_answer_is_asked_so_often_and_no_more(self) -> None:
        with mock.patch("kvtier.vllm.worker.WorkerHalf.report", return_value=None):
            engine = self.play(self.shared(), self.own(Shape(connector=MultiConnector)), attached=False)
            before = engine.steps
            engine.run()
        self.assertEqual(engine.steps - before, 32)

    def test_nixls_keys_are_nixls(self) -> None:
        text, node = prompts(1, 41)[0], self.shared()
        for connector in (MultiConnector, NixlFirst, Alone):
            with self.subTest(of=connector.__name__):
                shape = self.own(Shape(connector=connector))
                first, params = self.prefill(node, shape, text)
                self.assertEqual(params, {**(connector.answer or {}), "kvtier": params["kvtier"]})
                second = self.play(node, shape)
                second.add("decode", text, 4, kv_transfer_params=params)

                def waits(second: Engine = second) -> bool:
                    second.step()
                    return "promises" in second.connector._scheduler.counters

                until("it waits", waits)
                first.run()
                second.run()
                self.check(second)
                self.assertEqual(second.external_tokens, 40)

    def test_another_connectors_handshake_is_no_trouble(self) -> None:
        with self.assertLogs("kvtier.vllm", "INFO") as logs:
            engine = self.play(self.shared(), self.own(Shape(connector=Stranger, tp=2)))
        self.assertEqual(len([line for line in logs.output if "another connector's (NixlHandshake)" in line]), 1)
        self.serve(engine, prompts(2))
        self.assertGreater(self.stored(engine), 0)

    def test_a_handshake_of_too_few_ranks_begins_nothing(self) -> None:
        """Each rank has an engine of its own: the others' tensors are asked for with steps, and one line says why nothing is stored."""
        config = Engine.vllm_config(types.SimpleNamespace(shape=Shape(tp=2), socket="/s", align=4), 0)  # type: ignore[arg-type]
        begun: list[list[Rank]] = []
        told = {(0, rank): KvtierHandshake((0, rank), "", (48,), (b"f",)) for rank in range(2)}
        shakes = Handshakes(config, lambda of: begun.append(sorted(of)))
        with self.assertLogs("kvtier.vllm", "WARNING") as logs:
            shakes.given({(0, 0): told[0, 0]})
        self.assertEqual((begun, shakes.asks(), shakes.wants_steps), ([], True, True))
        self.assertEqual(len(logs.output), 1)
        self.assertIn("of 1 of 2 ranks", logs.output[0])
        shakes.heard({(0, 1): told[0, 1]})
        self.assertEqual((begun, shakes.asks(), shakes.wants_steps), ([[(0, 0), (0, 1)]], False, False))
        with self.assertNoLogs("kvtier.vllm", "WARNING"):
            Handshakes(config, lambda of: begun.append(sorted(of))).given(told)
        self.assertEqual(len(begun), 2)

    def test_an_outer_configuration_that_cannot_be_set_is_one_line(self) -> None:
        config = Engine.vllm_config(types.SimpleNamespace(shape=Shape(), socket="/s", align=4), 0)  # type: ignore[arg-type]

        class Frozen(MultiConnector):
            def __init__(self, vllm_config: Any) -> None:
                self.own = KvtierConnector(config, KVConnectorRole.WORKER, None)

        with self.assertLogs("kvtier.vllm", "WARNING") as logs:
            made = Frozen(types.SimpleNamespace(kv_transfer_config=None))
        self.assertEqual(len(logs.output), 1)
        self.assertIn('give it "kv_load_failure_policy": "recompute"', logs.output[0])
        self.assertIsNotNone(made.own._worker)
        made.own.shutdown()


class OthersLoads(EngineCase):
    """Another connector's load fails after steps have computed from it, or its request ends before it came: nothing of it is stored."""

    def ended(self, shape: Shape) -> Engine:
        """All requests have ended; some offers are planned, others not, and nothing was told of copies."""
        engine = self.play(self.shared(), shape)
        with mock.patch.object(StoreJobs, "poll"):
            for number, text in enumerate(prompts(3)):
                engine.add(f"last-{number}", text, 9)
            stores = engine.connector._scheduler._stores
            while engine.requests:
                asked = [part.reservation for offer in stores._offers.values() for part in offer.parts]
                until("the node has answered", lambda asked=asked: all(one.done for one in asked))
                engine.step()
        self.assertEqual({offer.planned for offer in stores._offers.values()}, {False, True})
        return engine

    def say(self, engine: Engine, failed: set[int], ours: set[int]) -> None:
        told = KvtierWorkerMetadata(failed=ours) if ours else None
        engine.connector.update_connector_output(types.SimpleNamespace(kv_connector_worker_meta=told, invalid_block_ids=failed))

    def test_what_was_offered_is_not_committed(self) -> None:
        engine = self.ended(self.own(Shape(step_tokens=24)))
        before = self.stored(engine)
        self.say(engine, {3}, set())
        self.assertEqual({offer.planned for offer in engine.connector._scheduler._stores._offers.values()}, {True})
        engine.run()
        self.check(engine)
        self.assertEqual(self.stored(engine), before)
        self.no_leases(engine)
        engine.pool.cached.clear()
        self.serve(engine, prompts(3), 9)
        self.assertGreater(self.stored(engine), before)

    def test_a_load_of_our_own_that_failed_spoils_nothing(self) -> None:
        engine = self.ended(self.own(Shape(step_tokens=24)))
        before = self.stored(engine)
        self.say(engine, {3, 4}, {3, 4, 5})
        engine.run()
        self.check(engine)
        self.assertGreater(self.stored(engine), before)

    def test_workers_tell_which_blocks_are_of_our_own_loads(self) -> None:
        node, texts = self.node(disk_bytes=None), prompts(5)
        engine = self.play(node, self.own(Shape(prefix_caching=False)))
        wanted = self.serve(engine, texts)
        self.until_held(node, engine, 40)
        half = engine.connector._scheduler
        real = half.allocated

        def flipped(request: Any, blocks: Any, tokens: int) -> None:
            real(request, blocks, tokens)
            if tokens:
                self.flip(engine)

        half.allocated = flipped
        with mock.patch.object(Stores, "spoil") as spoil:
            self.assertEqual(self.serve(engine, texts), wanted)
        self.assertGreater(half.counters["corrupt_blocks"], 0)
        spoil.assert_not_called()

    def test_a_request_that_ends_while_another_loads_it_leaves_nothing(self) -> None:
        """Its client has gone. vLLM counts what the load was to bring as computed, and nothing has filled those blocks."""
        text, node = prompts(1, 41)[0], self.shared()
        for connector, is_preempted in itertools.product((None, KvtierOffloadingConnector), (False, True)):
            shape = self.own(Shape(connector=connector, prefix_caching=False))
            wanted = self.serve(self.alone(shape), [text])
            first = self.play(node, shape)
            ours = first.connector
            ask, tell = ours.get_num_new_matched_tokens, ours.update_state_after_alloc

            # As vLLM's MultiConnector where another is chosen: all are asked, and hear of the blocks with 0 tokens of theirs.
            def matched(request: Any, local_tokens: int, ask: Any = ask) -> tuple[int | None, bool]:
                return (None, False) if ask(request, local_tokens)[0] is None else (40 - local_tokens, True)

            first.add("gone", text, 4)
            request = first.requests["gone"]
            if is_preempted:  # once all of it was computed, and found no room
                holder = first.connector._scheduler._stores.holder
                most, holder.most = holder.most, 0
                until("it computes", lambda first=first, request=request: (first.step(), request.output_tokens())[1])
                first._preempt(request)
                holder.most = most
            ours.get_num_new_matched_tokens = matched
            ours.update_state_after_alloc = lambda request, blocks, _tokens, tell=tell: tell(request, blocks, 0)
            until("the other loads", lambda first=first, request=request: (first.step(), request.state == "loading")[1])
            self.assertEqual(request.num_computed_tokens, 40)
            first.abort("gone")
            first._forget(request)  # the other's load has ended
            first.run()
            self.check(first)
            self.assertEqual(self.stored(first), 0)
            second = self.play(node, shape)
            self.assertEqual(self.serve(second, [text]), wanted)
            self.assertEqual(second.external_tokens, 0)

    def test_a_request_that_ends_before_its_failed_plan_leaves_nothing(self) -> None:
        text, node = prompts(1, 41)[0], self.shared()
        shape = self.own(Shape([GroupShape(), GroupShape("window", window=9)], blocks=160))
        first = self.play(node, shape)
        self.serve(first, [text])
        self.until_held(node, first, 40)
        attached, names = first.connector._scheduler._node.attached(), b"".join(next(iter(first.done.values())).block_hashes[:10])

        def tail_is_held() -> bool:
            asked = attached.sessions[1].lookup(names, gaps=True, deadline_s=5)
            return asked.wait(5) and asked.error is None and [end for _, end in asked.result().ranges][-1:] == [10]

        until("the window's tail is held", tail_is_held)
        second = self.play(node, shape)
        second.add("gone", text, 4)
        with (
            mock.patch.object(Stage, "parts", side_effect=RuntimeError("no plan")), self.assertLogs("kvtier.vllm", "ERROR"),
            mock.patch.object(WorkerHalf, "finished", return_value=set()),
            mock.patch.object(WorkerHalf, "failed_blocks", return_value=set()),
        ):
            until("it waits for its plan", lambda: (second.step(), second.requests["gone"].state == "loading")[1])
        self.assertEqual(second.requests["gone"].num_computed_tokens, 40)  # its workers have said nothing yet
        second.abort("gone")
        self.assertFalse(second.connector._scheduler._stores.pending)
        second.run()
        self.assertTrue(second.all_free())
        self.assertEqual((self.stored(second), second.wrong), (0, []))

    def test_a_request_that_ends_while_it_computes_leaves_what_it_has_computed_or_found(self) -> None:
        """Also where it was admitted more than once."""
        (text,), node = prompts(1), self.shared()
        engine = self.play(node, self.own(Shape()))
        holder = engine.connector._scheduler._stores.holder
        most, holder.most = holder.most, 0
        self.serve(engine, [text[:25]])
        engine.add("gone", text, 9)

        def computes() -> bool:
            engine.step()
            return bool(engine.requests["gone"].output_tokens())

        until("it computes", computes)
        engine._preempt(engine.requests["gone"])
        until("it is admitted again", lambda: (engine.step(), engine.requests["gone"].state == "running")[1])
        self.assertEqual(self.stored(engine), 0)
        self.assertGreater(engine.local_tokens, 24)
        holder.most = most
        engine.abort("gone")
        engine.run()
        self.check(engine)
        self.until_held(node, engine, 40)

    def test_a_request_that_goes_on_is_offered_again(self) -> None:
        node, (text,) = self.shared(), prompts(1)
        engine = self.play(node, self.own(Shape()))
        engine.add("on", text, 9)
        half = engine.connector._scheduler
        while not any(known.offered[0] for known in half._requests.values()):
            engine.step()
        # What is given back before the answer has come is not free before it.
        (offer,) = half._stores._offers.values()
        until("the node has answered", lambda: all(part.reservation.done for part in offer.parts))
        self.say(engine, {3}, set())
        (known,) = half._requests.values()
        self.assertEqual((known.offered, known.next_tokens, half._stores.pending), ([0], 0, False))
        engine.run()
        self.check(engine)
        self.until_held(node, engine, 48)


class Sessions(EngineCase):
    """A streaming session drops the last token of its answers, and keeps the names of blocks that it was part of."""

    def test_nothing_of_a_streaming_session_is_looked_up_or_offered(self) -> None:
        node = self.shared()
        for connector in (None, KvtierOffloadingConnector):
            shape = self.own(Shape(connector=connector))
            first = self.play(node, shape)
            self.serve(first, prompts(2), resumable=True)
            self.assertEqual(self.stored(first), 0)
            second = self.play(node, shape)
            self.serve(second, prompts(2))
            self.until_held(node, second, 40)
            third = self.play(node, shape)
            with mock.patch.object(third.connector._scheduler._claims, "look_up") as look_up:
                self.serve(third, prompts(2), resumable=True)
            look_up.assert_not_called()
            self.assertEqual(third.external_tokens, 0)


CONNECTORS = "vllm/distributed/kv_transfer/kv_connector"
FACTORY = """
class KVConnectorFactory:
    _registry = {}
    @classmethod
    def register_connector(cls, name, module_path, class_name):
        if name in cls._registry:
            raise ValueError(f"Connector '{name}' is already registered.")
        cls._registry[name] = (module_path, class_name)
"""
BASES = "class KVConnectorBase_V1: pass\n" + "".join(
    f"class {name}: pass\n"
    for name in ("KVConnectorHandshakeMetadata", "KVConnectorMetadata", "KVConnectorWorkerMetadata", "SupportsHMA")
)
ROLES = "import enum\nclass KVConnectorRole(enum.Enum):\n    SCHEDULER = 0\n    WORKER = 1\n"
METRICS = "class KVConnectorStats: pass\nclass KVConnectorPromMetrics: pass\n"
#: All that the connector is made of.
VLLM = {
    "vllm/__init__.py": '__version__ = "0.31.0"\n',
    f"{CONNECTORS}/factory.py": FACTORY,
    f"{CONNECTORS}/v1/base.py": BASES + ROLES,
    f"{CONNECTORS}/v1/metrics.py": METRICS,
}


class Made(unittest.TestCase):
    """What it is made of, of whatever engine is installed: packages that stand for it, each in a process of its own."""

    def run_with(self, files: dict[str, str], program: str) -> subprocess.CompletedProcess[str]:
        folder = Path(self.enterContext(tempfile.TemporaryDirectory()))
        for name, text in files.items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
            for parent in path.relative_to(folder).parents:
                if str(parent) != "." and text:
                    (folder / parent / "__init__.py").touch()
        plain = {key: value for key, value in os.environ.items() if not key.startswith("KVTIER_WITHOUT_")}
        env = {**plain, "PYTHONPATH": f"{folder}:{SOURCES}", "PYTHONDONTWRITEBYTECODE": "1"}
        return subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, timeout=PROGRAM_S)

    def refused(self, files: dict[str, str], module: str) -> str:
        done = self.run_with(files, f"import {module}")
        self.assertEqual(done.returncode, 1, done.stdout)
        return done.stderr.splitlines()[-1]

    def test_names_are_in_vllms_list_once(self) -> None:
        program = (
            "import kvtier.vllm.connector as c\nfrom kvtier.vllm import naming\n"
            "from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory as f\n"
            "once = dict(f._registry); naming.register(); assert f._registry == once; print(sorted(once.items()))"
        )
        done = self.run_with(VLLM, program)
        ours = [
            ("KvtierConnector", ("kvtier.vllm.connector", "KvtierConnector")),
            ("KvtierOffloadingConnector", ("kvtier.vllm.offloading", "KvtierOffloadingConnector")),
        ]
        self.assertEqual((done.stdout.strip(), done.stderr), (str(ours), ""))

    def test_a_list_that_takes_no_names_is_a_line(self) -> None:
        factory = "class KVConnectorFactory:\n    @classmethod\n    def register_connector(cls, name): pass\n"
        done = self.run_with({**VLLM, f"{CONNECTORS}/factory.py": factory}, "import kvtier.vllm.connector")
        self.assertEqual((done.returncode, done.stderr.count("keep it out of a MultiConnector")), (0, 2), done.stderr)

    @unittest.skipIf(IS_INSTALLED, "vLLM is installed here: no program can be run without it")
    def test_without_a_list_there_is_no_line(self) -> None:
        for files in ({"vllm/__init__.py": ""}, {}):
            done = self.run_with(files, "from kvtier.vllm import naming; naming.register()")
            self.assertEqual((done.returncode, done.stderr), (0, ""))

    def test_a_vllm_that_lacks_a_name_is_refused_in_one_line(self) -> None:
        lacks = {**VLLM, f"{CONNECTORS}/v1/base.py": BASES}
        said = self.refused(lacks, "kvtier.vllm.connector")
        self.assertRegex(
            said,
            r"^ImportError: kvtier: vLLM 0\.31\.0 lacks what the plug-in is made of \(cannot import name 'KVConnectorRole' .*\); "
            r"kvtier knows vLLM 0\.27, 0\.28, 0\.29, 0\.30, 0\.31: install one of them, or start the engine without kvtier$",
        )
        said = self.refused(VLLM, "kvtier.vllm.offloading")
        self.assertRegex(said, r"^ImportError: kvtier: vLLM 0\.31\.0 lacks what .* \(No module named 'vllm\..*offloading'\); kvtier knows")

    def test_whether_failures_are_taken_by_request_is_felt_for(self) -> None:
        results = "import dataclasses\n@dataclasses.dataclass\nclass KVConnectorTransferResults:\n    finished_recving: set\n"
        for more, takes in (("", False), (results, False), (results + "    failed_recving: set\n", True)):
            files = {**VLLM, f"{CONNECTORS}/v1/base.py": BASES + ROLES + more}
            done = self.run_with(files, "import kvtier.vllm.connector as c; print(c.takes_failed_requests())")
            self.assertEqual((done.stdout.strip(), done.stderr), (str(takes), ""))

    def test_an_sglang_that_lacks_its_storage_is_refused_in_one_line(self) -> None:
        said = self.refused({"sglang/__init__.py": '__version__ = "0.6.0"\n'}, "kvtier.sglang.storage")
        self.assertRegex(said, r"^ImportError: kvtier: SGLang 0\.6\.0 lacks what .*; kvtier knows SGLang 0\.5: install one of them")

    @unittest.skipIf(IS_INSTALLED, "vLLM is installed here: no program can be run without it")
    def test_a_folder_of_that_name_is_no_vllm(self) -> None:
        done = self.run_with({"vllm/README": ""}, "from kvtier.vllm import bases; print(bases.HAS_VLLM, bases.vllm_version())")
        self.assertEqual((done.stdout.strip(), done.stderr), ("False None", ""))


if __name__ == "__main__":
    unittest.main()
