"""What tests of the played SGLang engine have in common: engines that are closed, and what must hold after each of them."""

from __future__ import annotations

import hashlib
import itertools
import os
from typing import Any

os.environ["KVTIER_WITHOUT_SGLANG"] = "1"

from rig import Node, NodeCase, until  # noqa: E402
from sglang_play import Engine, Pool  # noqa: E402

_models = itertools.count()


class StorageCase(NodeCase):
    def setUp(self) -> None:
        super().setUp()
        #: The model of this test alone: others use the same node.
        self.model = {"weights_digest": hashlib.sha256(f"{next(_models)}".encode()).hexdigest()}

    def sglang(self, node: Node | None, pool: Pool | None = None, socket: str = "", attached: bool = True, **more: Any) -> Engine:
        engine = Engine(node.socket_path if node else socket, pool, **{**self.model, **more})
        self.addCleanup(engine.close)
        if attached:
            until("the engine is attached", lambda: engine.attached)
        return engine

    def unharmed(self, *engines: Engine) -> None:
        for engine in engines:
            self.assertEqual(engine.storage.troubles.count, 0)
            self.assertEqual(engine.storage.shares.refusal, "")
            for share in engine.storage.shares._shares.values():
                attachment = share.session.attachment
                if attachment is not None:
                    until("nothing is leased or reserved", lambda: attachment.drained(0), 5)
            self.assertEqual(engine.storage.shares.copies.counts().jobs, 0)
