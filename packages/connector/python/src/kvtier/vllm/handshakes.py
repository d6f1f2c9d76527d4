"""What workers say of their tensors, on its way to the scheduler's half: by the engine's own handshake, or, where that is another
connector's, none at all (`wrapping.py`) or not of every rank, with a step, in which it is asked for.

Invariant: the link to the node is begun once, and not before every rank has said it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

from kvtier.vllm.messages import KvtierHandshake, Rank

log = logging.getLogger("kvtier.vllm")

#: An engine that has nothing to do takes so many steps for an answer; later ones ask, too.
MAX_ASKING_STEPS = 32


class Handshakes:
    def __init__(self, vllm_config: Any, begin: Callable[[dict[Rank, KvtierHandshake]], None]) -> None:
        parallel = vllm_config.parallel_config
        self._ranks = int(parallel.tensor_parallel_size) * int(getattr(parallel, "pipeline_parallel_size", 1) or 1)
        self._begin = begin
        self._told: dict[Rank, KvtierHandshake] = {}
        self._begun = False
        self._asked = 0

    def given(self, told: Mapping[Rank, Any]) -> None:
        """By the engine."""
        ours = {rank: one for rank, one in told.items() if isinstance(one, KvtierHandshake)}
        foreign = next((one for one in told.values() if not isinstance(one, KvtierHandshake)), None)
        if foreign is not None:
            log.info(
                "kvtier: the engine's handshake is another connector's (%s): ours comes with the first step, nothing is loaded or stored "
                "before it, and nothing is to be done",
                type(foreign).__name__,
            )
            return
        self.heard(ours)
        if ours and not self._begun:
            log.warning(
                "kvtier: the engine's handshake is of %d of %d ranks: nothing is loaded or stored before steps bring the others'; where each "
                'rank has an engine of its own they never do: set distributed_executor_backend to "mp" or "ray"',
                len(self._told),
                self._ranks,
            )

    def heard(self, told: Mapping[Rank, KvtierHandshake]) -> None:
        """Of workers, with a step."""
        self._told.update(told)
        if len(self._told) >= self._ranks and not self._begun:
            self._begun = True
            self._begin(self._told)

    def asks(self) -> bool:
        """Whether the step that is put together asks for them."""
        self._asked += not self._begun
        return not self._begun

    @property
    def wants_steps(self) -> bool:
        return not self._begun and self._asked < MAX_ASKING_STEPS
