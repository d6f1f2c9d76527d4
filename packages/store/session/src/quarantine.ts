/**
 * Slots of sessions whose connection ended while copies may still be under way in the engine's process.
 *
 * Invariant (law 1): a slot that somebody may still be writing is not given to anybody else. It comes back when the
 * process is dead, or when a new session of the same process names the old one: it does so only after its copies ended.
 * Where all processes that copy hold a byte of the arena's lock file, it comes back when that lock has ended, wherever they run.
 * Where the process cannot be seen (another pid namespace) and holds none, it comes back after a time that no copy takes; should one be
 * later still, the checksum of every import and every read from disk stands between it and a wrong block.
 * Bounded by the server, which counts quarantined sessions among its sessions.
 */

import type { Counters, Holdings } from '@kvtier/placement';
import type { Clock, Log } from '@kvtier/runtime';
import { isAlive, isSameProcess, type PeerProcess } from './peer-process.ts';

interface Entry {
  readonly holdings: Holdings;
  readonly peer: PeerProcess;
  /** Whether the engine's processes still hold their lock; null: they have none. */
  readonly isHeld: (() => boolean) | null;
  readonly sinceUs: number;
}

/** Copies take milliseconds. */
const unseenProcessMs = 60_000;

export interface QuarantineOptions {
  readonly clock: Clock;
  readonly log: Log;
  readonly counters: Counters;
  readonly pollMs: number;
}

export class Quarantine {
  readonly #options: QuarantineOptions;
  /** By session id, hexadecimal. */
  readonly #entries = new Map<string, Entry>();
  #cancelPoll: (() => void) | undefined;

  constructor(options: QuarantineOptions) {
    this.#options = options;
  }

  get size(): number {
    return this.#entries.size;
  }

  /** Take over what a disconnected session still holds. */
  add(session: string, holdings: Holdings, peer: PeerProcess, isHeld: (() => boolean) | null = null): void {
    const { clock, log, counters } = this.#options;
    this.#entries.set(session, { holdings, peer, isHeld, sinceUs: clock.nowUs() });
    counters.add('quarantine.sessions');
    log.info({ session, pid: peer.pid, ...holdings.counts }, 'session ended with slots in use: quarantined');
    this.#schedule();
  }

  /** A session of the same process says that the copies of `session` have ended. Returns whether that lifted anything. */
  lift(session: string, by: PeerProcess): boolean {
    const entry = this.#entries.get(session);
    if (entry === undefined || !isSameProcess(entry.peer, by)) return false;
    this.#end(session, entry, 'reattached');
    return true;
  }

  /**
   * Nobody is looked at any more, and no slot comes back: the engines live on, and while the tiers close these still take slots. What
   * is left goes with the arena.
   */
  close(): void {
    this.#entries.clear();
    this.#cancelPoll?.();
    this.#cancelPoll = undefined;
  }

  #schedule(): void {
    if (this.#cancelPoll !== undefined || this.#entries.size === 0) return;
    this.#cancelPoll = this.#options.clock.after(this.#options.pollMs, () => {
      this.#cancelPoll = undefined;
      const unseenSinceUs = this.#options.clock.nowUs() - unseenProcessMs * 1000;
      for (const [session, entry] of this.#entries) {
        if (entry.isHeld !== null) {
          if (!entry.isHeld()) this.#end(session, entry, 'lock_ended');
        } else if (!isAlive(entry.peer)) this.#end(session, entry, 'process_dead');
        else if (entry.peer.pid <= 0 && entry.sinceUs <= unseenSinceUs) this.#end(session, entry, 'process_unseen');
      }
      this.#schedule();
    });
  }

  #end(session: string, entry: Entry, why: string): void {
    this.#entries.delete(session);
    entry.holdings.end();
    this.#options.counters.add(`quarantine.lifted.${why}`);
    this.#options.log.info({ session, pid: entry.peer.pid, why }, 'quarantine lifted');
  }
}
