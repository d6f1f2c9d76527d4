/**
 * What the node holds of each waiting request: asked once, off the scheduler's path, and remembered for a while. Then it is asked
 * anew, and what was known goes on answering: who waits long for room would else be without an answer just when it has its turn. While it
 * waits it is asked anew, too (`renew`): a minute later the node may hold all of it, or nothing.
 *
 * Invariants: `match` never waits; a lookup that is not answered within its deadline means "nothing held", or what was known before; `onWake`
 * fires whenever a pending match became known. At most `maxEntries` requests are remembered.
 */
import { KvError } from '@kvtier/errors';
import type { Hit, LoadChoice, LoadPlanner, Plan } from '@kvtier/load-planner';
import type { ByTier, Match } from '@kvtier/scheduler';
import { type HeldBlocks, maxHashesPerFrame } from '@kvtier/wire';
import { type ConnectorCounters, count } from './counters.ts';
import { commonPrefixes } from './groups.ts';
import type { Session } from './session-client.ts';
import type { Timers } from './timers.ts';

export interface MatchOptions {
  /** Per attention group, the blocks that a prefix needs before its end; Infinity: all. */
  readonly windows: readonly number[];
  readonly hashBytes: number;
  /** undefined: as the planner says. */
  readonly lookupDeadlineMs: number | undefined;
  readonly planner: LoadPlanner;
  readonly timers: Timers;
  readonly counters: ConnectorCounters;
  readonly onWake: () => void;
  readonly onPassed?: ((byTier: ByTier, us: number) => void) | undefined;
}

interface Entry {
  /** Block of the chain that the lookup began with. */
  readonly first: number;
  /** Per attention group, with gaps where its window is finite; undefined while the node has not answered. */
  hits: readonly Hit[] | undefined;
  /** What to load beyond `localBlocks`, as planned for that number. */
  plan: (Plan & { readonly localBlocks: number; readonly isIdle: boolean }) | undefined;
  knownAtMs: number;
  /** Asked anew, because this one is old: takes its place when it is known. */
  next: Entry | undefined;
  /** The request's: its next entries have it, too. */
  readonly counted: Counted;
}

/** What of a request is in the counters: however often it is asked for, its blocks count once. */
interface Counted {
  held: number;
  planned: number;
  left: number;
  isPassed: boolean;
}

