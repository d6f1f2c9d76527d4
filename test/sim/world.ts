/**
 * Virtual time and the list of everything that is going to happen: one entry for each timer, each completion of a device and each
 * message of a network. One seed decides them all, so that a run can be had again, event by event.
 *
 *     step: take the earliest entry ──▶ its time is now ──▶ run it as its owner ──▶ let promises settle ──▶ (checks)
 *
 * Invariants: nothing happens outside of the list, so that no two things happen at once; whoever dies (a `Life`) takes its own
 * entries along, and none of its code runs any more. Idea: deterministic simulation (FoundationDB's, TigerBeetle's).
 */
import { native } from '@kvtier/data-plane';
import { seededRandom } from '@kvtier/tiers/testing';

/** One life of a node, or of a server: owns the entries that its code makes. */
export interface Life {
  readonly name: string;
  alive: boolean;
}

export interface Entry {
  readonly atUs: number;
  readonly order: number;
  readonly what: string;
  readonly owner: Life;
  fn: (() => void) | undefined;
}

/** A law was broken: what the world found, and where in the run. */
export class Violation extends Error {}

/** Of the event loop, until something else gets its turn; in CPU time of this thread, so that a busy machine makes none longer. */
const maxTurnMs = 50;

const realSetImmediate = setImmediate;
/** A turn of a node that was too long: by the time that this machine took, which is another one each time. */
export class LongTurn extends Violation {}

/** Immediates that one turn of the event loop runs: a turn of its own for each step costs more than most steps do. */
const perTurn = 16;
const waiting: (() => void)[] = [];
let ahead = 0;
function look(): void {
  ahead = perTurn;
  for (let i = 0; i < perTurn; i++) realSetImmediate(goOn);
}
function goOn(): void {
  ahead--;
  waiting.shift()?.();
  if (ahead === 0 && waiting.length > 0) look();
}
/** Promises and microtasks run until nothing is left of them, as they do between any two immediates. */
const settled = (): Promise<void> =>
  new Promise((resolve) => {
    waiting.push(resolve);
    if (ahead === 0) look();
  });

export class World {
  readonly seed: number;
  readonly random: () => number;
  readonly servers: Life = { name: 'world', alive: true };
  /** Whose code runs now. */
  life: Life = this.servers;
  nowUs = 1_000_000;
  /** The wall clock of the nodes, which somebody may set; that of the servers is another. */
  readonly startMs = Date.UTC(2026, 0, 1);
  wallStepMs = 0;
  steps = 0;
  /** Of a node's event loop, in CPU time. */
  longestTurnMs = 0;
  /** A fingerprint of all that has happened so far. */
  digest = 0;
  /** What happened, and when: the last ones of it. */
  #said: { readonly step: number; readonly atMs: number; readonly line: string }[] = [];
  readonly #keep: number;
  #heap: Entry[] = [];
  #order = 0;

  /** `keep`: so many of the last lines can be read. */
  constructor(seed: number, keep = 0) {
    this.seed = seed;
    this.random = seededRandom(seed);
    this.#keep = keep;
  }

  get lines(): string[] {
    const at = (ms: number): string => ms.toFixed(3).padStart(12);
    const last = this.#said.slice(-this.#keep);
    return last.map(({ step, atMs, line }) => `${String(step).padStart(6)} ${at(atMs)} ${line}`);
  }

  get nowMs(): number {
    return this.nowUs / 1000;
  }

  /** Uniform integer, `from` to `to`, both included. */
  between(from: number, to: number): number {
    return from + Math.floor(this.random() * (to - from + 1));
  }

  chance(probability: number): boolean {
    return this.random() < probability;
  }

  pick<T>(items: readonly T[]): T {
    return items[Math.floor(this.random() * items.length)]!;
  }

  /** Small numbers are much more frequent: 0 to `count` - 1. */
  zipf(count: number): number {
    return Math.floor(count ** this.random()) - 1;
  }

  /** `fn` will run as `owner`, unless that dies before. */
  schedule(delayUs: number, what: string, fn: () => void, owner: Life = this.life): Entry {
    const entry = { atUs: this.nowUs + Math.max(0, Math.round(delayUs)), order: this.#order++, what, owner, fn };
    this.#push(entry);
    return entry;
  }

  cancel(entry: Entry): void {
    entry.fn = undefined;
  }

  /** Something worth a line happened. */
  note(line: string): void {
    for (let at = 0; at < line.length; at++)
      this.digest = Math.imul(this.digest ^ line.charCodeAt(at), 0x01000193) >>> 0;
    if (this.#keep === 0) return;
    this.#said.push({ step: this.steps, atMs: this.nowMs, line });
    if (this.#said.length > 2 * this.#keep) this.#said = this.#said.slice(-this.#keep);
  }

  /** Entries that a life still has. */
  pending(owner: Life): Entry[] {
    return this.#heap.filter((entry) => entry.fn !== undefined && entry.owner === owner);
  }

  /** The next thing happens. False: nothing is left. */
  async step(): Promise<boolean> {
    for (let entry = this.#pop(); entry !== undefined; entry = this.#pop()) {
      const { fn, owner } = entry;
      if (fn === undefined || !owner.alive) continue;
      entry.fn = undefined;
      this.nowUs = entry.atUs;
      this.steps++;
      this.note(`${owner.name} ${entry.what}`);
      await this.runAs(owner, fn, entry.what);
      return true;
    }
    return false;
  }

  /** Run code of `owner`, and what follows from it in the same turn. @throws Violation when a node takes too long over it */
  async runAs(owner: Life, fn: () => void, what = 'a call'): Promise<void> {
    this.life = owner;
    const isServer = owner === this.servers; // what it takes is the simulation's own
    const beginMs = isServer ? 0 : native.threadCpuMs();
    fn();
    await settled();
    this.life = this.servers;
    if (isServer) return;
    const turnMs = native.threadCpuMs() - beginMs;
    this.longestTurnMs = Math.max(this.longestTurnMs, turnMs);
    if (turnMs > maxTurnMs) {
      throw new LongTurn(`law 2: ${owner.name}: ${what}: a turn of ${turnMs.toFixed(0)} ms, ${maxTurnMs} allowed`);
    }
  }

  #push(entry: Entry): void {
    const heap = this.#heap;
    let at = heap.push(entry) - 1;
    while (at > 0) {
      const parent = (at - 1) >> 1;
      if (!isBefore(entry, heap[parent]!)) break;
      heap[at] = heap[parent]!;
      at = parent;
    }
    heap[at] = entry;
  }

  #pop(): Entry | undefined {
    const heap = this.#heap;
    const first = heap[0];
    const last = heap.pop();
    if (last === undefined || heap.length === 0) return first;
    let at = 0;
    for (;;) {
      let child = 2 * at + 1;
      if (child >= heap.length) break;
      if (child + 1 < heap.length && isBefore(heap[child + 1]!, heap[child]!)) child++;
      if (!isBefore(heap[child]!, last)) break;
      heap[at] = heap[child]!;
      at = child;
    }
    heap[at] = last;
    return first;
  }
}

const isBefore = (a: Entry, b: Entry): boolean => a.atUs < b.atUs || (a.atUs === b.atUs && a.order < b.order);
