"""Ten thousand objects of another version are misses: by their namespace, and by their headers on the disk."""

from __future__ import annotations

import json
import subprocess
import unittest
from pathlib import Path
from typing import Any

import kvtier
from rig import BLOCK_TOKENS, NAMESPACE, NODE, PROGRAM_S, Node, NodeCase, chain, until

COUNT = 10_000
PAYLOAD_BYTES = 1000
DATA_PLANE = Path(__file__).parents[4] / "build/data-plane/kvtier_data_plane.node"
MAGIC = b"KVTIEROB"
#: Of object headers (docs/formats.md), whose places in files come as JSON: another version, and the checksum to it.
MAKE = """
const fs = require("node:fs");
const { xxh3_64 } = require(process.argv[1]);
for (const [path, places] of Object.entries(JSON.parse(fs.readFileSync(0, "utf8")))) {
  const data = fs.readFileSync(path);
  for (const at of places) {
    data[at + 8] = 2;
    data.writeBigUInt64LE(xxh3_64(data.subarray(at, at + 248)), at + 248);
  }
  fs.writeFileSync(path, data);
}
"""
#: Beside as many releases, fewer than may wait.
AT_A_TIME = 100


class Foreign(NodeCase):
    def test_they_are_refused_as_misses(self) -> None:
        node = self.node(arena_bytes=64 << 20, disk_bytes=96 << 20)
        session = self.open(node)
        hashes = chain("foreign", COUNT)
        ones = [hashes[i : i + 32] for i in range(0, len(hashes), 32)]
        self.store(session, hashes)
        stranger = self.open(node, b"another layout's version".ljust(32))
        self.assertEqual(self.loaded(stranger, ones), 0)
        self.assertEqual(self.loaded(session, ones[:400]), 400)
        self.assertEqual(session.sessions + stranger.sessions, 2)

        until("all of it is on the disk", lambda: self.tiers(session)["disk"].blocks == COUNT, 60)
        session.close()
        stranger.close()
        node.end()
        self.assertEqual(self.make_foreign(node), COUNT)
        node.start()
        after = self.open(node)
        self.assertEqual(self.loaded(after, ones), 0)
        self.assertEqual(after.sessions, 1)
        self.assertEqual(self.held(after, hashes), 0)
        # Each is a miss and none is damage: a newer program wrote them, and they stay for it.
        counted, disk = self.counted(after), self.tiers(after)["disk"]
        self.assertEqual((counted.get("load.failed.missing", 0), counted.get("load.failed.corrupt", 0)), (COUNT, 0))
        self.assertEqual((disk.misses, disk.corrupt, disk.in_service), (COUNT, 0, True))
        self.assertEqual(len(self.headers(node, version=2)), COUNT)
        # The node is well: the same blocks may be written again.
        self.store(after, hashes[: 32 * 100])
        self.assertEqual(self.loaded(after, ones[:100]), 100)

    def open(self, node: Node, namespace: bytes = NAMESPACE) -> kvtier.Session:
        session = kvtier.Session(
            node.socket_path, namespace=namespace, payload_bytes=PAYLOAD_BYTES, block_tokens=BLOCK_TOKENS
        )
        self.addCleanup(session.close)
        until("attached", lambda: session.attachment)
        return session

    def store(self, session: kvtier.Session, hashes: bytes) -> None:
        """All of them as they lie, each its own root: of zeros, with the checksum that the library finds."""
        copies = kvtier.Copies()
        self.addCleanup(copies.close)
        attachment = session.attachment
        assert attachment is not None
        arena = copies.map(attachment.arena)
        for first in range(0, len(hashes), 32 * AT_A_TIME):
            reservation = session.reserve(b"", hashes[first : first + 32 * AT_A_TIME], deadline_s=10)
            until("reserved", lambda: reservation.done)
            indexes = reservation.open
            offsets = [reservation.offsets[i] for i in indexes]
            job = copies.check(arena, PAYLOAD_BYTES, offsets, [0] * len(offsets))
            until("read", job.ended)
            commit = reservation.commit(indexes, job.take().checksums)
            until("committed", lambda: commit.done)
            self.assertEqual(commit.result(), len(indexes))

    def loaded(self, session: kvtier.Session, ones: list[bytes]) -> int:
        """Each block by itself, so that every one of them is asked for."""
        count = 0
        for first in range(0, len(ones), AT_A_TIME):
            loads = [session.load(one, deadline_s=20) for one in ones[first : first + AT_A_TIME]]
            until("they end", lambda: all(load.done for load in loads), 60)
            for load in loads:
                self.assertIsNone(load.error)
                count += load.ready
                load.release()
        return count

    def held(self, session: kvtier.Session, hashes: bytes) -> int:
        request = session.lookup(hashes, gaps=True, deadline_s=10)
        until("answered", lambda: request.done)
        return request.result().blocks

    def counted(self, session: kvtier.Session) -> dict[str, int]:
        request = session.stats(deadline_s=10)
        until("answered", lambda: request.done)
        return request.result()

    def tiers(self, session: kvtier.Session) -> dict[str, Any]:
        request = session.tiers(deadline_s=10)
        until("answered", lambda: request.done)
        return request.result()

    def headers(self, node: Node, version: int) -> list[tuple[Path, int]]:
        """Of objects of this version on the disk."""
        found = []
        for path in Path(node.config["dataDir"], "segments").glob("segment-*.kvs"):
            data = path.read_bytes()
            at = data.find(MAGIC)
            while at >= 0:
                if data[at + 8] == version:
                    found.append((path, at))
                at = data.find(MAGIC, at + 8)
        return found

    def make_foreign(self, node: Node) -> int:
        """Every object header on the disk says version 2, and its checksum is right: it is not torn, a newer program wrote it."""
        places: dict[str, list[int]] = {}
        for path, at in self.headers(node, version=1):
            places.setdefault(str(path), []).append(at)
        subprocess.run([NODE[0], "-e", MAKE, str(DATA_PLANE)], input=json.dumps(places), text=True, check=True, timeout=PROGRAM_S)
        return len(self.headers(node, version=2))


if __name__ == "__main__":
    unittest.main()
