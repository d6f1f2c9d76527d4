"""Stores: blocks whose KV is computed are held by reference count, reserved at the node, copied by the workers, committed, let go.

     offer (held) ──► Reserve ──► plan for the workers ──► checksums ──► Commit ──► let go
                         │ nothing to write, refused, late ──────────────────────► let go
                         └─ not copied ──► Abort ──► let go

Invariants: a block is held from its offer to the end of its copy, and let go exactly once, on the engine's thread: when that is told, or
before, where the engine resets its cache and the copy was seen to have ended (resets.py); what is offered in
one step is copied in the next one at the earliest; no more blocks are held than the bound, where one that several offers hold counts once.
"""

from __future__ import annotations

import time
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvtier.leases import Reservation
from kvtier.protocol import RESERVED
from kvtier.vllm.groups import Group
from kvtier.vllm.lookups import hashes_of
from kvtier.vllm.messages import Part, Rank, StorePlan, packed, unpacked
from kvtier.vllm.node import Attached

RESERVE_DEADLINE_S = 1.0
#: Offers under way.
MAX_OFFERS = 512
#: Blocks in one piece: a reserve of so many is answered at once.
MAX_OFFER_BLOCKS = 1024
#: So long after an offer was made the engine may wait for its blocks, and so long in a row for those of any: a copy takes less, and a
#: request that is preempted begins anew.
FREES_SOON_S = 0.25


@dataclass
class Piece:
    """Consecutive blocks of one group."""

    group: Group
    first: int
    ids: list[int]


@dataclass
class _Reserved:
    share: int
    group: Group
    ranks: tuple[tuple[int, int], ...]
    piece: Piece
    reservation: Reservation
    #: Of the piece's blocks, those that a plan copies.
    indexes: list[int] = field(default_factory=list)


@dataclass
class _Offer:
    number: int
    blocks: list[Any]
    parts: list[_Reserved]
    arena: int
    made_at: float
    planned: bool = False
    #: What it holds may be computed from what was never there: it is not committed.
    spoilt: bool = False
    waiting: set[int] = field(default_factory=set)


class Holder:
    """Holds blocks of the engine's pool by reference count."""

    def __init__(self, pool: Any, share: float) -> None:
        self._pool = pool
        #: Block -> offers that hold it: each request offers the prefix that it shares with others, too.
        self._holds: dict[int, int] = {}
        self.most = max(1, int(len(pool.blocks) * share))

    @property
    def held(self) -> int:
        return len(self._holds)

    @property
    def room(self) -> int:
        return self.most - self.held

    def fresh(self, block: int) -> bool:
        """To hold it takes room."""
        return block not in self._holds

    def alone(self, block: Any) -> bool:
        """It is free as soon as it is let go."""
        return bool(block.ref_cnt == self._holds[block.block_id])

    def hold(self, ids: Sequence[int]) -> list[Any]:
        blocks = [self._pool.blocks[i] for i in ids]
        if any(block.ref_cnt < 1 for block in blocks):
            raise RuntimeError("a block that nobody holds any more was to be stored")
        self._pool.touch(blocks)
        for block in ids:
            self._holds[block] = self._holds.get(block, 0) + 1
        return blocks

    def let_go(self, blocks: list[Any]) -> None:
        """The last of a chain goes first."""
        for block in blocks:
            left = self._holds[block.block_id] - 1
            if left:
                self._holds[block.block_id] = left
            else:
                del self._holds[block.block_id]
        self._pool.free_blocks(reversed(blocks))


