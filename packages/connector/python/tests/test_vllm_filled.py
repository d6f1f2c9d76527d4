"""Which blocks of a request are offered to be stored, step by step; no node."""

from __future__ import annotations

import os
import random
import types
import unittest
from typing import Any

os.environ.setdefault("KVTIER_WITHOUT_VLLM", "1")

from kvtier.vllm.filled import Filled
from kvtier.vllm.groups import Group
from kvtier.vllm.known import Known

SIZE = 4


class Taken:
    """Offers: of each block its id, and how often it was offered."""

    def __init__(self, draw: random.Random) -> None:
        self._draw = draw
        self.blocks: dict[int, list[int]] = {}

    def room(self) -> int:
        return self._draw.choice((-1, 0, 1, 3, 1000))

    def fitting(self, ids: list[int], room: int) -> tuple[int, int]:
        count = max(0, min(len(ids), room))
        return count, count

    def left_out(self, blocks: int) -> None:
        pass

    def offer(self, _attached: Any, _hashes: Any, pieces: list[Any], _tokens: Any) -> None:
        for piece in pieces:
            for i, block in enumerate(piece.ids):
                self.blocks.setdefault(piece.first + i, []).append(block)


class Pieces:
    def __init__(self) -> None:
        self.pieces: list[tuple[int, int]] = []

    def room(self) -> int:
        return 1000

    def fitting(self, ids: list[int], _room: int) -> tuple[int, int]:
        return len(ids), len(ids)

    def offer(self, _attached: Any, _hashes: Any, pieces: list[Any], _tokens: Any) -> None:
        self.pieces += [(piece.first, piece.first + len(piece.ids)) for piece in pieces]


class Follow(unittest.TestCase):
    def test_each_block_once_with_its_own_id_and_none_that_is_held(self) -> None:
        draw = random.Random(3)
        group = Group(0, "full", SIZE, 1, 0, False, ("layer",), (64,), False)
        for _ in range(500):
            taken = Taken(draw)
            filled = Filled((group,), SIZE, taken)  # type: ignore[arg-type]
            blocks = draw.randint(1, 40)
            table = draw.sample(range(1, 1000), blocks)
            hashes = [bytes([i]) for i in range(blocks)]
            held = draw.choice((0, 0, draw.randint(0, blocks + 3)))
            known = Known("r", hashes, True, True, None, tables=[[]], bases=[0], offered=[held])
            steps, computed, there = 0, 0, 0
            while computed < blocks * SIZE:
                ahead = draw.randint(1, 4 * SIZE)
                wanted = min(blocks, -(-(computed + ahead) // SIZE))
                grown = [table[there:wanted]]
                again = steps > 0 and draw.random() < 0.1  # preempted: all of its table comes again
                there = max(there, wanted)
                new = [types.SimpleNamespace(req_id="r", block_ids=(table[:there],), num_computed_tokens=computed)]
                cached = types.SimpleNamespace(
                    req_ids=["r"] if steps else [], resumed_req_ids={"r"} if again else set(),
                    new_block_ids=[[table[:there]] if again else (grown if grown[0] else None)], num_computed_tokens=[computed],
                )
                output = types.SimpleNamespace(
                    scheduled_new_reqs=[] if steps else new, scheduled_cached_reqs=cached, num_scheduled_tokens={"r": ahead}
                )
                filled.follow(output, {"r": known}, object())  # type: ignore[arg-type]
                computed, steps = computed + ahead, steps + 1
            while len(taken.blocks) < max(0, blocks - held):  # it has ended; no room is not for ever
                known.table_of([table])
                filled.offer(known, blocks * SIZE, object())  # type: ignore[arg-type]
            self.assertEqual(taken.blocks, {i: [table[i]] for i in range(min(held, blocks), blocks)})

    def test_an_answer_is_offered_several_blocks_at_a_time_and_what_is_left_at_its_end(self) -> None:
        taken = Pieces()
        filled = Filled((Group(0, "full", SIZE, 1, 0, False, ("layer",), (64,), False),), SIZE, taken)  # type: ignore[arg-type]
        prompt, answer = 6 * SIZE + 1, 6 * SIZE
        blocks = (prompt + answer) // SIZE
        table = list(range(1, blocks + 1))
        known = Known("r", [bytes([i]) for i in range(blocks)], True, True, None, tables=[[]], bases=[0], offered=[0],
                      prompt_tokens=6 * SIZE)

        def step(computed: int, ahead: int) -> None:
            news = [types.SimpleNamespace(req_id="r", block_ids=(table,), num_computed_tokens=0)]
            cached = types.SimpleNamespace(req_ids=["r"] if computed else [], resumed_req_ids=set(), new_block_ids=[None],
                                           num_computed_tokens=[computed])
            output = types.SimpleNamespace(scheduled_new_reqs=[] if computed else news, scheduled_cached_reqs=cached,
                                           num_scheduled_tokens={"r": ahead})
            filled.follow(output, {"r": known}, object())  # type: ignore[arg-type]

        step(0, 4 * SIZE)
        step(4 * SIZE, prompt - 4 * SIZE)
        for computed in range(prompt, prompt + answer):
            step(computed, 1)
        # The prompt as soon as it is whole, its last two blocks, too; of the answer four blocks, and no more until it ends.
        self.assertEqual(taken.pieces, [(0, 4), (4, 6), (6, 10)])
        known.table_of([table])
        filled.offer(known, prompt + answer, object())  # type: ignore[arg-type]
        self.assertEqual(taken.pieces[3:], [(10, 12)])


    def test_tables_that_the_engine_says_itself(self) -> None:
        """Where a step says the tables of its requests, those are taken, and not what was added up from earlier steps."""
        taken = Taken(random.Random(1))
        taken.room = lambda: 1000  # type: ignore[method-assign]
        filled = Filled((Group(0, "full", SIZE, 1, 0, False, ("layer",), (64,), False),), SIZE, taken)  # type: ignore[arg-type]
        known = Known("r", [bytes([i]) for i in range(4)], True, True, None, tables=[[]], bases=[0], offered=[0])
        known.table_of([[1, 2]])
        cached = types.SimpleNamespace(
            req_ids=["r"], resumed_req_ids=set(), new_block_ids=[[[3, 4]]], num_computed_tokens=[4 * SIZE]
        )
        output = types.SimpleNamespace(scheduled_new_reqs=[], scheduled_cached_reqs=cached, num_scheduled_tokens={"r": 1})
        output.kv_connector_block_state = types.SimpleNamespace(block_ids={"r": ([1, 9, 8, 4],)})
        filled.follow(output, {"r": known}, object())  # type: ignore[arg-type]
        self.assertEqual(taken.blocks, {0: [1], 1: [9], 2: [8], 3: [4]})


if __name__ == "__main__":
    unittest.main()
