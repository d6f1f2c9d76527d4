"""A prefix on its way to be claimed: leased in every session, checked against its checksums, and only then offered to the engine.

     lookups ──► longest prefix that all groups bring ──► loads (leases) ──► checks, in native code ──► ready: may be claimed
                                                             └─ short, bad, late, node silent ──► released

Invariants: what is ready lies in the arena, is leased and was verified; a stage is released exactly once; nothing here waits.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from functools import partial

from kvtier.copies import Copies, Job
from kvtier.leases import Load
from kvtier.vllm.groups import Group, Prefixes
from kvtier.vllm.identity import Share
from kvtier.vllm.lookups import Lookups
from kvtier.vllm.messages import Part, packed

log = logging.getLogger("kvtier.vllm")


class _Leased:
    """One share's part of it."""

    load: Load

    def __init__(self, share: Share, first: int) -> None:
        self.share = share
        self.group = share.group
        #: Of the group's blocks, the first that was asked for.
        self.first = first
        #: Of the load's blocks, so many are checked or about to be.
        self.checked = 0
        self.checks: list[tuple[int, Job]] = []
        self.bad: set[int] = set()
        #: From this block on they could not be checked.
        self.unchecked = 1 << 62
        #: Of the load's blocks, those that the workers copy.
        self.copied: Sequence[int] = ()

    @property
    def sound(self) -> int:
        """Of the load's blocks, so many from the first on may be used."""
        return min(self.load.ready, self.unchecked, *self.bad)