class Stores:
    def __init__(self, holder: Holder, counters: dict[str, int]) -> None:
        self.holder = holder
        self._counters = counters
        self._offers: dict[int, _Offer] = {}
        self._next = 1
        #: The engine waits for blocks: since then, and when it last asked whether to.
        self._waits_since = self._asked_at = float("-inf")
        #: Offers that ended without a plan, for who takes note of that.
        self.unplanned: deque[int] = deque(maxlen=2 * MAX_OFFERS)

    @property
    def pending(self) -> bool:
        return bool(self._offers)

    def frees_soon(self) -> bool:
        """Blocks that nobody else has are let go by themselves, and soon: not those that a silent node was asked about.

        While the engine waits, those behind who lacks blocks get nothing, and who comes may take what was let go: offers that follow each
        other do not prolong the wait, and it begins anew only when nobody has asked for as long.
        """
        now = time.monotonic()
        if now - self._asked_at >= FREES_SOON_S:
            self._waits_since = now
        self._asked_at = now
        if now - self._waits_since >= FREES_SOON_S:
            return False
        for offer in self._offers.values():
            awaited = offer.planned or all(part.reservation.attachment.usable for part in offer.parts)
            if awaited and now - offer.made_at < FREES_SOON_S and any(map(self.holder.alone, offer.blocks)):
                return True
        return False

    def room(self, most: int = MAX_OFFER_BLOCKS) -> int:
        """Blocks that may be offered now, besides those that are held already; -1: none at all."""
        return min(self.holder.room, most) if len(self._offers) < MAX_OFFERS else -1

    def fitting(self, ids: Sequence[int], room: int) -> tuple[int, int]:
        """How many of these, from the first on, may be offered in so much room, and how much of it they take."""
        taken = 0
        for count, block in enumerate(ids):
            needed = taken + self.holder.fresh(block)
            if needed > room or count == MAX_OFFER_BLOCKS:
                return count, taken
            taken = needed
        return len(ids), taken

    def left_out(self, blocks: int) -> None:
        """There was no room for them, and nobody offers them again."""
        if blocks:
            self._add("store_left_out_blocks", blocks)

    def offer(self, attached: Attached, hashes: Sequence[bytes], pieces: list[Piece], tokens: Any | None) -> int:
        """Holds the pieces' blocks and asks for slots; its number. `tokens`: of the request, where their names depend on nothing else."""
        ids = [block for piece in pieces for block in piece.ids]
        held = self.holder.hold(ids)
        parts: list[_Reserved] = []
        number, self._next = self._next, self._next + 1
        # From here on it is known, so that it is let go whatever happens.
        offer = _Offer(number, held, parts, attached.arena.ref.id, time.monotonic())
        self._offers[number] = offer
        for piece in pieces:
            end = piece.first + len(piece.ids)
            chain = hashes_of(hashes, piece.group, piece.first, end)
            # What is in front of a window's tail is not held, and need not be.
            rooted = piece.first == 0 or piece.group.window_tokens
            parent = b"" if rooted else hashes_of(hashes, piece.group, piece.first - 1, piece.first)
            said = None
            for share, session, attachment in zip(attached.shares, attached.sessions, attached.attachments):
                if share.group.index != piece.group.index:
                    continue
                if tokens is not None and attachment.wants_token_ids and not piece.group.window_tokens:
                    size = piece.group.block_tokens
                    said = said or array("I", list(tokens[piece.first * size : end * size])).tobytes()
                reservation = session.reserve(parent, chain, token_ids=said, deadline_s=RESERVE_DEADLINE_S)
                parts.append(_Reserved(share.number, piece.group, share.ranks, piece, reservation))
        return number

    def plans(self) -> list[StorePlan]:
        """Of offers that were made in an earlier step and are answered: what the workers copy now."""
        out = []
        now = time.monotonic()
        for offer in list(self._offers.values()):
            if offer.planned or not all(part.reservation.done for part in offer.parts):
                if not offer.planned and now > offer.made_at + RESERVE_DEADLINE_S + 0.5:
                    self._drop(offer)
                continue
            # By share: workers tell of a plan's share once, whatever pieces it is of.
            parts: dict[int, Part] = {}
            for part in offer.parts:
                reservation = part.reservation
                part.indexes = [i for i, status in enumerate(reservation.status) if status == RESERVED]
                self._count(part)
                if part.indexes and reservation.attachment.arena.id == offer.arena and reservation.attachment.alive:
                    ids = packed(part.piece.ids[i] for i in part.indexes)
                    offsets = packed(reservation.offsets[i] for i in part.indexes)
                    before = parts.get(part.share)
                    if before is not None:
                        ids, offsets = before.blocks + ids, before.offsets + offsets
                    parts[part.share] = Part(part.share, part.group.index, part.ranks[:1], offer.arena, ids, offsets)
                    offer.waiting.add(part.share)
                else:
                    reservation.abort()
                    part.indexes = []
            if not parts:
                self._end(offer)
                continue
            offer.planned = True
            out.append(StorePlan(offer.number, list(parts.values())))
        return out

    def _count(self, part: _Reserved) -> None:
        reservation = part.reservation
        if reservation.error is not None:
            self._add("store_unanswered_blocks", reservation.count)
        refused = sum(1 for status in reservation.status if status == 4)
        if refused:
            self._add("store_refused_blocks", refused)

    def _add(self, name: str, count: int) -> None:
        self._counters[name] = self._counters.get(name, 0) + count

    def copied(self, stored: dict[tuple[int, int], bytes]) -> None:
        """What workers said of their copies."""
        for (number, share), data in stored.items():
            offer = self._offers.get(number)
            if offer is None or share not in offer.waiting:
                continue
            offer.waiting.discard(share)
            sums, at = unpacked(data), 0
            told = [part for part in offer.parts if part.share == share and part.indexes]
            whole = len(sums) == sum(len(part.indexes) for part in told)
            for part in told:
                end = at + len(part.indexes)
                if whole and not offer.spoilt:
                    part.reservation.commit(part.indexes, sums[at:end])
                    self._add("stored_blocks", end - at)
                else:
                    part.reservation.abort()
                at = end
            if not offer.waiting:
                self._end(offer)

    def drop_unplanned(self) -> None:
        """What no worker copies yet is not stored."""
        for offer in list(self._offers.values()):
            if not offer.planned:
                self._drop(offer)

    def spoil(self) -> None:
        """Nothing of what was offered so far is stored; copies that are under way end as always."""
        self.drop_unplanned()
        for offer in self._offers.values():
            offer.spoilt = True

    def let_go_copied(self, copied: Callable[[int, int, Rank], bool]) -> None:
        """Blocks of planned offers that were copied are let go before that is told; then the copies are committed as always."""
        for offer in list(self._offers.values()):
            writers = [(part.share, part.ranks[0]) for part in offer.parts if part.share in offer.waiting and part.indexes]
            if offer.planned and all(copied(offer.number, share, rank) for share, rank in writers):
                blocks, offer.blocks = offer.blocks, []
                self.holder.let_go(blocks)

    def _drop(self, offer: _Offer) -> None:
        for part in offer.parts:
            part.reservation.abort()
        self._end(offer)

    def _end(self, offer: _Offer) -> None:
        del self._offers[offer.number]
        if not offer.planned:
            self.unplanned.append(offer.number)
        blocks, offer.blocks = offer.blocks, []
        self.holder.let_go(blocks)
