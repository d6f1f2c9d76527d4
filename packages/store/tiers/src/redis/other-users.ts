/**
 * Does anybody but KV-cache nodes use a Redis server now? Its own count of commands by name tells, two looks at it compared. Commands
 * that nodes send, in scripts or without, tell nothing: whose they are is not said. Invariant: what was not seen lately is no
 * knowledge, and without knowledge there are others.
 */
import { KvError } from '@kvtier/errors';

/** What nodes send, as docs/operating.md lists it, and what connections and monitors say of themselves. */
const ownCommands: ReadonlySet<string> = new Set(
  `ping auth hello select info asking readonly client script evalsha eval type exists time getrange set mset del unlink
  rename pexpireat scan hscan hget hmget hset hdel hlen hincrby zadd zrem zcard zmscore zrange zrangebyscore xadd xrange cluster
  hkeys keys copy strlen zincrby setrange command config slowlog latency memory replconf psync role quit reset`.split(
    /\s+/,
  ),
);
/** As many a second and somebody is there. Fewer may wait for some large pieces. */
const callsPerSecond = 50;
/** Fewer calls could be chance. */
const shortestLookMs = 20;
/** A look is believed for so long, and who was seen is there for so long. */
const believedMs = 500;
const stayMs = 300;
/** Between two looks. */
const pauseMs = { known: 100, unknown: 25 };

/** Calls of commands that are not a node's, by INFO commandstats. */
export function foreignCalls(stats: string): number {
  let calls = 0;
  for (const [, name, count] of stats.matchAll(/^cmdstat_([^:\s]{1,64}):calls=(\d{1,15}),/gm)) {
    if (!ownCommands.has(name!.split('|', 1)[0]!.toLowerCase())) calls += Number(count);
  }
  if (!Number.isSafeInteger(calls))
    throw new KvError('PROTOCOL', 'redis: INFO commandstats counts more than there can be');
  return calls;
}

export class OtherUsers {
  #last: { readonly calls: number; readonly ms: number } | undefined;
  /** When it was last known whether somebody is there, and when somebody was. */
  #knownMs = Number.NEGATIVE_INFINITY;
  #seenMs = Number.NEGATIVE_INFINITY;

  /** So many foreign calls so far. */
  note(calls: number, nowMs: number): void {
    const last = this.#last;
    if (last !== undefined && calls >= last.calls) {
      const tookMs = nowMs - last.ms;
      if (tookMs < shortestLookMs) return;
      const isAnybody = (calls - last.calls) * 1_000 >= callsPerSecond * tookMs;
      // Who came within a long time may have gone long ago.
      if (!isAnybody || tookMs <= believedMs) this.#knownMs = nowMs;
      if (isAnybody && tookMs <= believedMs) this.#seenMs = nowMs;
    }
    // Fewer than before: counted anew, by a server that began anew.
    this.#last = { calls, ms: nowMs };
  }

  isKnown(nowMs: number): boolean {
    return nowMs - this.#knownMs <= believedMs;
  }

  areHere(nowMs: number): boolean {
    return !this.isKnown(nowMs) || nowMs - this.#seenMs < stayMs;
  }
}

/** Looks while it is told to, one look at a time. */
export class OthersWatch {
  readonly #count: () => Promise<number>;
  readonly #onChange: (areHere: boolean) => void;
  readonly #others = new OtherUsers();
  #told = true;
  #isOn = false;
  #isLooking = false;
  #timer: NodeJS.Timeout | undefined;

  /** `count`: foreign calls so far; ends by itself, well or not. `onChange`: at first there are others. */
  constructor(count: () => Promise<number>, onChange: (areHere: boolean) => void) {
    this.#count = count;
    this.#onChange = onChange;
  }

  start(): void {
    if (this.#isOn) return;
    this.#isOn = true;
    this.#tell();
    if (!this.#isLooking) void this.#look();
  }

  stop(): void {
    this.#isOn = false;
    clearTimeout(this.#timer);
  }

  async #look(): Promise<void> {
    this.#isLooking = true;
    try {
      this.#others.note(await this.#count(), performance.now());
    } catch {
      // Nothing is known then, which is what areHere will say.
    }
    this.#isLooking = false;
    if (!this.#isOn) return;
    this.#tell();
    const isKnown = this.#others.isKnown(performance.now());
    this.#timer = setTimeout(() => void this.#look(), isKnown ? pauseMs.known : pauseMs.unknown);
  }

  #tell(): void {
    const areHere = this.#others.areHere(performance.now());
    if (areHere === this.#told) return;
    this.#told = areHere;
    this.#onChange(areHere);
  }
}
