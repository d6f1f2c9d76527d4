/**
 * Blocks that nodes told of before they can be named. Those with tokens wait for the one in front of them: a node tells tier by tier, so that
 * a block may come before that one. Those without wait for somebody who tells their tokens. They take few bytes, of the budget of names, and
 * the oldest go first; what is removed meanwhile waits no longer.
 */
import type { Keys } from '../keys.ts';
import type { NamesBudget } from './names-budget.ts';

/** Where a node holds blocks. */
export interface Place {
  /** First 16 hex digits. */
  readonly namespace: string;
  readonly medium: number;
}

/** What a node told at once. */
export interface Run<Owner> extends Place {
  readonly owner: Owner;
  readonly keys: Keys;
  /** Empty: nobody knows them yet. */
  readonly tokens: Int32Array;
  /** What they follow; undefined: the root, or nobody knows. */
  readonly parent: Keys | undefined;
  /** When it was told, in seconds. */
  readonly atS: number;
}

export interface WaitingRun<Owner> extends Run<Owner> {
  /** Those of its blocks that wait no longer, by their places; undefined: all wait. */
  over: Set<number> | undefined;
  /** Nothing of it waits any more. */
  isOver: boolean;
  /** By when they were told: the ones before and behind it. */
  older: WaitingRun<Owner> | undefined;
  newer: WaitingRun<Owner> | undefined;
}

/** Of the names' bytes. */
const share = 1 / 16;
/** Besides the words: the objects, their places in the maps. */
const runBytes = 512;
const blockBytes = 160;

export class WaitingRuns<Owner> {
  readonly #budget: NamesBudget;
  /** A list: to find the first of a Set from which those before it were deleted takes as long as there were of them. */
  #oldest: WaitingRun<Owner> | undefined;
  #newest: WaitingRun<Owner> | undefined;
  readonly #byParent = new Map<string, Set<WaitingRun<Owner>>>();
  readonly #byBlock = new Map<string, WaitingRun<Owner>[]>();
  #bytes = 0;

  constructor(budget: NamesBudget) {
    this.#budget = budget;
  }

  get isEmpty(): boolean {
    return this.#oldest === undefined;
  }

