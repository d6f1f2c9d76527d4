"""Engine and node in containers of their own: process tables, mounts and users that are not the other's, made with namespaces. As root.

And a node that starts again beside an engine, where the memory has room for little more than one arena."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import unittest
from typing import Any
from unittest import mock

os.environ["KVTIER_WITHOUT_SGLANG"] = "1"

import kvtier  # noqa: E402
import rig  # noqa: E402
from engine_case import EngineCase, prompts  # noqa: E402
from engine_parts import GroupShape, Shape  # noqa: E402
from engine_play import Engine  # noqa: E402
from rig import NAMESPACE, NodeCase, child_of, until  # noqa: E402
from sglang_play import Engine as SglangEngine  # noqa: E402
from sglang_play import Pool, names  # noqa: E402

ARENA_BYTES = 32 << 20
#: The arena, what lies beside it, and no second one.
ROOM_BYTES = 48 << 20
GROUP = 52_001
NODE_USER, ENGINE_USER = 52_002, 52_003
HERE = os.path.dirname(os.path.abspath(__file__))
#: All that runs here is of this folder.
PROJECT = os.path.abspath(f"{HERE}/../../../..")
APART = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc", "--mount"]


def closed_above(folder: str) -> str | None:
    """The uppermost folder on the way to this one that not every user can enter."""
    parts = folder.split("/")
    ways = ["/".join(parts[:count]) for count in range(2, len(parts) + 1)]
    return next((way for way in ways if not os.stat(way).st_mode & 0o001), None)


class Containers(NodeCase):
    """A folder that both see: in memory, with the socket's folder and the arena."""

    def setUp(self) -> None:
        super().setUp()
        if os.geteuid() != 0:
            self.skipTest("SKIPPED: containers are made with namespaces, which only root may make here")
        self.shared = tempfile.mkdtemp(prefix="kvtier-sidecar-", dir="/dev/shm")
        self.addCleanup(shutil.rmtree, self.shared, True)
        os.chmod(self.shared, 0o755)
        self.project = self.place()

    def place(self) -> str:
        """An empty folder that everybody sees, to mount something at."""
        made = tempfile.mkdtemp(prefix="kvtier-mounted-")
        self.addCleanup(os.rmdir, made)
        os.chmod(made, 0o755)
        return made

    def mounts(self, *pairs: tuple[str, str]) -> list[str]:
        """Starts a command in a mount namespace where the second folder of each pair shows the first, and where every user can enter the project."""
        each = [f'mount --bind "{what}" "{where}"' for what, where in pairs]
        if closed := closed_above(PROJECT):
            each += [f'mount --bind "{PROJECT}" "{self.project}"', f'mount -t tmpfs -o mode=755 none "{closed}"']
            each += [f'mkdir -p "{PROJECT}"', f'mount --bind "{self.project}" "{PROJECT}"']
        return ["sh", "-c", " && ".join([*each, 'exec "$@"']), "sh"]

    def node_in_container(self, *, user: int = 0, group: int | None = None) -> rig.Node:
        """Sees no process but its own; its arena lies in the shared folder, its data where nobody else looks."""
        for name in ("arena", "run"):
            os.mkdir(f"{self.shared}/{name}")
            os.chown(f"{self.shared}/{name}", user, user if group is None else group)
            os.chmod(f"{self.shared}/{name}", 0o750)
        node = rig.Node(disk_bytes=None, group=group)
        os.chown(node.folder, user, user)
        node.config["arena"]["dir"] = f"{self.shared}/arena"
        node.config["socketPath"] = node.socket_path = f"{self.shared}/run/node.sock"
        node.prefix = [*APART, *self.mounts(), *self.as_user(user, group)]
        self.addCleanup(node.remove)
        return node

    def as_user(self, user: int, group: int | None) -> list[str]:
        if user == 0:
            return []
        groups = ["--clear-groups"] if group is None else ["--groups", str(group)]
        return ["setpriv", "--reuid", str(user), "--regid", str(user), *groups]

    def engine_in_container(
        self, action: str, *, user: int = 0, group: int | None = None
    ) -> tuple[subprocess.Popen[str], dict[str, Any]]:
        """Sees no process but its own, and the shared folder at another place."""
        mine = self.place()
        engine = f"{HERE}/sidecar_engine.py"
        program = [sys.executable, engine, f"{mine}/run/node.sock", f"{mine}/arena", str(group or ""), action]
        command = [*APART, *self.mounts((self.shared, mine)), *self.as_user(user, group), *program]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        self.addCleanup(self.end, process)
        assert process.stdout is not None
        line = process.stdout.readline()
        self.assertNotEqual(line, "", f"the engine ended with {process.poll()}")
        told = json.loads(line)
        self.assertEqual(told["arena"], f"{mine}/arena")
        return process, told

    def end(self, process: subprocess.Popen[str]) -> None:
        process.kill()
        process.wait(rig.PROGRAM_S)
        if process.stdout is not None:
            process.stdout.close()

    def counters(self, session: kvtier.Session) -> dict[str, int]:
        request = session.stats(deadline_s=5)
        until("an answer", lambda: request.done)
        return request.result()

    def watcher(self, node: rig.Node) -> kvtier.Session:
        session = kvtier.Session(node.socket_path, namespace=b"w" * 32, payload_bytes=1, block_tokens=1)
        self.addCleanup(session.close)
        until("attached", lambda: session.attachment)
        return session


