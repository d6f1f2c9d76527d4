/**
 * Blocks that follow one which has no name yet, with their tokens: a node tells what it holds tier by tier, so that a block may come before
 * the one in front of it. They wait for that one, at most so many, the oldest go first; their bytes are of the names' budget.
 */
import type { Keys } from '../keys.ts';
import type { NamesBudget } from './names-budget.ts';

/** Where a node holds blocks. */
export interface Place {
  /** First 16 hex digits. */
  readonly namespace: string;
  readonly medium: number;
}

export interface WaitingRun extends Place {
  readonly keys: Keys;
  readonly tokens: Int32Array;
  /** What they follow. */
  readonly parent: Keys;
}

const defaultMostBlocks = 65_536;
/** Besides the words: the objects, their places in the maps. */
const runBytes = 512;
/** Of the name of a block that is gone. */
const goneBytes = 128;

export class WaitingRuns {
  readonly #budget: NamesBudget;
  readonly #mostBlocks: number;
  /** The oldest first. */
  readonly #runs = new Set<WaitingRun>();
  readonly #byParent = new Map<string, Set<WaitingRun>>();
  /** Of blocks without a name, what was removed while some waited. */
  readonly #gone = new Set<string>();
  #blocks = 0;

  constructor(budget: NamesBudget, mostBlocks = defaultMostBlocks) {
    this.#budget = budget;
    this.#mostBlocks = mostBlocks;
  }

  get isEmpty(): boolean {
    return this.#runs.size === 0;
  }

  /** Something was removed while it waited, or while others did. */
  get hasGone(): boolean {
    return this.#gone.size > 0;
  }

  /** False: there is no room. The words are copied. */
  hold(place: Place, keys: Keys, tokens: Int32Array, parent: Keys): boolean {
    const run: WaitingRun = { ...place, keys: keys.slice(), tokens: tokens.slice(), parent: parent.slice() };
    const blocks = keys.length / 2;
    for (const oldest of this.#runs) {
      if (this.#blocks + blocks <= this.#mostBlocks) break;
      this.#leave(oldest);
    }
    if (this.#blocks + blocks > this.#mostBlocks || !this.#budget.take(bytesOf(run))) return false;
    for (let at = 0; at < keys.length; at += 2) this.#found(goneName(run, keys, at));
    this.#runs.add(run);
    this.#blocks += blocks;
    const name = nameOf(run.parent, 0);
    const those = this.#byParent.get(name) ?? new Set();
    this.#byParent.set(name, those.add(run));
    return true;
  }

  /** Those that follow this block wait no longer. */
  take(keys: Keys, at: number): WaitingRun[] {
    const runs = [...(this.#byParent.get(nameOf(keys, at)) ?? [])];
    for (const run of runs) this.#remove(run);
    return runs;
  }

  /** Whether this block of a run that waited was removed meanwhile. */
  isGone(place: Place, keys: Keys, at: number): boolean {
    return this.#gone.has(goneName(place, keys, at));
  }

  /** A block that has no name. */
  removed(place: Place, keys: Keys, at: number): void {
    if (this.isEmpty) return;
    const name = goneName(place, keys, at);
    if (this.#gone.has(name)) return;
    if (this.#gone.size < this.#mostBlocks && this.#budget.take(goneBytes)) this.#gone.add(name);
    else this.clear(); // it may be among those that wait
  }

  cleared({ namespace, medium }: Place): void {
    for (const run of this.#runs) if (run.namespace === namespace && run.medium === medium) this.#leave(run);
  }

  clear(): void {
    for (const run of this.#runs) this.#remove(run);
    this.rest();
  }

  /** Between two events: where nothing waits, nobody asks what is gone. */
  rest(): void {
    if (!this.isEmpty || this.#gone.size === 0) return;
    this.#budget.give(goneBytes * this.#gone.size);
    this.#gone.clear();
  }

  #leave(run: WaitingRun): void {
    this.#remove(run);
    for (let at = 0; at < run.keys.length; at += 2) this.#found(goneName(run, run.keys, at));
  }

  #found(name: string): void {
    if (this.#gone.delete(name)) this.#budget.give(goneBytes);
  }

  #remove(run: WaitingRun): void {
    if (!this.#runs.delete(run)) return;
    this.#blocks -= run.keys.length / 2;
    this.#budget.give(bytesOf(run));
    const name = nameOf(run.parent, 0);
    const those = this.#byParent.get(name);
    those?.delete(run);
    if (those?.size === 0) this.#byParent.delete(name);
  }
}

const bytesOf = ({ keys, tokens }: WaitingRun): number => runBytes + keys.byteLength + tokens.byteLength;
const nameOf = (keys: Keys, at: number): string => `${keys[at]},${keys[at + 1]}`;
const goneName = ({ namespace, medium }: Place, keys: Keys, at: number): string =>
  `${namespace}/${medium}/${nameOf(keys, at)}`;
