"""A share is one session: the pages of one pool of this rank. Opened beside serving, as soon as the weights have a digest; until then,
and without a node, there are misses.

Invariants: a share is given only for the pages that were stored since the last flush or clear, unless the operator keeps them. Nobody
waits for other ranks: until they have agreed on a name for what comes after a flush there are misses, and for good where they do not.
"""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvtier.attachment import Attachment
from kvtier.copies import Arena, Copies, Layout
from kvtier.errors import KvError
from kvtier.guard import Troubles
from kvtier.retries import Pauses
from kvtier.session import Session, close_all
from kvtier.sglang import identity
from kvtier.sglang.bases import agreed
from kvtier.sglang.flushes import Flushes, Loading, flushes_of
from kvtier.sglang.options import Options
from kvtier.sglang.identity import pool_facts
from kvtier.sglang.pools import PoolView, Unsupported, anchor, facts_of, view
from kvtier.threads import start
from kvtier.weights import WeightsMissing, weights_digest

log = logging.getLogger("kvtier.sglang")

#: Before each time that the store of the ranks' group is asked: all of the process uses it, and it answers nobody while one waits in it.
_ASK_AFTER_S = (0.0, 1.0, 4.0, 15.0, 60.0)


@dataclass(frozen=True)
class Share:
    name: str
    session: Session
    layout: Layout
    payload_bytes: int
    #: This rank stores; otherwise another one that holds the same does.
    writes: bool
    view: PoolView | None