class Apart(Containers):
    def test_a_killed_engine_costs_no_minute_of_its_slots(self) -> None:
        node = self.node_in_container()
        node.start()
        watcher = self.watcher(node)
        killed, told = self.engine_in_container("hang")
        self.assertEqual((told["reserved"], told["pid"] < 10), (6, True))
        self.assertEqual(self.counters(watcher)["session.open"], 2)
        killed.send_signal(signal.SIGKILL)
        began = time.monotonic()
        until("its slots are free", lambda: self.counters(watcher).get("quarantine.lifted.lock_ended") == 1, 10)
        self.assertLess(time.monotonic() - began, 10)
        self.assertEqual(self.counters(watcher)["quarantine.open"], 0)
        # The same blocks: nobody is writing them any more.
        self.assertEqual(self.engine_in_container("store")[1]["stored"], 6)
        self.assertEqual(self.engine_in_container("load")[1]["loaded"], [6, []])

    def test_a_stopped_engine_keeps_its_slots(self) -> None:
        node = self.node_in_container()
        node.start()
        watcher = self.watcher(node)
        stopped, _ = self.engine_in_container("hang")
        os.kill(child_of(stopped.pid), signal.SIGSTOP)
        time.sleep(1)  # five polls
        self.assertEqual(self.counters(watcher).get("quarantine.lifted.lock_ended"), None)
        self.assertEqual(self.engine_in_container("store")[1]["stored"], 0)  # they are being written, for all that is known
        stopped.kill()

    def test_they_start_in_any_order_and_again(self) -> None:
        node = self.node_in_container()
        session = kvtier.Session(node.socket_path, namespace=NAMESPACE, payload_bytes=rig.PAYLOAD_BYTES, block_tokens=16)
        self.addCleanup(session.close)
        self.assertIsNone(session.attachment)
        arenas = set()
        for _ in range(3):
            node.start()
            attachment = until("attached", lambda: session.attachment)
            self.assertNotEqual(attachment.arena.lock_byte, 0)
            arenas.add(attachment.arena.id)
            self.assertEqual(self.engine_in_container("store")[1]["stored"], 6)
            node.end(signal.SIGKILL)
            until("it is known", lambda: session.attachment is None)
        self.assertEqual(len(arenas), 3)
        node.start()
        until("attached", lambda: session.attachment)
        # Of four lives, three of them killed, one arena and one lock file are left; after a clean end none.
        self.assertEqual(len(os.listdir(f"{self.shared}/arena")), 2)
        node.end()
        self.assertEqual(os.listdir(f"{self.shared}/arena"), [])


