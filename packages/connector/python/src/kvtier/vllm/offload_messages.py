"""What travels between the halves under vLLM's native offloading: its own messages, with the connector's beside them.

A load's or a store's places are indexes into the list of blocks that vLLM itself sends to its workers: only they know which blocks.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from kvtier.vllm.messages import KvtierMetadata, KvtierWorkerMetadata
from kvtier.vllm.offload_bases import LoadStoreSpec, OffloadingConnectorMetadata, OffloadingWorkerMetadata


class Numbered(LoadStoreSpec):  # type: ignore[misc]
    """Stands for a load's or a store's plan, which travels on its own. 0: nothing is behind it."""

    def __init__(self, number: int) -> None:
        self.number = number


@dataclass
class OffloadMetadata(OffloadingConnectorMetadata):  # type: ignore[misc]
    kvtier: KvtierMetadata = field(default_factory=KvtierMetadata)
    #: Stores that nothing is copied for.
    ended: list[int] = field(default_factory=list)


@dataclass
class OffloadWorkerMetadata(OffloadingWorkerMetadata):  # type: ignore[misc]
    kvtier: KvtierWorkerMetadata = field(default_factory=KvtierWorkerMetadata)

    def aggregate(self, other: OffloadingWorkerMetadata) -> OffloadWorkerMetadata:
        both = super().aggregate(other)
        told = self.kvtier
        if isinstance(other, OffloadWorkerMetadata):
            told.aggregate(other.kvtier)
        return OffloadWorkerMetadata(both.completed_jobs, both.transfer_stats, kvtier=told)