class Shares:
    def __init__(self, options: Options, storage_config: Any, arguments: Any, version: str | None, troubles: Troubles) -> None:
        self.refusal = ""
        self._copies: Copies | None = None
        self._options = options
        self._storage_config = storage_config
        self._arguments = arguments
        self._version = version
        self._troubles = troubles
        self._lock = threading.Lock()
        self._views: dict[str, PoolView] = {}
        self._memory: dict[str, tuple[Layout, int, dict[str, Any]]] = {}
        self._shares: dict[str, Share] = {}
        self._arenas: dict[int, Arena] = {}
        self._complaints: set[str] = set()
        self._flushes: Flushes | None = None
        #: What the shares are of.
        self._generation = 0
        self._engine: identity.Engine | None = None
        #: What all ranks have agreed on, for as long as this process lives.
        self._together: str | None = None
        self._asking: threading.Thread | None = None
        self._stopped = threading.Event()
        #: The system refused a session: it is tried again.
        self._refused = threading.Event()
        self._kv_pool: Any = None
        refusal = identity.version_refusal(version, options.accept_versions) or identity.refusal(arguments, storage_config, options.keep_on_flush)
        try:
            self._copies = Copies(load_threads=options.copy_threads, store_threads=options.copy_threads)
        except KvError as error:  # no library, or another version's
            refusal = refusal or str(error)
        if refusal:
            self.refuse(refusal)
        else:
            threading.Thread(target=self._digest, name="kvtier-weights", daemon=True).start()

    @property
    def copies(self) -> Copies:
        """There where anything is loaded or stored."""
        if self._copies is None:
            raise KvError("SETUP", self.refusal)
        return self._copies

    def refuse(self, why: str) -> None:
        if not self.refusal:
            self.refusal = why
            log.warning("kvtier: nothing is loaded or stored in this engine: %s", why)

    def complain(self, what: str) -> None:
        """Once for each trouble."""
        if what not in self._complaints and len(self._complaints) < 64:
            self._complaints.add(what)
            log.warning("kvtier: %s", what)

    def register(self, name: str, pool: Any) -> None:
        """A pool of the engine's; one that is not understood gets one line, and misses."""
        if self._copies is None:
            return
        with self._lock:
            if name == "kv":
                self._kv_pool = anchor(pool)
                self._flushes = flushes_of(self._kv_pool, identity.attached_later(self._arguments))
                self._generation = self._flushes.count(self._options.keep_on_flush)
        if (self._flushes is None or not self._flushes.visible) and not self._options.keep_on_flush:
            self.refuse('flushes of this SGLang\'s cache cannot be seen; where weights are never replaced, say "keep_on_flush": true')
        try:
            seen = view(name, pool)
        except Unsupported as error:
            self.complain(f"pages of the pool {name!r} are neither loaded nor stored: {error}")
            return
        with self._lock:
            self._views[name] = seen
            self._memory[name] = (self.copies.layout(seen.parts, seen.pages), seen.page_tokens, pool_facts(seen))
            self._open_locked()

    def add_memory(self, name: str, layout: Layout, page_tokens: int, facts: dict[str, Any]) -> None:
        """Pages in memory of our own, for callers who bring tensors. @raises KvError where nothing is loaded or stored"""
        with self._lock:
            if name not in self._memory:
                self._memory[name] = (layout, page_tokens, facts)
                self._open_locked()

    def page_tokens(self) -> int:
        """Of the engine's pages; 0 before a pool was registered."""
        return int(getattr(self._kv_pool, "page_size", 0) or 0)

    def page_facts(self) -> dict[str, Any]:
        """Of flat pages: what the pool that they come from says of itself, so far as it says anything."""
        return {"of": facts_of(self._kv_pool)}

    @property
    def attached(self) -> bool:
        """Each session has a node that answers, and nothing of ours has given up."""
        shares = list(self._shares.values())
        attachments = [one.session.attachment for one in shares]
        usable = all(one is not None and one.usable for one in attachments)
        return 0 < len(shares) == len(self._memory) and usable and not self.refusal and not self._troubles.stopped

    def share(self, name: str) -> Share | None:
        """None: misses."""
        if self.refusal or self._troubles.stopped:
            return None
        flushes, kept = self._flushes, self._options.keep_on_flush
        if flushes is not None:
            if not kept and not flushes.seen():
                self.refuse('a flush of SGLang\'s cache was not counted; where weights are never replaced, say "keep_on_flush": true')
                return None
            if flushes.count(kept) != self._generation:
                self._renew(flushes)
        return self._shares.get(name)

    def loading(self) -> Loading | None:
        """Of pages that SGLang has just given out; None: no pool of it is known."""
        return Loading(self._flushes) if self._flushes is not None else None

    def arena(self, attachment: Attachment) -> Arena:
        """Mapped; it stays so as long as copies use it. @raises KvError"""
        ref = attachment.arena
        with self._lock:
            found = self._arenas.get(ref.id)
            if found is not None:
                return found
        self._let_go(ref.id)
        with self._lock:
            found = self._arenas.get(ref.id)
            if found is None:
                found = self._arenas[ref.id] = self.copies.map(ref)
        if not attachment.alive:  # it ended meanwhile, and nobody comes back for it
            self._let_go()
            raise KvError("DISCONNECTED", "the cache node has ended", retry=True)
        return found

    def _let_go(self, coming: int = 0) -> None:
        """Arenas that no session has any more: the next node may have no room for its own beside them. `coming`: one that is to stay."""
        with self._lock:
            arenas = [one.session.arena for one in self._shares.values()]
            live = {one.id for one in arenas if one is not None} | {coming}
            gone = [self._arenas.pop(number) for number in list(self._arenas) if number not in live]
        for arena in gone:
            arena.close()

    def _ended(self) -> None:
        """Of a session, on its thread."""
        try:
            self._let_go()
        except Exception as error:
            self._troubles.note("an arena that has gone", error)

    def renew(self) -> None:
        """Nothing that was stored before is loaded by this engine any more."""
        flushes = self._flushes
        if flushes is not None:
            flushes.add()
            self._renew(flushes)

    def _renew(self, flushes: Flushes) -> None:
        with self._lock:
            count = flushes.count(self._options.keep_on_flush)
            if count == self._generation:
                return  # another thread saw it, too
            self._generation = count
            old, self._shares = list(self._shares.values()), {}
            for one in old:
                one.session.close(0.0)
            self._open_locked()

    def close(self) -> None:
        self._stopped.set()
        self._refused.set()
        with self._lock:
            shares, self._shares = list(self._shares.values()), {}
            self._memory = {}
            self._arenas = {}
        close_all((one.session for one in shares), 0.2)
        if self._copies is not None:
            self._copies.close(1.0)

    def _digest(self) -> None:
        pauses = Pauses()
        while not self._digested():
            if self._stopped.wait(pauses.take()):
                return
        pauses.reset()
        while not self.refusal:
            self._refused.wait()
            self._refused.clear()
            if self._stopped.wait(pauses.take()):
                return
            try:
                with self._lock:
                    self._open_locked()
            except Exception as error:
                self._troubles.note("a session that was refused", error)
            if not self._refused.is_set():
                pauses.reset()

    def _digested(self) -> bool:
        """False: a file system does not answer now, or the system has no more descriptors; it is tried again."""
        options, arguments = self._options, self._arguments
        try:
            if options.weights_digest:
                weights = bytes.fromhex(options.weights_digest)
            else:
                cache = Path(options.weights_cache) if options.weights_cache else None
                models = identity.folders(arguments)
                weights = weights_digest(models, cache, self._stopped, beside=identity.beside(arguments, models))
            engine = identity.engine_of(self._storage_config, arguments, weights, self._version)
            with self._lock:
                self._engine = engine
                self._open_locked()
        except (Unsupported, WeightsMissing) as error:
            if not self._stopped.is_set():
                self.refuse(str(error))
        except OSError as error:
            self._complain_of(error)
            return False
        except Exception as error:
            self._troubles.note("the digest of the weights", error)
            self.refuse("the model's weights have no digest")
        return True

    def _generation_name(self, engine: identity.Engine) -> bytes | None:
        """None: it has none, or none yet, that all of its ranks, and nobody else, would have."""
        flushes = self._flushes
        if flushes is None or self._generation == 0:
            return b""
        together = identity.flushed_together(engine, self._arguments, flushes.name, self._agreed)
        return None if together is None else identity.generation_name(self._generation, self._options.keep_on_flush, together)

    def _agreed(self, own: str) -> str | None:
        """None: they are asked, beside the lock that this is under."""
        if self._together is None and self._asking is None:
            asking = threading.Thread(target=self._ask, args=(own,), name="kvtier-ranks", daemon=True)
            start(asking)
            self._asking = asking
        return self._together

    def _ask(self, own: str) -> None:
        try:
            for pause in _ASK_AFTER_S:
                if self._stopped.wait(pause):
                    return
                together = agreed(own)
                if together is not None:
                    with self._lock:
                        self._together = together
                        self._open_locked()
                    return
                self.complain("its cache was flushed, and its ranks have not agreed yet on a name for that; they are asked again")
        except Exception as error:
            self._troubles.note("the name of a flush", error)
        self.refuse("its cache was flushed, and its ranks cannot agree on a name for that")

    def _complain_of(self, error: OSError) -> None:
        self.complain(f"the system refused what a session needs ({error}); it is tried again")

    def _open_locked(self) -> None:
        """Beside the engine's calls, which this is called in: where the system refuses a session, the thread of the digest comes back to it."""
        try:
            self._open_missing_locked()
        except OSError as error:
            self._complain_of(error)
            self._refused.set()

    def _open_missing_locked(self) -> None:
        """@raises OSError"""
        engine = self._engine
        if engine is None or self._stopped.is_set():
            return
        options = self._options
        generation = self._generation_name(engine)
        if generation is None:
            if self._asking is None:
                self.refuse("its cache was flushed, and not all of its replicas may have been")
            return
        for name, (layout, page_tokens, facts) in self._memory.items():
            if name in self._shares:
                continue
            pool = name.partition("/")[0]
            session = Session(
                options.socket,
                namespace=identity.namespace(engine, pool, page_tokens, layout.payload_bytes, facts, generation),
                payload_bytes=layout.payload_bytes,
                block_tokens=page_tokens,
                tenant=options.tenant,
                ttl_seconds=options.ttl_seconds,
                client="SGLang",
                arena_folder=options.arena_dir or None,
                group=options.group or None,
                on_down=self._ended,
            )
            writes = identity.writes(engine, pool, facts)
            self._shares[name] = Share(name, session, layout, layout.payload_bytes, writes, self._views.get(name))
