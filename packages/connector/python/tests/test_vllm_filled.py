"""Which blocks of a request are offered to be stored, step by step; no node."""

from __future__ import annotations

import os
import random
import types
import unittest
from typing import Any
from unittest import mock

os.environ.setdefault("KVTIER_WITHOUT_VLLM", "1")

from engine_parts import Pool
from kvtier.vllm import options as options_module
from kvtier.vllm.claims import Claims
from kvtier.vllm.filled import Filled
from kvtier.vllm.groups import Group
from kvtier.vllm.known import Known
from kvtier.vllm.storing import Holder, Stores

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

    def test_tables_that_the_engine_is_asked_for(self) -> None:
        """Only where something is offered; what a step that was not followed has added to them is in them."""
        taken = Taken(random.Random(1))
        taken.room = lambda: 1000  # type: ignore[method-assign]
        filled = Filled((Group(0, "full", SIZE, 1, 0, False, ("layer",), (64,), False),), SIZE, taken)  # type: ignore[arg-type]
        known = Known("r", [bytes([i]) for i in range(6)], True, True, None, tables=[[]], bases=[0], offered=[0], prompt_tokens=6 * SIZE)
        known.table_of([[1, 2]])
        asked: list[str] = []

        def step(computed: int, added: Any, told: Any) -> None:
            cached = types.SimpleNamespace(req_ids=["r"], resumed_req_ids=set(), new_block_ids=[added], num_computed_tokens=[computed])
            state = types.SimpleNamespace(get_block_ids=lambda name: (asked.append(name), told)[1])
            output = types.SimpleNamespace(
                scheduled_new_reqs=[], scheduled_cached_reqs=cached, num_scheduled_tokens={"r": 1}, kv_connector_block_state=state
            )
            filled.follow(output, {"r": known}, object())  # type: ignore[arg-type]

        step(2 * SIZE, [[3]], ([1, 2, 3],))
        self.assertEqual((asked, taken.blocks), (["r"], {0: [1], 1: [2]}))
        step(2 * SIZE + 1, None, None)
        self.assertEqual(asked, ["r"])
        known.lost = True
        step(4 * SIZE, [[5]], ([1, 2, 3, 9, 5],))
        self.assertEqual((asked, known.lost, taken.blocks), (["r", "r"], False, {0: [1], 1: [2], 2: [3], 3: [9]}))
        step(5 * SIZE, [[6]], None)  # it is none of this step's, and what was added up is taken
        self.assertEqual(taken.blocks, {0: [1], 1: [2], 2: [3], 3: [9], 4: [5]})