class Users(Containers):
    def test_users_of_one_group_share_a_node(self) -> None:
        node = self.node_in_container(user=NODE_USER, group=GROUP)
        node.start()
        _, stored = self.engine_in_container("store", user=ENGINE_USER, group=GROUP)
        self.assertEqual((stored["stored"], stored["uid"]), (6, ENGINE_USER))
        _, loaded = self.engine_in_container("load", user=ENGINE_USER + 1, group=GROUP)
        self.assertEqual((loaded["loaded"], loaded["payload"]), ([6, []], stored["payload"]))
        modes = {oct(os.stat(f"{self.shared}/arena/{name}").st_mode & 0o777) for name in os.listdir(f"{self.shared}/arena")}
        self.assertEqual(modes, {"0o660"})

    def test_who_is_not_in_the_group_gets_nothing(self) -> None:
        node = self.node_in_container(user=NODE_USER, group=GROUP)
        node.start()
        script = "import sys; sys.path.insert(0, sys.argv[2]); import kvtier.connecting as l\ntry: l.connect(sys.argv[1])\nexcept Exception as e: print(e)"
        source = os.path.dirname(os.path.dirname(kvtier.__file__))
        for who in (self.as_user(ENGINE_USER, None), self.as_user(ENGINE_USER, GROUP)):  # the other one does not name the group
            command = ["unshare", "--mount", *self.mounts(), *who, sys.executable, "-c", script, node.socket_path, source]
            said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
            self.assertTrue(said.startswith("SETUP: "), said)


def mapped(node: rig.Node) -> list[str]:
    """Lines of this process' arenas, without the tables beside them."""
    with open("/proc/self/maps") as maps:
        return [line for line in maps if f"{node.arena_folder}/" in line and ".lock" not in line]


class RoomForOne(NodeCase):
    """An engine unmaps the arena of a node that has ended, without a step or a call, and keeps that of one that is silent."""

    def node_with_room_for_one(self) -> rig.Node:
        node = rig.Node(arena_bytes=ARENA_BYTES)
        self.addCleanup(node.remove)
        mount = ["mount", "-t", "tmpfs", "-o", f"size={ROOM_BYTES}", "none", node.arena_folder]
        # Where it cannot be mounted, what is mapped says enough.
        if os.geteuid() == 0 and subprocess.run(mount, stderr=subprocess.DEVNULL, check=False).returncode == 0:
            self.addCleanup(subprocess.run, ["umount", "-l", node.arena_folder], check=False)
        node.start()
        return node

    def is_let_go(self, node: rig.Node) -> None:
        until("the arena is unmapped", lambda: not mapped(node), 5)


