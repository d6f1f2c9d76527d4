"""Engine and node in containers of their own: process tables, mounts and users that are not the other's, made with namespaces. As root."""

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

import kvtier
import rig
from rig import NAMESPACE, NodeCase, child_of, until

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
        process.wait(30)
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


if __name__ == "__main__":
    unittest.main()