class Ended(unittest.TestCase):
    """What a request has left at its end, and how much of it another pod may be promised."""

    def test_more_than_one_offer_takes_and_no_more_than_there_is_room_for(self) -> None:
        group, blocks = Group(0, "full", SIZE, 1, 0, False, ("layer",), (64,), False), 2500
        for share, wanted in ((0.9, [1024, 1024, 452]), (0.4, [1024, 176])):
            asked: list[int] = []

            class Session:
                def reserve(self, _parent: bytes, chain: bytes, asked: list[int] = asked, **_more: Any) -> Any:
                    asked.append(len(chain) // 4)
                    return types.SimpleNamespace(done=False)

            one = types.SimpleNamespace(group=group, number=0, ranks=((0, 0),))
            attached = types.SimpleNamespace(
                shares=[one], sessions=[Session()], attachments=[types.SimpleNamespace(wants_token_ids=False)],
                arena=types.SimpleNamespace(ref=types.SimpleNamespace(id=1)),
            )
            pool, counters = Pool(3000, True), {}
            filled = Filled((group,), SIZE, Stores(Holder(pool, share), counters))
            known = Known("r", [i.to_bytes(4, "big") for i in range(blocks)], True, True, None, bases=[0], offered=[0])
            known.table_of([pool.take(blocks) or []])
            filled.ended(known, blocks * SIZE + 1, attached)  # type: ignore[arg-type]
            self.assertEqual((asked, filled.covered(known, blocks * SIZE + 1)), (wanted, sum(wanted) * SIZE))
            self.assertEqual(counters.get("store_left_out_blocks", 0), blocks - sum(wanted))

    def test_what_is_covered_was_offered_with_a_whole_tail_of_each_window(self) -> None:
        """However steps and room come, and whatever was loaded before them."""
        draw, seen = random.Random(5), {"all": 0, "some": 0, "none": 0}
        for _ in range(2000):
            window = draw.randint(2, 5 * SIZE)
            groups = (
                Group(0, "full", 2 * SIZE, 2, 0, False, ("a",), (64,), False),
                Group(1, "window", SIZE, 1, window, False, ("b",), (64,), False),
            )
            offered: list[set[int]] = [set(), set()]
            scarce = draw.random() < 0.7

            def room(scarce: bool = scarce) -> int:
                return draw.choice((-1, 0, 2, 4, 9)) if scarce else 1000

            def offer(_attached: Any, _hashes: Any, pieces: list[Any], _tokens: Any, offered: list[set[int]] = offered) -> None:
                for piece in pieces:
                    offered[piece.group.index].update(range(piece.first, piece.first + len(piece.ids)))

            def fitting(ids: list[int], room: int) -> tuple[int, int]:
                return (max(0, min(len(ids), room)),) * 2

            stores: Any = types.SimpleNamespace(room=room, fitting=fitting, left_out=lambda _blocks: None, offer=offer)
            filled = Filled(groups, SIZE, stores)
            tokens = draw.randint(1, 30 * SIZE)
            known = Known("r", [bytes([i]) for i in range(tokens // SIZE)], True, True, None, tables=[[], []], bases=[0, 0], offered=[0, 0])
            loaded = draw.choice((0, draw.randint(0, tokens) // (2 * SIZE) * 2 * SIZE))
            local = draw.choice((0, draw.randint(0, loaded) // (2 * SIZE) * 2 * SIZE))
            if local < loaded:
                self.load(groups, known, local, loaded)
                for group in groups:  # the node holds what was loaded of it, and all in front of that where nothing has a window
                    end = loaded // group.block_tokens
                    first = group.first_needed(local // group.block_tokens, end) if group.window_tokens else 0
                    offered[group.index].update(range(first, end))
            computed = loaded
            while computed < tokens:
                ahead = min(draw.choice((1, draw.randint(1, 30 * SIZE))), tokens - computed)
                table = [self.table(group, computed, computed + ahead) for group in groups]
                new = types.SimpleNamespace(req_id="r", block_ids=table, num_computed_tokens=computed)
                output = types.SimpleNamespace(
                    scheduled_new_reqs=[new], num_scheduled_tokens={"r": ahead},
                    scheduled_cached_reqs=types.SimpleNamespace(req_ids=[]),
                )
                filled.follow(output, {"r": known}, object())  # type: ignore[arg-type]
                computed += ahead
            known.table_of([self.table(group, computed, computed) for group in groups])
            filled.ended(known, computed, object())  # type: ignore[arg-type]
            covered = filled.covered(known, computed)
            most = computed // (2 * SIZE) * 2 * SIZE
            self.assertLessEqual(covered, most)
            for group in groups:
                end = covered // group.block_tokens
                self.assertLessEqual(set(range(group.first_needed(0, end), end)), offered[group.index])
            if not scarce:
                self.assertEqual(covered, most)
            seen["all" if covered == most else "some" if covered else "none"] += 1
        self.assertTrue(all(count > 50 for count in seen.values()), seen)

    def test_the_tail_of_a_window_that_was_loaded_in_part(self) -> None:
        """A load beside a local hit asks for nothing in front of it: of a window the node need not hold that, and is offered it."""
        groups = (
            Group(0, "full", SIZE, 1, 0, False, ("a",), (64,), False),
            Group(1, "window", SIZE, 1, 4 * SIZE, False, ("b",), (64,), False),
        )
        # Of ten blocks the last four are the tail. A local hit in front of it leaves all of it to the load.
        for local, wanted in ((8, (6, 11)), (7, (6, 11)), (6, (10, 11)), (0, (10, 11))):
            pieces: list[tuple[int, int, int]] = []

            def offer(_attached: Any, _hashes: Any, told: list[Any], _tokens: Any, pieces: list[Any] = pieces) -> None:
                pieces += [(piece.group.index, piece.first, piece.first + len(piece.ids)) for piece in told]

            def fitting(ids: list[int], _room: int) -> tuple[int, int]:
                return len(ids), len(ids)

            stores: Any = types.SimpleNamespace(room=lambda: 1000, fitting=fitting, left_out=lambda _blocks: None, offer=offer)
            filled = Filled(groups, SIZE, stores)
            known = Known("r", [bytes([i]) for i in range(11)], True, True, None, tables=[[], []], bases=[0, 0], offered=[0, 0])
            self.load(groups, known, local * SIZE, 10 * SIZE)
            new = types.SimpleNamespace(
                req_id="r", block_ids=[self.table(group, 10 * SIZE, 11 * SIZE) for group in groups], num_computed_tokens=10 * SIZE
            )
            output = types.SimpleNamespace(
                scheduled_new_reqs=[new], num_scheduled_tokens={"r": SIZE}, scheduled_cached_reqs=types.SimpleNamespace(req_ids=[])
            )
            filled.follow(output, {"r": known}, object())  # type: ignore[arg-type]
            known.table_of([self.table(group, 11 * SIZE, 11 * SIZE) for group in groups])
            filled.ended(known, 11 * SIZE, object())  # type: ignore[arg-type]
            self.assertEqual((sorted(pieces), filled.covered(known, 11 * SIZE)), ([(0, 10, 11), (1, *wanted)], 11 * SIZE), local)

    @staticmethod
    def load(groups: tuple[Group, ...], known: Known, local: int, loaded: int) -> None:
        """It is admitted with a local hit, and with a load of what lies between that and `loaded` tokens."""
        claims = Claims(options_module.parse({"socket": "/s"}), groups, SIZE, mock.Mock(), {})
        known.stage = mock.Mock(first_tokens=local, ready_tokens=loaded, end_tokens=loaded)
        claims.allocated(known, mock.Mock(), loaded - local)

    @staticmethod
    def table(group: Group, computed: int, end: int) -> list[int]:
        """Its blocks are called by their places; those that the window has left are gone."""
        gone = group.first_live(computed)
        return [0 if i < gone else i + 1 for i in range(-(-end // group.block_tokens))]


if __name__ == "__main__":
    unittest.main()
