"""What versions of vLLM do otherwise, as far as a connector feels it, for the played engine (docs/vllm.md); and what their schedulers make
of what several workers say of loads. Not vLLM's code."""

from __future__ import annotations

import types
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Version:
    #: Blocks that failed, of a model with several groups: its requests are computed from their beginning; else the engine ends.
    hybrid_blocks: bool = True
    #: Asks for results instead of what has finished: with requests whose loads failed, which are computed from their beginning.
    results: bool = False
    #: The tables of a step's requests: said, or given to who asks.
    tables: str = ""
    #: Waits for blocks that its connector lets go, before it preempts.
    waits: bool = False
    #: The second model runner: what a step loads is begun behind its forward pass, requests that are resumed come as new ones, and new
    #: blocks are zeroed before stores of who had them are waited for.
    second_runner: bool = False

    def state_of(self, tables: Mapping[str, tuple[list[int], ...]], asked: list[str]) -> Any:
        """What a step says of its requests' blocks. `asked`: who was asked for."""
        if self.tables == "said":
            return types.SimpleNamespace(block_ids=dict(tables))

        def get_block_ids(name: str) -> tuple[list[int], ...] | None:
            asked.append(name)
            return tables.get(name)

        return types.SimpleNamespace(get_block_ids=get_block_ids) if self.tables else None


V0_27 = Version(hybrid_blocks=False)
V0_29 = Version(tables="said", second_runner=True)
V0_30 = Version(hybrid_blocks=False, results=True, tables="asked", waits=True, second_runner=True)


def ended(version: Version, connector: Any, finished: set[str]) -> tuple[set[str], set[str]]:
    """Of one worker's connector: whose loads have ended, and whose of them have failed."""
    if version.results:
        told = connector.get_transfer_results(finished)
        assert told.failed_recving <= told.finished_recving, "a load failed that has not ended"
        return told.finished_recving, told.failed_recving
    return connector.get_finished(finished)[1] or set(), set()


class Together:
    """What workers say of loads, until all of them are through with one."""

    def __init__(self, workers: int) -> None:
        self._workers = workers
        self._through: dict[str, int] = {}
        self._failed: set[str] = set()

    def hear(self, told: Iterable[Any]) -> Any:
        received: set[str] = set()
        invalid: set[int] = set()
        metadata = None
        for one in told:
            invalid |= one.invalid_block_ids
            self._failed |= one.failed_recving
            for name in one.finished_recving:
                self._through[name] = self._through.get(name, 0) + 1
                if self._through[name] == self._workers:
                    del self._through[name]
                    received.add(name)
            if one.kv_connector_worker_meta is not None:
                metadata = one.kv_connector_worker_meta if metadata is None else metadata.aggregate(one.kv_connector_worker_meta)
        failed = self._failed & received
        self._failed -= received
        return types.SimpleNamespace(
            finished_recving=received, failed_recving=failed, invalid_block_ids=invalid, kv_connector_worker_meta=metadata
        )