class BesideVllm(RoomForOne, EngineCase):
    def test_a_node_that_ends_has_its_memory_back_without_a_step(self) -> None:
        texts = prompts(3)
        for shape in (Shape(prefix_caching=False), Shape(tp=2, prefix_caching=False)):
            for number in (signal.SIGTERM, signal.SIGKILL):
                with self.subTest(tp=shape.tp, signal=number.name):
                    node, shape = self.node_with_room_for_one(), self.own(shape)
                    wanted = self.serve(self.alone(shape), texts)
                    engine = self.play(node, shape)
                    self.assertEqual(self.serve(engine, texts), wanted)
                    self.assertEqual(len(mapped(node)), 1 + shape.tp)
                    node.end(number)
                    self.is_let_go(node)
                    node.start()
                    self.attach(engine)
                    self.assertEqual(self.serve(engine, texts), wanted)
                    before = engine.external_tokens
                    self.until_held(node, engine, 40)
                    self.assertEqual(self.serve(engine, texts), wanted)
                    self.assertGreater(engine.external_tokens, before)
                    self.assertEqual(len(mapped(node)), 1 + shape.tp)

    def test_requests_that_are_under_way_when_it_ends_are_computed(self) -> None:
        texts = prompts(4)
        node, shape = self.node_with_room_for_one(), self.own(Shape(prefix_caching=False))
        wanted = self.serve(self.alone(shape), texts)
        engine = self.play(node, shape)
        self.serve(engine, texts)
        for after in range(6):
            self.until_held(node, engine, 40)
            asked = [f"{after} {i}" for i in range(4)]
            for name, text in zip(asked, texts):
                engine.add(name, text)
            for _ in range(after):
                engine.step()
            node.end()
            engine.run()  # a copy that has ended keeps the arena until a step has heard of it
            self.is_let_go(node)
            self.check(engine)
            self.assertEqual([engine.done[name].output_tokens() for name in asked], wanted)
            node.start()
            self.attach(engine)
            self.assertEqual(self.serve(engine, texts), wanted)
        self.assertNotIn("corrupt_blocks", engine.connector._scheduler.counters)

    def test_what_is_claimed_when_it_ends_comes(self) -> None:
        """vLLM ends where blocks of several groups do not come that it was told of."""
        texts = prompts(4)
        for number in (signal.SIGTERM, signal.SIGKILL):
            for when in ("offered", "claimed"):
                with self.subTest(signal=number.name, when=when):
                    node, shape = self.node_with_room_for_one(), self.own(Shape([GroupShape(), GroupShape("window", window=9)], prefix_caching=False))
                    wanted = self.serve(self.alone(shape), texts)
                    engine = self.play(node, shape)
                    self.serve(engine, texts)
                    self.until_held(node, engine, 40)
                    self.ends_when(engine, node, number, when)
                    before = engine.external_tokens
                    with mock.patch.object(engine, "_take_back", side_effect=AssertionError("blocks of a load did not come")):
                        self.assertEqual(self.serve(engine, texts), wanted)
                    self.assertGreater(engine.external_tokens, before)
                    self.is_let_go(node)

    def ends_when(self, engine: Engine, node: rig.Node, number: signal.Signals, when: str) -> None:
        """The node ends when the engine was told of the first load, or has planned it; the engine goes on when all halves may have seen it."""
        half, ended = engine.connector._scheduler, []
        claims = half._claims

        def end() -> None:
            ended.append(node.end(number))
            until("it has ended", lambda: half._node.attached() is None)
            time.sleep(0.7)

        offered, metadata = claims.matched, half.metadata

        def matched(*args: Any) -> Any:
            found = offered(*args)
            if when == "offered" and not ended and found[0]:
                end()
            return found

        def planned(output: Any) -> Any:
            plans = metadata(output)
            if when == "claimed" and not ended and plans.loads:
                end()
            return plans

        claims.matched, half.metadata = matched, planned

    def test_a_silent_node_keeps_its_arena(self) -> None:
        node = self.node_with_room_for_one()
        engine = self.play(node, Shape(options={"lookup_deadline_ms": 100}))
        self.serve(engine, prompts(2))
        before = mapped(node)
        node.send(signal.SIGSTOP)
        self.serve(engine, prompts(2, seed=5))
        until("it is silent", lambda: engine.connector._scheduler._node._sessions[0].suspended, 10)
        time.sleep(1.0)
        self.assertEqual(mapped(node), before)
        node.send(signal.SIGCONT)
        self.attach(engine)
        self.assertEqual(mapped(node), before)

    def test_sessions_that_begin_anew_with_the_same_node_find_all_workers_again(self) -> None:
        """Their connections end, and the node does not."""
        node = self.node_with_room_for_one()
        engine = self.play(node, Shape(tp=2, heads=1))
        half = engine.connector._scheduler
        for pause_s in (0.0, 0.6):
            for session in half._node._sessions:
                session._attachment._link._socket.shutdown(2)
            until("it has ended", lambda: half._node.attached() is None)
            time.sleep(pause_s)
            self.attach(engine)
            self.serve(engine, prompts(2))


class BesideSglang(RoomForOne):
    def test_a_node_that_ends_has_its_memory_back_without_a_call(self) -> None:
        for number in (signal.SIGTERM, signal.SIGKILL):
            with self.subTest(signal=number.name):
                node = self.node_with_room_for_one()
                engine = SglangEngine(node.socket_path, Pool(40))
                self.addCleanup(engine.close)
                until("it is attached", lambda engine=engine: engine.attached)
                keys = names(3, 20)
                self.assertEqual((engine.backup(keys), engine.prefetch(keys)), (20, (20, [])))
                self.assertEqual(len(mapped(node)), 1)
                node.send(signal.SIGSTOP)
                self.assertEqual(engine.prefetch(keys), (0, []))
                time.sleep(1.0)
                self.assertEqual(len(mapped(node)), 1)
                node.end(number)
                self.is_let_go(node)
                self.assertEqual(engine.prefetch(keys), (0, []))
                self.assertEqual(mapped(node), [])
                node.start()
                until("it is attached again", lambda engine=engine: engine.attached)
                engine.backup(keys)
                self.assertEqual(engine.prefetch(keys), (20, []))
                self.assertEqual(engine.storage.troubles.count, 0)


if __name__ == "__main__":
    unittest.main()
