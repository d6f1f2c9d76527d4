/**
 * What the node holds of each waiting request: asked once, off the scheduler's path, and remembered for a while.
 *
 * Invariants: `match` never waits; a lookup that is not answered within its deadline means "nothing held"; `onWake`
 * fires whenever a pending match became known. At most `maxEntries` requests are remembered.
 */
import { KvError } from '@kvtier/errors';
import { maxHashesPerFrame } from '@kvtier/wire';
import type { Match } from './connector.ts';
import { type ConnectorCounters, count } from './counters.ts';
import type { Hit, LoadPlanner, Plan } from './planner.ts';
import type { Session } from './session-client.ts';
import type { Timers } from './timers.ts';

export interface MatchOptions {
  readonly hashBytes: number;
  /** undefined: as the planner says. */
  readonly lookupDeadlineMs: number | undefined;
  readonly planner: LoadPlanner;
  readonly timers: Timers;
  readonly counters: ConnectorCounters;
  readonly onWake: () => void;
}

interface Entry {
  /** Block of the chain that the lookup began with. */
  readonly first: number;
  /** undefined while the node has not answered. */
  hit: Hit | undefined;
  /** What to load beyond `localBlocks`, as planned for that number. */
  plan: (Plan & { readonly localBlocks: number; readonly fromArena: boolean }) | undefined;
  knownAtMs: number;
}

const nothing: Match = { state: 'known', blocks: 0 };
const pending: Match = { state: 'pending' };
const maxEntries = 16_384;
/** What was known longer ago than this is asked again: the node's contents change. */
const staleAfterMs = 5_000;

export class MatchTable {
  readonly #options: MatchOptions;
  readonly #entries = new Map<string, Entry>();

  constructor(options: MatchOptions) {
    this.#options = options;
  }

  get size(): number {
    return this.#entries.size;
  }

  match(session: Session | null, requestId: string, hashes: Buffer, localBlocks: number): Match {
    const { hashBytes, timers } = this.#options;
    if (localBlocks * hashBytes >= hashes.length) return nothing;
    let entry = this.#entries.get(requestId);
    const stale =
      entry?.hit !== undefined && (localBlocks < entry.first || timers.nowMs() - entry.knownAtMs > staleAfterMs);
    if (entry === undefined || stale) {
      if (session === null) return nothing;
      if (entry === undefined && this.#entries.size >= maxEntries) {
        count(this.#options.counters, 'lookup', 'too many requests');
        return nothing;
      }
      entry = { first: localBlocks, hit: undefined, plan: undefined, knownAtMs: 0 };
      this.#entries.set(requestId, entry);
      const end = (localBlocks + maxHashesPerFrame) * hashBytes;
      this.#lookUp(session, requestId, entry, hashes.subarray(localBlocks * hashBytes, end));
    }
    if (entry.hit === undefined) return pending;
    if (entry.plan?.localBlocks !== localBlocks) this.#plan(entry, localBlocks);
    return { state: 'known', blocks: entry.plan!.blocks };
  }

  /** How long the planned load was predicted to take; undefined when that says nothing about the node's estimates. */
  predictedUs(requestId: string, firstBlock: number, blocks: number): number | undefined {
    const plan = this.#entries.get(requestId)?.plan;
    if (plan === undefined || plan.fromArena || plan.localBlocks !== firstBlock) return undefined;
    return plan.blocks === blocks && plan.loadUs > 0 ? plan.loadUs : undefined;
  }

  /** After a load: blocks up to `end` (in the chain) turned out to be there, and no more. */
  settle(requestId: string, end: number, complete: boolean): void {
    const entry = this.#entries.get(requestId);
    if (entry?.hit === undefined) return;
    // All came: should the request lose its blocks (preemption), it asks anew. Not all came: do not try the same again.
    if (complete) this.#entries.delete(requestId);
    else this.#know(entry, cutSpans(entry.hit, 0, Math.max(0, end - entry.first)));
  }

  forget(requestId: string): void {
    this.#entries.delete(requestId);
  }

  #lookUp(session: Session, requestId: string, entry: Entry, hashes: Buffer): void {
    const { counters, timers, planner, hashBytes, onWake } = this.#options;
    const deadlineMs = this.#options.lookupDeadlineMs ?? planner.lookupDeadlineMs(hashes.length / hashBytes);
    const askedAtMs = timers.nowMs();
    counters.lookups++;
    const known = (hit: Hit): void => {
      if (this.#entries.get(requestId) !== entry) return; // forgotten meanwhile
      this.#know(entry, hit);
      onWake();
    };
    session.link.call({ $case: 'lookup', value: { hashes } }, 'lookup', deadlineMs).then(
      (answer) => {
        planner.observeRoundTrip((timers.nowMs() - askedAtMs) * 1_000);
        const hit = { spans: answer.spans, estimatedUs: answer.estimatedUs };
        const held = heldOf(hit);
        if (held !== answer.held || held * hashBytes > hashes.length) {
          session.link.end(new KvError('PROTOCOL', `${answer.held} blocks held in spans of ${held} blocks`));
          return known({ spans: [], estimatedUs: 0 });
        }
        counters.heldBlocks += held;
        known(hit);
      },
      (error: unknown) => {
        count(counters, 'lookup', KvError.from(error).code.toLowerCase());
        known({ spans: [], estimatedUs: 0 });
      },
    );
  }

  #know(entry: Entry, hit: Hit): void {
    entry.hit = hit;
    entry.plan = undefined;
    entry.knownAtMs = this.#options.timers.nowMs();
  }

  #plan(entry: Entry, localBlocks: number): void {
    const { planner, timers, counters } = this.#options;
    const beyond = cutSpans(entry.hit!, localBlocks - entry.first, Number.POSITIVE_INFINITY);
    const plan = planner.plan(beyond, timers.nowMs());
    if (entry.plan === undefined) {
      counters.plannedBlocks += plan.blocks;
      const left = heldOf(beyond) - plan.blocks;
      if (left > 0) count(counters, 'lookup', 'slower than computing', left);
    }
    const fromArena = cutSpans(beyond, 0, plan.blocks).spans.every(({ tier }) => tier === 'arena');
    entry.plan = { ...plan, localBlocks, fromArena };
  }
}

const heldOf = (hit: Hit): number => hit.spans.reduce((sum, span) => sum + span.count, 0);

/** The part of a hit between blocks `from` and `to`; its estimate shrinks with the blocks that are not in the arena. */
export function cutSpans(hit: Hit, from: number, to: number): Hit {
  const away = (spans: Hit['spans']): number => spans.reduce((sum, s) => sum + (s.tier === 'arena' ? 0 : s.count), 0);
  let at = 0;
  const spans = hit.spans.flatMap(({ tier, count }) => {
    const start = Math.max(at, from);
    at += count;
    const left = Math.min(at, to) - start;
    return left > 0 ? [{ tier, count: left }] : [];
  });
  const whole = away(hit.spans);
  return { spans, estimatedUs: whole === 0 ? 0 : (hit.estimatedUs * away(spans)) / whole };
}
