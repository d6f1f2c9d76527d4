"""A worker of the played engine: one rank's memory, the forward pass that checks what it reads, the worker's half of the connector."""

from __future__ import annotations

import functools
import hashlib
import os
import pickle
import types
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

os.environ.setdefault("KVTIER_WITHOUT_VLLM", "1")

from engine_memory import LayerMemory, make_layers  # noqa: E402
from engine_versions import ended  # noqa: E402
from kvtier.vllm.bases import KVConnectorRole  # noqa: E402
from kvtier.vllm.connector import KvtierConnector  # noqa: E402

if TYPE_CHECKING:
    from engine_play import Engine


@dataclass
class Work:
    name: str
    tokens: list[int]
    tables: list[list[int]]
    computed: int
    end: int


@functools.lru_cache(maxsize=1 << 15)
def _kv(seed: bytes, size: int) -> bytes:
    return hashlib.shake_128(seed).digest(size)


class Worker:
    """One rank: its layers' memory, its half of the connector."""

    def __init__(self, engine: Engine, stage: int, rank: int) -> None:
        shape = engine.shape
        self.engine, self.stage, self.rank = engine, stage, rank
        self.heads = 1 if shape.heads < shape.tp else shape.heads // shape.tp
        self.first_head = rank * shape.heads // shape.tp
        self.groups: list[dict[str, LayerMemory]] = []
        tensors: dict[str, Any] = {}
        for number, group in enumerate(shape.groups):
            names = engine.layer_names(number, stage)
            heads = 1 if group.kind == "mla" else self.heads
            layers = make_layers(group.layout, names, shape.blocks, group.block_tokens, heads, shape.dim)
            self.groups.append(layers)
            tensors.update({name: layer.tensor for name, layer in layers.items()})
        config = engine.vllm_config(stage * shape.tp + rank)
        self.connector = (shape.connector or KvtierConnector)(config, KVConnectorRole.WORKER, engine.kv_cache_config(stage))
        self.connector.register_kv_caches(tensors)

    def of_layer(self, layer: str, group: int, head: int) -> bytes:
        """What the KV of a head depends on, beside the tokens before it."""
        absolute = 0 if self.engine.shape.groups[group].kind == "mla" else self.first_head + head
        return f"{self.engine.shape.model} {layer} {absolute}".encode()

    def execute(self, output: Any, work: list[Any]) -> Any:
        connector, version = self.connector, self.engine.shape.version
        if version.second_runner and output.new_block_ids_to_zero:
            self._overwrite(output.new_block_ids_to_zero)
        connector.handle_preemptions(output.kv_connector_metadata)
        self._overwrite(output.new_blocks)
        connector.bind_connector_metadata(output.kv_connector_metadata)
        if not version.second_runner:
            connector.start_load_kv(None)
        for item in work:
            self._forward(item)
        if version.second_runner:
            connector.start_load_kv(None, request_ids=None)
        if work:
            connector.wait_for_save()
        received, failed = ended(version, connector, output.finished_req_ids)
        told = types.SimpleNamespace(
            finished_recving=received,
            failed_recving=failed,
            invalid_block_ids=connector.get_block_ids_with_load_errors(),
            kv_connector_worker_meta=connector.build_connector_worker_meta(),
            stats=connector.get_kv_connector_stats(),
        )
        connector.clear_connector_metadata()
        return pickle.loads(pickle.dumps(told))

    def _overwrite(self, blocks: list[int]) -> None:
        for number in blocks:
            for layers in self.groups:
                for layer in layers.values():
                    layer.poison(number)

    def _forward(self, item: Any) -> None:
        """Writes KV of the scheduled tokens, then reads what attention reads."""
        states = self.engine.states(item.tokens)
        for group, layers in enumerate(self.groups):
            shape = self.engine.shape.groups[group]
            size, table = shape.block_tokens, item.tables[group]
            first = 0 if not shape.window else max(0, item.computed - shape.window + 1)
            bytes_each = 4 * self.engine.shape.dim
            for name, layer in layers.items():
                heads = [(head, self.of_layer(name, group, head)) for head in range(layer.heads)]
                for position in range(item.computed, item.end):
                    for head, of in heads:
                        data = _kv(states[position] + of, bytes_each)
                        layer.write(table[position // size], position % size, head, data)
                for position in range(first, item.end):
                    block, state = table[position // size], states[position]
                    for head, of in heads:
                        if block == 0 or layer.read(block, position % size, head) != _kv(state + of, bytes_each):
                            self.engine.wrong.append((item.name, name, position, self.rank))