  /** False: there is no room. The words are copied. */
  hold(run: Run<Owner>): boolean {
    const { owner, namespace, medium, atS, keys, tokens, parent } = run;
    const bytes = bytesOf(run);
    const mostBytes = this.#budget.maxBytes * share;
    if (bytes > mostBytes) return false;
    while (this.#bytes + bytes > mostBytes) this.dropOldest();
    if (!this.#budget.takeSpare(bytes)) return false;
    this.#bytes += bytes;
    const held: WaitingRun<Owner> = {
      ...{ owner, namespace, medium, atS, keys: keys.slice(), tokens: tokens.length === 0 ? tokens : tokens.slice() },
      ...{ parent: parent?.slice(), over: undefined, isOver: false, older: this.#newest, newer: undefined },
    };
    if (this.#newest === undefined) this.#oldest = held;
    else this.#newest.newer = held;
    this.#newest = held;
    for (let at = 0; at < held.keys.length; at += 2) {
      const name = nameOf(held.keys, at);
      // Told of again: it waits once.
      this.#removed(name, run.owner, run, held.keys[at]!, held.keys[at + 1]!);
      const those = this.#byBlock.get(name);
      if (those === undefined) this.#byBlock.set(name, [held]);
      else those.push(held);
    }
    if (held.parent !== undefined) {
      const name = nameOf(held.parent, 0);
      const those = this.#byParent.get(name) ?? new Set();
      this.#byParent.set(name, those.add(held));
    }
    return true;
  }

  /** Those with tokens that follow this block: they wait for it no longer, and their blocks until they are released. */
  followersOf(keys: Keys, at: number): WaitingRun<Owner>[] {
    const name = nameOf(keys, at);
    const runs = [...(this.#byParent.get(name) ?? [])];
    this.#byParent.delete(name);
    return runs;
  }

  /** Those without tokens that have some of these blocks. */
  withoutTokens(keys: Keys): Set<WaitingRun<Owner>> {
    const runs = new Set<WaitingRun<Owner>>();
    if (this.isEmpty) return runs;
    for (let at = 0; at < keys.length; at += 2)
      for (const run of this.#byBlock.get(nameOf(keys, at)) ?? []) if (run.tokens.length === 0) runs.add(run);
    return runs;
  }

  /** Those without tokens. */
  withoutTokensIn(namespace: string): WaitingRun<Owner>[] {
    return [...this.#all()].filter((run) => run.namespace === namespace && run.tokens.length === 0);
  }

  /** This block of the run waits no longer. False: it did not wait any more. */
  release(run: WaitingRun<Owner>, low: number, high: number): boolean {
    const at = placeOf(run.keys, low, high);
    if (run.isOver || at < 0 || run.over?.has(at)) return false;
    run.over = (run.over ?? new Set()).add(at);
    this.#forget(run, nameOf(run.keys, 2 * at));
    if (run.over.size === run.keys.length / 2) this.end(run);
    return true;
  }

  /** The node has this block there no more. */
  removed(owner: Owner, place: Place, keys: Keys): void {
    for (let at = 0; at < keys.length && !this.isEmpty; at += 2)
      this.#removed(nameOf(keys, at), owner, place, keys[at]!, keys[at + 1]!);
  }

  /** Of this node, and this place where one is named. */
  clear(owner: Owner, place?: Place): void {
    for (const run of this.#all()) if (run.owner === owner && (place === undefined || isAt(run, place))) this.end(run);
  }

  /** Of this node in this namespace. */
  leave(owner: Owner, namespace: string): void {
    for (const run of this.#all()) if (run.owner === owner && run.namespace === namespace) this.end(run);
  }

  /** False: there is none. */
  dropOldest(): boolean {
    const oldest = this.#oldest;
    if (oldest !== undefined) this.end(oldest);
    return oldest !== undefined;
  }

  end(run: WaitingRun<Owner>): void {
    if (run.isOver) return;
    run.isOver = true;
    if (run.older === undefined) this.#oldest = run.newer;
    else run.older.newer = run.newer;
    if (run.newer === undefined) this.#newest = run.older;
    else run.newer.older = run.older;
    for (let at = 0; at < run.keys.length / 2; at++)
      if (!run.over?.has(at)) this.#forget(run, nameOf(run.keys, 2 * at));
    this.#bytes -= bytesOf(run);
    this.#budget.give(bytesOf(run));
    if (run.parent === undefined) return;
    const name = nameOf(run.parent, 0);
    const those = this.#byParent.get(name);
    those?.delete(run);
    if (those?.size === 0) this.#byParent.delete(name);
  }

  /** The oldest first. */
  *#all(): Generator<WaitingRun<Owner>, void> {
    for (let run = this.#oldest; run !== undefined; ) {
      const { newer } = run; // it may end meanwhile
      yield run;
      run = newer;
    }
  }

  #removed(name: string, owner: Owner, place: Place, low: number, high: number): void {
    const those = this.#byBlock.get(name);
    if (those === undefined) return;
    for (const run of [...those]) if (run.owner === owner && isAt(run, place)) this.release(run, low, high);
  }

  #forget(run: WaitingRun<Owner>, name: string): void {
    const those = this.#byBlock.get(name);
    if (those === undefined) return;
    const at = those.indexOf(run);
    if (those.length === 1 && at === 0) this.#byBlock.delete(name);
    else if (at >= 0) those.splice(at, 1);
  }
}

const bytesOf = ({ keys, tokens }: Run<unknown>): number =>
  runBytes + keys.byteLength + tokens.byteLength + (keys.length / 2) * blockBytes;
const nameOf = (keys: Keys, at: number): string => `${keys[at]},${keys[at + 1]}`;
const isAt = (a: Place, b: Place): boolean => a.namespace === b.namespace && a.medium === b.medium;

/** Which block of these it is; -1: none. */
function placeOf(keys: Keys, low: number, high: number): number {
  for (let at = 0; at < keys.length; at += 2) if (keys[at] === low && keys[at + 1] === high) return at / 2;
  return -1;
}