const nothing: Match = { state: 'known', blocks: 0 };
const pending: Match = { state: 'pending' };
const maxEntries = 16_384;
/** Of what the table of held blocks says: a tier but the peers may hold it. */
const isNear = 1;
/** The same: the arena may. */
const inArena = 4;
/** A quarter of a millisecond of the engine's loop: a longer hit is asked for, which takes no longer than to read it. */
const mostInArena = 2_048;
/** Of a hit beyond so many blocks, each `arenaStep`th is looked at, and the last: a look takes up to a microsecond. */
const mostInEach = 128;
const arenaStep = 8;
/** Blocks of a chain that are looked at there, beside the first. */
const looks = 4;
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

  match(
    sessions: readonly Session[] | null,
    requestId: string,
    hashes: Buffer,
    localBlocks: number,
    isIdle = false,
  ): Match {
    if (localBlocks * this.#options.hashBytes >= hashes.length) return nothing;
    let entry = this.#entries.get(requestId);
    const isBehind = entry?.hits !== undefined && localBlocks < entry.first;
    if (entry === undefined || isBehind || this.#isOld(entry)) {
      if (sessions === null) return nothing;
      if (entry === undefined && this.#entries.size >= maxEntries) {
        count(this.#options.counters, 'lookup', 'too many requests');
        return nothing;
      }
      if (entry === undefined || isBehind || entry.next === undefined)
        entry = this.#ask(sessions, requestId, hashes, localBlocks, isIdle, entry, isBehind);
    }
    if (entry.hits === undefined) return pending;
    if (entry.plan?.localBlocks !== localBlocks || entry.plan.isIdle !== isIdle) this.#plan(entry, localBlocks, isIdle);
    const { head, blocks } = entry.plan!;
    return head > 0 ? { state: 'known', blocks, head } : { state: 'known', blocks };
  }

  /** The same as was asked before, where that is old. Nothing is planned: its turn may be far, and probes are for plans that are carried out. */
  renew(sessions: readonly Session[] | null, requestId: string, hashes: Buffer): void {
    const entry = this.#entries.get(requestId);
    if (sessions === null || entry === undefined || entry.next !== undefined || !this.#isOld(entry)) return;
    // What only peers hold, and would be slower, is asked for as seldom as the planner says, which learns by plans alone: left to its turn.
    const held = this.#tableOf(sessions);
    const wanted = this.#wanted(hashes, entry.first);
    const { planner, hashBytes } = this.#options;
    const isByPeers = held && this.#looked(() => this.#holders(held, wanted)) === 'peers';
    if (isByPeers && planner.isClearlySlower(wanted.length / hashBytes, entry.first)) return;
    this.#ask(sessions, requestId, hashes, entry.first, false, entry, false);
  }

  #isOld({ hits, knownAtMs }: Entry): boolean {
    return hits !== undefined && this.#options.timers.nowMs() - knownAtMs > staleAfterMs;
  }

  /** A new entry, or `before`, which answers until that is known. */
  #ask(
    sessions: readonly Session[],
    requestId: string,
    hashes: Buffer,
    localBlocks: number,
    isIdle: boolean,
    before: Entry | undefined,
    isBehind: boolean,
  ): Entry {
    const counted = before?.counted ?? { held: 0, planned: 0, left: 0, isPassed: false };
    const blank = { hits: undefined, plan: undefined, knownAtMs: 0, next: undefined };
    const entry: Entry = { first: localBlocks, ...blank, counted };
    const wanted = this.#wanted(hashes, localBlocks);
    const hit = this.#read(sessions, wanted, localBlocks, isIdle, counted);
    if (hit !== undefined) this.#know(entry, [hit]);
    if (before !== undefined && !isBehind && hit === undefined) before.next = entry;
    else this.#entries.set(requestId, entry);
    if (hit === undefined) this.#lookUp(sessions, requestId, entry, wanted);
    return this.#entries.get(requestId)!;
  }

  #wanted(hashes: Buffer, first: number): Buffer {
    const { hashBytes } = this.#options;
    return hashes.subarray(first * hashBytes, (first + maxHashesPerFrame) * hashBytes);
  }

  /** The plan of this load; undefined when how long it takes says nothing about the node's estimates. */
  planned(requestId: string, firstBlock: number, blocks: number): Plan | undefined {
    const plan = this.#entries.get(requestId)?.plan;
    if (plan === undefined || plan.away.blocks === 0 || plan.localBlocks + plan.head !== firstBlock) return undefined;
    return plan.blocks === blocks && plan.loadUs > 0 ? plan : undefined;
  }

  /** After a load: per group, blocks up to `ends` (in the chain) turned out to be there, and no more; undefined: all. */
  settle(requestId: string, ends: readonly (number | undefined)[], complete: boolean): void {
    const entry = this.#entries.get(requestId);
    if (entry?.hits === undefined) return;
    // All came: should the request lose its blocks (preemption), it asks anew. Not all came: do not try the same again.
    // Nor by an answer from before.
    entry.next = undefined;
    if (complete) this.#entries.delete(requestId);
    else
      this.#know(
        entry,
        entry.hits.map((hit, group) => {
          const end = ends[group];
          return end === undefined ? hit : cutSpans(hit, 0, Math.max(0, end - entry.first));
        }),
      );
  }

  forget(requestId: string): void {
    this.#entries.delete(requestId);
  }

  /** What the table of held blocks says of this without the node being asked; undefined: it is asked. Never throws. */
  #read(
    sessions: readonly Session[],
    hashes: Buffer,
    first: number,
    isIdle: boolean,
    counted: Counted,
  ): Hit | undefined {
    const held = this.#tableOf(sessions);
    return held && this.#looked(() => this.#told(held, hashes, first, isIdle, counted));
  }

  /** undefined: none, or none that tells anything of such a model. */
  #tableOf(sessions: readonly Session[]): HeldBlocks | undefined {
    const { windows } = this.#options;
    if (windows.length > 1 || windows[0] !== Number.POSITIVE_INFINITY) return undefined;
    return sessions[0]!.held ?? undefined;
  }

  /** undefined also where the table cannot be read. */
  #looked<T>(look: () => T): T | undefined {
    try {
      return look();
    } catch {
      count(this.#options.counters, 'lookup', 'table');
      return undefined;
    }
  }

  #told(held: HeldBlocks, hashes: Buffer, first: number, isIdle: boolean, counted: Counted): Hit | undefined {
    const { counters } = this.#options;
    const count = this.#inArena(held, hashes);
    if (count !== undefined && count > 0) {
      counters.unaskedHits++;
      this.#countHeld(counted, count);
      return { spans: [{ tier: 'arena', count }], estimatedUs: 0 };
    }
    if (!this.#isInVain(held, hashes, first, isIdle)) return undefined;
    counters.unasked++;
    return noHit;
  }

  #countHeld(counted: Counted, blocks: number): void {
    this.#options.counters.heldBlocks += Math.max(0, blocks - counted.held);
    counted.held = Math.max(blocks, counted.held);
  }

  /**
   * So many blocks of this lie in the arena, and no more of it is held; undefined: it is not told. A byte may say too much, and of a long
   * hit not all are looked at: what another tier holds of it the load brings from there, and where nobody does it comes short.
   */
  #inArena(held: HeldBlocks, hashes: Buffer): number | undefined {
    const { hashBytes } = this.#options;
    const blocks = hashes.length / hashBytes;
    const first = held.flags(hashes, 0);
    if (first === 0) return 0;
    if (first === undefined || (first & inArena) === 0) return undefined;
    if (blocks > mostInArena && held.flags(hashes, mostInArena * hashBytes) !== 0) return undefined;
    const end = Math.min(blocks, mostInArena);
    const step = end > mostInEach ? arenaStep : 1;
    const flags = held.flagsOfAll(hashes, step * hashBytes, Math.ceil(end / step));
    if (flags === undefined) return undefined;
    for (let look = 0; look < flags.length; look++) {
      if (flags[look] === 0) return this.#endInArena(held, hashes, (look - 1) * step + 1, look * step);
      if ((flags[look]! & inArena) === 0) return undefined;
    }
    const last = held.flags(hashes, (end - 1) * hashBytes);
    if (last === 0) return this.#endInArena(held, hashes, (flags.length - 1) * step + 1, end - 1);
    return last === undefined || (last & inArena) === 0 ? undefined : end;
  }

  /** The first block that is held nowhere, of `from` to `end`, of which the last is; undefined: another tier holds one before it. */
  #endInArena(held: HeldBlocks, hashes: Buffer, from: number, end: number): number | undefined {
    const { hashBytes } = this.#options;
    for (let block = from; block < end; block++) {
      const flags = held.flags(hashes, block * hashBytes);
      if (flags === 0) return block;
      if (flags === undefined || (flags & inArena) === 0) return undefined;
    }
    return end;
  }

  /** Nobody holds anything of this, or only peers do, and are slower than computing. What may lie in another tier is always asked for. */
  #isInVain(held: HeldBlocks, hashes: Buffer, first: number, isIdle: boolean): boolean {
    const { hashBytes, planner, timers } = this.#options;
    const holders = this.#holders(held, hashes);
    if (holders !== 'peers') return holders === 'nobody';
    return !planner.isWorthAsking(hashes.length / hashBytes, first, timers.nowMs(), isIdle);
  }

  /** 'others': another tier may hold some. A few blocks of the chain are looked at, for the first ones may have left it. */
  #holders(held: HeldBlocks, hashes: Buffer): 'nobody' | 'peers' | 'others' {
    const { hashBytes } = this.#options;
    const blocks = hashes.length / hashBytes;
    const flags = held.flags(hashes, 0);
    if (flags === undefined || (flags & isNear) !== 0) return 'others';
    if (flags === 0) return 'nobody';
    for (let part = 1; part <= looks; part++) {
      const at = Math.floor(((blocks - 1) * part) / looks);
      if (((held.flags(hashes, at * hashBytes) ?? isNear) & isNear) !== 0) return 'others';
    }
    return 'peers';
  }

  #lookUp(sessions: readonly Session[], requestId: string, entry: Entry, hashes: Buffer): void {
    const { counters, timers, planner, hashBytes, onWake, windows } = this.#options;
    const deadlineMs = this.#options.lookupDeadlineMs ?? planner.lookupDeadlineMs(hashes.length / hashBytes);
    const askedAtMs = timers.nowMs();
    counters.lookups++;
    const known = (hits: readonly Hit[]): void => {
      const current = this.#entries.get(requestId);
      if (current === undefined || (current !== entry && current.next !== entry)) return; // forgotten meanwhile
      this.#entries.set(requestId, entry);
      this.#know(entry, hits);
      onWake();
    };
    const asked = sessions.map(async (session, group): Promise<Hit> => {
      const gaps = windows[group] !== Number.POSITIVE_INFINITY;
      const value = gaps ? { hashes, gaps } : { hashes };
      const answer = await session.link.call({ $case: 'lookup', value }, 'lookup', deadlineMs);
      const nowMs = timers.nowMs();
      planner.observeRoundTrip((nowMs - askedAtMs) * 1_000, nowMs);
      const hit = { spans: answer.spans, estimatedUs: answer.estimatedUs };
      const held = heldOf(hit);
      const blocks = hit.spans.reduce((sum, span) => sum + span.count, 0);
      if (held === answer.held && blocks * hashBytes <= hashes.length && (gaps || held === blocks)) return hit;
      session.link.end(new KvError('PROTOCOL', `${answer.held} blocks held in spans of ${held} blocks`));
      return noHit;
    });
    Promise.all(asked).then(
      (hits) => {
        this.#countHeld(entry.counted, this.#choices(hits, 0).at(-1)?.blocks ?? 0);
        known(hits);
      },
      (error: unknown) => {
        count(counters, 'lookup', KvError.from(error).code.toLowerCase());
        const current = this.#entries.get(requestId);
        if (current?.next !== entry) {
          known(sessions.map(() => noHit));
          return;
        }
        // Who is silent says nothing of what it holds: what was known goes on answering, and is asked anew when it is old again.
        current.next = undefined;
        current.knownAtMs = timers.nowMs();
      },
    );
  }

  /** What could be loaded beyond the first `from` blocks of the hits, shortest first. */
  #choices(hits: readonly Hit[], from: number): LoadChoice[] {
    const { windows } = this.#options;
    if (windows.length > 1 || windows[0] !== Number.POSITIVE_INFINITY) return commonPrefixes(hits, windows, from);
    const blocks = heldOf(hits[0]!) - from;
    return blocks > 0 ? [{ blocks, copies: blocks, bringUs: 0 }] : [];
  }

  #know(entry: Entry, hits: readonly Hit[]): void {
    entry.hits = hits;
    entry.plan = undefined;
    entry.knownAtMs = this.#options.timers.nowMs();
  }

  #plan(entry: Entry, localBlocks: number, isIdle: boolean): void {
    const { planner, timers, windows } = this.#options;
    const from = localBlocks - entry.first;
    const hits = entry.hits!;
    const choices = this.#choices(hits, from);
    const isWhole = windows.length === 1 && windows[0] === Number.POSITIVE_INFINITY;
    const plan = isWhole
      ? planner.plan(cutSpans(hits[0]!, from, Number.POSITIVE_INFINITY), timers.nowMs(), localBlocks, isIdle)
      : planner.planAmong(choices, timers.nowMs(), localBlocks);
    if (entry.plan === undefined) this.#countPlan(entry.counted, plan, choices.at(-1)?.blocks ?? 0);
    entry.plan = { ...plan, localBlocks, isIdle };
  }

  /** `held`: blocks that could have been planned. */
  #countPlan(counted: Counted, plan: Plan, held: number): void {
    const { counters } = this.#options;
    counters.plannedBlocks += Math.max(0, plan.blocks - counted.planned);
    counted.planned = Math.max(plan.blocks, counted.planned);
    const left = held - plan.head - plan.blocks;
    if (left > counted.left) {
      const more = left - counted.left;
      count(counters, 'lookup', plan.isProbe ? 'computed to learn its time' : 'slower than computing', more);
      counted.left = left;
    }
    if (!plan.passed || counted.isPassed) return;
    counted.isPassed = true;
    this.#options.onPassed?.(plan.passed.byTier, plan.passed.us);
  }
}

const noHit: Hit = { spans: [], estimatedUs: 0 };

/** Gaps do not count. */
const heldOf = (hit: Hit): number => hit.spans.reduce((sum, span) => sum + (span.tier === '' ? 0 : span.count), 0);

/** The part of a hit between blocks `from` and `to`; its estimate shrinks with the blocks that are not in the arena. */
export function cutSpans(hit: Hit, from: number, to: number): Hit {
  const isAway = (tier: string): boolean => tier !== 'arena' && tier !== '';
  const away = (spans: Hit['spans']): number => spans.reduce((sum, s) => sum + (isAway(s.tier) ? s.count : 0), 0);
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