class Stage:
    def __init__(
        self,
        lookups: Lookups,
        copies: Copies,
        prefixes: Prefixes,
        first_tokens: int,
        end_tokens: int,
        deadline_s: float,
        await_s: float = 0.0,
        await_from: int | None = None,
    ) -> None:
        attached = self.attached = lookups.attached
        self.first_tokens = first_tokens
        self.end_tokens = end_tokens
        #: Of a prefix that is waited for, so much was held when it began.
        self.held_tokens = 0
        #: None: under way. Then the tokens that may be claimed; not above `first_tokens`: nothing.
        self.ready_tokens: int | None = None
        self.reason = ""
        self.began_at = self.asked_at = time.monotonic()
        self.claimed = False
        self._until = self.asked_at + deadline_s + 0.1
        self._copies = copies
        self._prefixes = prefixes
        self._released = False
        self._bad = 0
        self._leased: list[_Leased] = []
        group, first, chain = None, 0, b""
        for share, session in zip(attached.shares, attached.sessions):
            if share.group is not group:
                group = share.group
                end = end_tokens // group.block_tokens
                first = group.first_needed(first_tokens // group.block_tokens, end)
                size = session.hash_bytes
                chain = lookups.chains[group.index][first * size : end * size]
            one = _Leased(share, first)
            self._leased.append(one)
            one.load = session.load(
                chain, deadline_s=deadline_s, await_s=await_s, await_from=await_from, on_ready=partial(self._check, one)
            )

    @property
    def alive(self) -> bool:
        return not self._released and all(one.load.alive for one in self._leased)

    @property
    def released(self) -> bool:
        return self._released

    def _check(self, one: _Leased, load: Load) -> None:
        """On the session's thread, as soon as blocks are ready: the engine's loop only asks whether it has ended."""
        first, end = one.checked, load.ready
        try:
            slots = load.slots(first, end)
            job = self._copies.check(self.attached.arena, one.share.payload_bytes, slots.offsets, slots.checksums)
            one.checks.append((first, job))
            if self._released:
                job.abandon()
        except Exception as error:
            one.unchecked = min(one.unchecked, first)
            log.debug("kvtier: blocks could not be checked (%s)", error)
        one.checked = end

    def poll(self) -> bool:
        """Whether it is decided."""
        if self.ready_tokens is not None:
            return True
        waiting = self._under_way()
        if waiting and (time.monotonic() > self._until or any(not one.usable for one in self.attached.attachments)):
            self.reason = "deadline"
            self.ready_tokens = self.first_tokens
            self.release()
            return True
        if not waiting:
            self._decide()
        return not waiting

    def _under_way(self) -> bool:
        for one in self._leased:
            # In this order: what is ready grows until it is done, and its check is begun by then or soon.
            load = one.load
            if not load.done or one.checked < load.ready:
                return True
            for _, job in one.checks:
                if not job.ended():
                    return True
        return False

    def wait(self, wait_s: float) -> bool:
        """For the loop of an engine: no longer than its patience."""
        until = time.monotonic() + wait_s
        while not self.poll():
            left = until - time.monotonic()
            if left <= 0:
                return False
            load = next((one.load for one in self._leased if not one.load.done), None)
            if load is not None:
                load.wait(left)
            else:
                job = next((job for one in self._leased for _, job in one.checks if not job.ended()), None)
                if job is not None:
                    job.ended(left)
        return True

    def _decide(self) -> None:
        good: dict[int, tuple[int, int]] = {}
        for one in self._leased:
            for first, job in one.checks:
                bad = job.take_bad()
                if bad:
                    one.bad.update(first + i for i in bad)
                    self._bad += len(bad)
            one.checks = []
            index, end = one.group.index, one.first + one.sound
            good[index] = (one.first, min(end, good[index][1]) if index in good else end)
            self.reason = self.reason or ("corrupt" if one.bad else one.load.reason)
        held = [[good[index]] if index in good else () for index in range(self._prefixes.groups)]
        self.ready_tokens = self._prefixes.longest(held, self.first_tokens, self.end_tokens)
        if self.ready_tokens <= self.first_tokens:
            self.release()

    def take_bad(self) -> int:
        """Blocks that were found bad, once."""
        bad, self._bad = self._bad, 0
        return bad

    def parts(self, block_ids: Sequence[Sequence[int]], local_tokens: int) -> list[Part]:
        """What the workers copy: from the leased slots to these blocks. Null blocks are nobody's."""
        end_tokens = self.ready_tokens or 0
        out = []
        for one in self._leased:
            group = one.group
            end = end_tokens // group.block_tokens
            first = max(one.first, group.first_needed(local_tokens // group.block_tokens, end))
            ids = list(block_ids[group.index][first:end])
            if len(ids) != end - first:
                raise ValueError(f"{len(block_ids[group.index])} blocks were allocated for a prefix of {end}")
            slots = one.load.slots(first - one.first, end - one.first)
            offsets: Sequence[int] = slots.offsets
            sums: Sequence[int] = slots.checksums
            one.copied = range(first - one.first, end - one.first)
            if 0 in ids:
                wanted = [i for i, block in enumerate(ids) if block]
                one.copied = [one.copied[i] for i in wanted]
                ids, offsets, sums = ([of[i] for i in wanted] for of in (ids, offsets, sums))
            if ids:
                arena = self.attached.arena.ref.id
                share = one.share
                out.append(Part(share.number, group.index, share.ranks, arena, packed(ids), packed(offsets), packed(sums)))
        return out

    def leased(self, group: Group) -> range:
        """Of a group's blocks, those that every share has leased and that a claim may reach."""
        mine = [one for one in self._leased if one.group.index == group.index]
        last = (self.ready_tokens or 0) // group.block_tokens
        first = max((one.first for one in mine), default=last)
        return range(first, min((min(last, one.first + one.sound) for one in mine), default=first))

    def parts_at(self, wanted: Mapping[int, Sequence[tuple[int, int]]]) -> list[Part]:
        """As `parts`, of single blocks: per group, where to and which block. Each of them is leased."""
        out = []
        for one in self._leased:
            pairs = wanted.get(one.group.index, ())
            if not pairs:
                continue
            slots = one.load.slots()
            one.copied = [block - one.first for _, block in pairs]
            offsets, sums = ([of[i] for i in one.copied] for of in (slots.offsets, slots.checksums))
            to, arena = packed(place for place, _ in pairs), self.attached.arena.ref.id
            share = one.share
            out.append(Part(share.number, one.group.index, share.ranks, arena, to, packed(offsets), packed(sums)))
        return out

    def release(self, bad: dict[int, set[int]] | None = None) -> None:
        """The lease ends. `bad`: share -> indexes into its part of what did not match while it was copied."""
        if self._released:
            return
        self._released = True
        for one in self._leased:
            for _, job in one.checks:
                job.abandon()
            one.checks = []
            corrupt = set(one.bad)
            if bad and one.share.number in bad:
                corrupt.update(one.copied[i] for i in bad[one.share.number] if i < len(one.copied))
            one.load.release(i for i in corrupt if i < one.load.count)
