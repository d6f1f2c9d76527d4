"""An engine as a process of its own, in another container: told by its arguments what to do, tells on stdout what came of it.

    sidecar_engine.py SOCKET ARENA_FOLDER GROUP store|load|hang
"""

from __future__ import annotations

import json
import os
import sys
import time

from rig import Engine, chain

HASHES = chain("sidecar", 6)


def main() -> None:
    path, folder, group, action = sys.argv[1:]
    engine = Engine(path, arena_folder=folder, group=int(group) if group else None)
    attachment = engine.attached()
    told: dict[str, object] = {"pid": os.getpid(), "uid": os.getuid(), "arena": os.path.dirname(attachment.arena.path)}
    if action == "load":
        told["loaded"] = engine.load(HASHES, list(range(6)))
        told["payload"] = engine.memory.read(5)[:8].hex()
    else:
        for block in range(6):
            engine.memory.fill(block, b"sidecar %d" % block)
        if action == "store":
            told["stored"] = engine.store(HASHES, list(range(6)))
        else:
            told["reserved"] = len(engine.reserve(b"", HASHES).open)
            engine.arena(attachment)
        told["payload"] = engine.memory.read(5)[:8].hex()
    print(json.dumps(told), flush=True)
    while action == "hang":
        time.sleep(1)
    engine.close()


if __name__ == "__main__":
    main()
