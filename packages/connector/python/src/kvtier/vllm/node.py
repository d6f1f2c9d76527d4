"""The scheduler's half of the link to the cache node: a session for each share, and the arena mapped, kept by a thread.

Before there can be a namespace, the weights must have a digest, the workers must have said how their tensors lie, and the engine
must have made the root of its hashes; all that is waited for here, beside serving. Invariant: `attachments` is given only while
every session is attached to one and the same arena, and this process and every worker have mapped it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvtier.attachment import Attachment
from kvtier.copies import Arena, Copies
from kvtier.errors import KvError
from kvtier.retries import Pauses
from kvtier.session import Session, close_all
from kvtier.vllm import identity, roots
from kvtier.vllm.groups import Group, Unsupported
from kvtier.vllm.guard import Troubles
from kvtier.vllm.mappings import MAPPING_STEPS_S, Mappings
from kvtier.vllm.messages import ArenaPlace, KvtierHandshake, Rank
from kvtier.vllm.options import Options
from kvtier.vllm.pinning import Pinning
from kvtier.vllm.tiers import Tiers
from kvtier.weights import WeightsMissing, weights_digest

log = logging.getLogger("kvtier.vllm")

_TURN_S = 0.05
#: The same while nothing is to be done: each turn takes a core from whoever computes, and those who wait for it at the end of an operation.
_SETTLED_TURN_S = 0.2
#: What the node refused, or has not got yet, is tried again.
_RETRY_S = 0.5
#: The first requests of an engine may come before its sessions are attached.
_FIRST_S = 0.5


@dataclass(frozen=True)
class Attached:
    """What requests are asked with; valid while its attachments are."""

    shares: tuple[identity.Share, ...]
    sessions: tuple[Session, ...]
    attachments: tuple[Attachment, ...]
    arena: Arena


class Node:
    def __init__(self, options: Options, vllm_config: Any, groups: Sequence[Group], troubles: Troubles) -> None:
        self.ranks: frozenset[Rank] = frozenset()
        self.refusal = ""
        self.tiers = Tiers()
        #: For checks of what is leased, before it is claimed.
        self.copies = Copies(load_threads=options.copy_threads, store_threads=1)
        self._options = options
        self._vllm_config = vllm_config
        self._groups = groups
        self._troubles = troubles
        self._handshakes: dict[Rank, KvtierHandshake] = {}
        self._weights: bytes | None = bytes.fromhex(options.weights_digest) if options.weights_digest else None
        self._generation = b""
        self._shares: tuple[identity.Share, ...] = ()
        self._sessions: tuple[Session, ...] = ()
        self._mappings = Mappings(self.copies)
        self._pins = Pinning()
        self._complaint = ""
        self._pauses = Pauses()
        self._told_root = False
        self._unmapped_since = 0.0
        self._first_asked = 0.0
        self._stopped = threading.Event()
        self._poked = threading.Event()
        self._lock = threading.Lock()
        self._cached: Attached | None = None
        #: Of sessions that are closed.
        self._unknown_before = 0
        self._thread = threading.Thread(target=self._run, name="kvtier-node", daemon=True)

    # ---- of the engine's loop -------------------------------------------------------------------------------------------

    def follow_claims(self, claimed: Callable[[], Set[int]]) -> None:
        """`claimed`: arenas that stay until what is claimed of them is copied; asked on the node's thread."""
        self._mappings.claimed = claimed

    def begin(self, handshakes: dict[Rank, KvtierHandshake]) -> None:
        refused = next((one.refusal for one in handshakes.values() if one.refusal), "")
        if refused:
            self._refuse(refused)
            return
        self._handshakes = dict(handshakes)
        self.ranks = frozenset(handshakes)
        self._thread.start()

    def attached(self) -> Attached | None:
        """Who to ask now; None: nobody, and it costs nothing."""
        sessions, cached = self._sessions, self._cached
        if cached is not None and cached.sessions is sessions and cached.arena.ref.id in self._mappings:
            for attachment in cached.attachments:
                if not attachment.usable:
                    break
            else:
                return cached
        return self._attached_now(sessions) if sessions else None

    def _attached_now(self, sessions: tuple[Session, ...]) -> Attached | None:
        now = tuple(session.attachment for session in sessions)
        if None in now:
            return None
        ids = {one.arena.id for one in now if one is not None}
        if len(ids) != 1:
            return None
        arena = self._mappings.of_all(ids.pop(), self.ranks)
        if arena is None:
            return None
        self._unmapped_since = 0.0
        self._cached = Attached(self._shares, sessions, now, arena)  # type: ignore[arg-type]
        return self._cached

    def may_attach_soon(self, patience_s: float) -> bool:
        """The engine has just begun; or the sessions are there, only a mapping is still under way, and not for long. `patience_s`: what a
        request waits for an answer. A busy machine takes its time, but who finds no node waits for `_FIRST_S` and no longer."""
        sessions, now = self._sessions, time.monotonic()
        if not sessions or any(session.attachment is None for session in sessions):
            self._unmapped_since = 0.0
            self._first_asked = self._first_asked or now
            limit_s = _FIRST_S if any(session.failing for session in sessions) else max(_FIRST_S, patience_s)
            return now - self._first_asked < limit_s and self._thread.is_alive() and not self.refusal
        self._unmapped_since = self._unmapped_since or now
        return now - self._unmapped_since < max(MAPPING_STEPS_S, patience_s)

    def wants_steps(self) -> bool:
        return self._mappings.wants_steps(self.ranks)

    def mapped(self, told: dict[int, set[Rank]]) -> None:
        self._mappings.mapped(told)

    @property
    def places(self) -> list[ArenaPlace]:
        """What workers are to map."""
        return self._mappings.places

    def renew(self, generation: bytes) -> None:
        """Everything stored so far is another model's from now on."""
        with self._lock:
            self._generation = generation
            old, self._sessions, self._cached = self._sessions, (), None
            self._unknown_before += sum(session.unknown_answers for session in old)
        for session in old:
            session.close(0.0)
        self._poked.set()

    @property
    def unknown_answers(self) -> int:
        """What a newer node said that is not known here."""
        return self._unknown_before + sum(session.unknown_answers for session in self._sessions)

    def pin(self, attached: Attached, chains: dict[int, bytes], ttl_s: float, ticket: bytes = b"") -> bool:
        """As soon as they are committed; see `Pinning.add`."""
        added = self._pins.add(attached, chains, ttl_s, ticket)
        self._poked.set()
        return added

    def close(self) -> None:
        self._stopped.set()
        self._poked.set()
        if self._thread.is_alive():
            self._thread.join(0.5)
        sessions, self._sessions = self._sessions, ()
        close_all(sessions, 0.1)
        self.copies.close(0.5)
        if not self._thread.is_alive():
            self._mappings.close()

    # ---- of its own thread --------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._stopped.is_set():
            pause_s = _TURN_S
            try:
                if not self._sessions and not self.refusal:
                    self._open()
                self._mappings.follow(self._sessions)
                self._keep_pins()
                self.tiers.keep(next((session for session in self._sessions if session.attachment), None))
                if self._settled():
                    pause_s = _SETTLED_TURN_S
                self._pauses.reset()
            except (Unsupported, WeightsMissing) as error:
                if not self._stopped.is_set():
                    self._refuse(str(error))
            except KvError as error:  # the world's, not ours: an arena that is gone, or lies elsewhere in this container
                self._complain(str(error))
                pause_s = _RETRY_S
            except OSError as error:  # the world's, too: a file system that is away, no descriptors, no threads
                self._complain(f"the system refused what a session needs ({error})")
                pause_s = self._pauses.take()
            except Exception as error:
                self._troubles.note("the link to the cache node", error)
                pause_s = _RETRY_S
            self._poked.wait(pause_s)
            self._poked.clear()

    def _settled(self) -> bool:
        cached = self._cached
        if cached is None or cached.sessions is not self._sessions or self._pins:
            return False
        return all(attachment.usable for attachment in cached.attachments)

    def _open(self) -> None:
        if self._weights is None:
            folders = identity.weight_folders(self._vllm_config)
            began = time.monotonic()
            cache = Path(self._options.weights_cache) if self._options.weights_cache else None
            self._weights = weights_digest(folders, cache, self._stopped)
            log.info("kvtier: digest of the weights in %.1f s", time.monotonic() - began)
        root = identity.root_hash()
        if root is None:
            return
        if not self._told_root and roots.is_drawn(self._vllm_config):
            self._told_root = True
            log.warning(
                "kvtier: this vLLM begins block hashes with random bytes: what is stored is found by nobody else, and by nobody after "
                "a restart; set PYTHONHASHSEED to one number in all engines"
            )
        with self._lock:
            generation = self._generation
        model = identity.model_digest(self._vllm_config, self._weights, generation)
        shares = identity.shares_of(self._vllm_config, self._groups, self._handshakes, model, root)
        sessions = self._sessions_of(shares, len(root))
        with self._lock:
            if generation == self._generation and not self._stopped.is_set():
                self._shares, self._sessions = tuple(shares), sessions
                return
        for session in sessions:  # another generation began meanwhile
            session.close(0.0)

    def _sessions_of(self, shares: Sequence[identity.Share], hash_bytes: int) -> tuple[Session, ...]:
        """@raises OSError where the system refuses one of them: then there is none"""
        options = self._options
        sessions: list[Session] = []
        try:
            for share in shares:
                sessions.append(
                    Session(
                        options.socket,
                        namespace=share.namespace,
                        payload_bytes=share.payload_bytes,
                        block_tokens=share.group.block_tokens,
                        hash_bytes=hash_bytes,
                        tenant=options.tenant,
                        ttl_seconds=options.ttl_seconds,
                        client="vLLM",
                        arena_folder=options.arena_dir or None,
                        group=options.group or None,
                        on_down=self._poked.set,
                    )
                )
        except BaseException:
            for session in sessions:
                session.close(0.0)
            raise
        return tuple(sessions)

    def _keep_pins(self) -> None:
        self._pins.keep(self._cached)

    def _complain(self, what: str) -> None:
        if what != self._complaint:
            self._complaint = what
            log.warning("kvtier: %s; it is tried again", what)

    def _refuse(self, why: str) -> None:
        if not self.refusal:
            self.refusal = why
            log.warning("kvtier: nothing is loaded or stored in this engine: %s", why)
