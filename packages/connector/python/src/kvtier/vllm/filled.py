"""Blocks that steps have filled, of prompts and of answers: followed by what the engine schedules, and offered to be stored.

Blocks of an answer that goes on are offered several at a time: each offer is a question, a copy and a commit beside the engine's steps.

Invariant: what is offered is whole and computed by the end of the step before, or, of windows, by the end of this one; no block is
offered twice while the node holds it, none of a table that a step was not followed in, and none that no step was scheduled for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kvtier.vllm.groups import Group, align_tokens
from kvtier.vllm.known import Known
from kvtier.vllm.node import Attached
from kvtier.vllm.storing import Piece, Stores
from kvtier.vllm.versions import told_table

#: Of an answer that goes on, so many blocks together.
ANSWER_BLOCKS = 4


class Filled:
    def __init__(self, groups: Sequence[Group], hash_tokens: int, stores: Stores) -> None:
        self._groups = groups
        self._align = align_tokens(groups)
        self._hash_tokens = hash_tokens
        self._stores = stores

    def follow(self, output: Any, requests: Mapping[str, Known], attached: Attached | None) -> None:
        """Tables and computed tokens of what is scheduled; what earlier steps filled is offered."""
        scheduled = output.num_scheduled_tokens
        for new in output.scheduled_new_reqs:
            known = requests.get(new.req_id)
            if known is not None:
                known.table_of(new.block_ids)
                known.next_tokens = 0
                computed, ahead = int(new.num_computed_tokens), int(scheduled.get(new.req_id, 0))
                known.followed = computed + ahead
                self.offer(known, computed, attached, ahead, goes_on=True)
        cached = output.scheduled_cached_reqs
        for i, name in enumerate(cached.req_ids):
            known = requests.get(name)
            if known is None:
                continue
            added = cached.new_block_ids[i]
            if name in cached.resumed_req_ids:
                known.table_of(added if added is not None else [[] for _ in self._groups])
                known.next_tokens = 0
            elif added is not None and not known.lost:
                for table, ids in zip(known.tables, added):
                    table.extend(ids)
            computed, ahead = int(cached.num_computed_tokens[i]), int(scheduled.get(name, 0))
            known.followed = computed + ahead
            if known.followed >= known.next_tokens:
                told = told_table(output, name)
                if told is not None:
                    known.table_of(told)
                self.offer(known, computed, attached, ahead, goes_on=True)

    def ended(self, known: Known, computed_tokens: int, attached: Attached) -> None:
        """Nobody offers its blocks again: all that there is room for, in as many offers as that takes."""
        before: list[int] = []
        left = 0
        while known.offered != before:
            before = list(known.offered)
            left = self.offer(known, computed_tokens, attached)
            if not left:
                break
        self._stores.left_out(left)

    def covered(self, known: Known, computed_tokens: int) -> int:
        """Tokens of its longest prefix that the node holds or was offered, as another engine can load it: of windows a whole tail."""
        ends = [known.offered[group.index] * group.block_tokens for group in self._groups]
        tokens = min(computed_tokens, *ends) // self._align * self._align
        for group in self._groups:
            # Shorter prefixes need blocks still further in front.
            if group.window_tokens and self._run_of(known, group)[0] > group.first_needed(0, tokens // group.block_tokens):
                return 0
        return tokens

    @staticmethod
    def _run_of(known: Known, group: Group) -> tuple[int, int]:
        end = known.offered[group.index]
        run = known.runs.get(group.index, (0, 0))
        # Where something else was said since, it was loaded up to there: then the node has its tail.
        return run if run[1] == end else (group.first_needed(0, end), end)

    def offer(
        self, known: Known, computed_tokens: int, attached: Attached | None, ahead_tokens: int = 0, goes_on: bool = False
    ) -> int:
        """`ahead_tokens`: what the step that begins now computes. Of windows their blocks are held already, and copied after it: a
        step later the first of the tail may have left the window. `goes_on`: there will be another step.

        @returns how many blocks there was no room for, or not in one offer
        """
        if attached is None or not known.stores or known.lost:
            return 0
        known.hear(self._groups)  # answered after it was admitted, perhaps
        named = len(known.hashes) * self._hash_tokens
        room: int | None = None
        left_out = 0
        pieces: list[Piece] = []
        next_tokens = computed_tokens + ahead_tokens + self._align
        for group in self._groups:
            index, window = group.index, group.window_tokens
            end = computed_tokens + ahead_tokens if window else computed_tokens
            end = (end if end < named else named) // group.block_tokens
            offered = known.offered[index]
            if offered >= end:
                next_tokens = min(next_tokens, (offered + 1) * group.block_tokens)
                continue
            answer = goes_on and not window and offered >= known.prompt_tokens // group.block_tokens
            if answer and end - offered < ANSWER_BLOCKS:
                next_tokens = min(next_tokens, (offered + ANSWER_BLOCKS) * group.block_tokens)
                continue
            if room is None:
                room = self._stores.room()
            base = known.bases[index]
            first = max(offered, base, group.first_live(computed_tokens))
            if window:
                # One end earlier, too: where all of a request is held, its last block is computed again.
                first = max(first, group.first_needed(0, end) - self._align // group.block_tokens)
            ids = known.tables[index][first - base : max(0, end - base)]
            while ids and ids[0] == 0:
                ids, first = ids[1:], first + 1
            if 0 in ids:
                ids = ids[: ids.index(0)]
            count, taken = self._stores.fitting(ids, room)
            if count < len(ids):
                next_tokens = 0
                if window:  # a part of its tail is of no use
                    count, taken = 0, 0
                left_out += len(ids) - count
            room -= taken
            if count:
                pieces.append(Piece(group, first, ids[:count]))
                if window:
                    run = self._run_of(known, group)
                    known.runs[index] = (run[0] if run[1] == first else first, first + count)
                known.offered[index] = first + count
            next_tokens = min(next_tokens, (max(known.offered[index], end) + 1) * group.block_tokens)
        known.next_tokens = next_tokens
        if pieces:
            self._stores.offer(attached, known.hashes, pieces, known.tokens)
        return left_out
