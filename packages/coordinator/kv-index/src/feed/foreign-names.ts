/**
 * What nodes beside engines of other names tell, with names that all of them share (names-table.ts): blocks with tokens are named, and with them
 * what waited for one of them (waiting-runs.ts), whoever told of it. So a block that one node computed is credited to those that fetched it,
 * and to the node that is believed of a shared tier, in whatever order their events come.
 *
 * A namespace counts once somebody tells tokens in it: those of groups with a window never do, and lack blocks that others have. Several
 * streams go on in turns: what was held back is looked at again behind each of them.
 */
import type { ChainHasher } from '@kvtier/identity';
import type { Keys, Parent } from '../kv-index.ts';
import { type NamesBudget, NamesShare } from './names-budget.ts';
import { type Author, NamesTable, type Unnamed } from './names-table.ts';
import { slices } from './slices.ts';
import { type Place, type Run, type WaitingRun, WaitingRuns } from './waiting-runs.ts';

export interface ForeignNamesOptions {
  readonly hasher: ChainHasher;
  readonly blockTokens: number;
  readonly maxBlocks: number;
  readonly budget: NamesBudget;
  /** Somebody is credited with this block. */
  readonly isHeld: (low: number, high: number) => boolean;
}

/** A node, as one who tells. */
export interface Owner extends Author {
  /** It has these blocks, by our names, since then. */
  credit(place: Place, own: Keys, parent: Parent, atS: number): Generator<number, void>;
  /** It is not to be credited with these, by our names. */
  doubt(own: Keys): void;
  /** There was no room for the names of so many. */
  leaveOut(blocks: number): void;
  /** So many have none, as their tokens are not known. */
  leave(blocks: number): void;
  /** It was credited by what another node told. */
  changed(): void;
}

const maxNamespaces = 1_024;
/** Of all bytes for names: nodes hold more blocks than engines, and give little back; the engines beside them name their own with the rest. */
const nodesShare = 3 / 4;
/** What one that waits costs, in blocks that do not: its objects, its places in the maps. */
const waitWork = (blocks: number): number => 16 + 4 * blocks;
const noTokens = new Int32Array(0);

export class ForeignNames {
  readonly #blockTokens: number;
  readonly #table: NamesTable;
  readonly #waiting: WaitingRuns<Owner>;
  readonly #owners = new Set<Owner>();
  /** In which somebody tells tokens; who did so last is the last one. */
  readonly #told = new Set<string>();
  #numbers = 0;

  constructor({ hasher, blockTokens, maxBlocks, budget, isHeld }: ForeignNamesOptions) {
    this.#blockTokens = blockTokens;
    const onDoubt = (own: Keys): void => {
      for (const owner of this.#owners) owner.doubt(own);
    };
    this.#table = new NamesTable({ hasher, budget: new NamesShare(budget, nodesShare), maxBlocks, isHeld, onDoubt });
    this.#waiting = new WaitingRuns(budget);
    budget.whenShort = () => this.#waiting.dropOldest();
  }

  /** Another bound of blocks; that of bytes is the budget's. */
  resize(maxBlocks: number): void {
    this.#table.resize(maxBlocks);
  }

  /** Of who tells next. */
  nextNumber(): number {
    return ++this.#numbers;
  }

  join(owner: Owner): void {
    this.#owners.add(owner);
  }

  /** It tells nothing any more. */
  leaves(owner: Owner): void {
    this.voided(owner);
    if (!this.#owners.delete(owner) || this.#owners.size > 0) return;
    this.#table.clear();
    this.#told.clear();
  }

  /** Somebody tells tokens there. */
  isTold(namespace: string): boolean {
    return this.#told.has(namespace);
  }

  own(keys: Keys): Keys {
    return this.#table.own(keys);
  }

  removed(owner: Owner, place: Place, keys: Keys): void {
    this.#waiting.removed(owner, place, keys);
    this.#table.worthReview();
  }

  /** Of that place nothing is there any more. */
  cleared(owner: Owner, place: Place): void {
    this.#waiting.clear(owner, place);
    this.#table.worthReview();
  }

  /** What it said is void. */
  voided(owner: Owner): void {
    this.#waiting.clear(owner);
    this.#table.worthReview();
  }

  /** It tells nothing of that namespace any more. */
  dropped(owner: Owner, namespace: string): void {
    this.#waiting.leave(owner, namespace);
    this.#table.worthReview();
  }

  /** Blocks that follow each other, with their tokens. */
  *described(run: Run<Owner>): Generator<number, void> {
    const isNew = !this.#told.delete(run.namespace);
    this.#told.add(run.namespace);
    for (const silent of this.#told) {
      if (this.#told.size <= maxNamespaces) break;
      this.#told.delete(silent);
    }
    const woken: WaitingRun<Owner>[] = [];
    let next: WaitingRun<Owner> | undefined;
    try {
      yield* this.#describe(run, undefined, woken);
      for (next = woken.pop(); next !== undefined; next = woken.pop()) {
        yield* this.#describe(next, next, woken);
        this.#waiting.end(next);
      }
      if (isNew) for (const bare of this.#waiting.withoutTokensIn(run.namespace)) yield* this.#wake(bare, bare.keys);
      yield* this.#table.reviewWhereDue();
    } finally {
      // Where who told goes meanwhile: nobody would wake them any more.
      for (const run of next === undefined ? woken : [next, ...woken]) this.#waiting.end(run);
    }
  }

  /** Blocks without their tokens. */
  *bare(run: Run<Owner>): Generator<number, void> {
    const { owner, namespace } = run;
    for (const slice of slices(run.keys)) {
      const isTold = this.#told.has(namespace);
      const [named, unnamed] = split(slice, (low, high) => isTold && this.#table.isNamed(low, high));
      if (named.length > 0) yield* owner.credit(run, this.#table.own(named), 'unknown', run.atS);
      if (unnamed.length === 0) continue;
      this.#waiting.hold({ ...run, keys: unnamed, tokens: noTokens, parent: undefined });
      owner.leave(unnamed.length / 2); // until somebody tells their tokens, if anybody does
      yield waitWork(unnamed.length / 2);
    }
  }

  /** `waiting`: the run, where it waited. */
  *#describe(
    run: Run<Owner>,
    waiting: WaitingRun<Owner> | undefined,
    woken: WaitingRun<Owner>[],
  ): Generator<number, void> {
    let before = run.parent;
    let at = 0;
    for (const slice of slices(run.keys)) {
      if (waiting?.isOver) return;
      const from = (at / 2) * this.#blockTokens;
      const tokens = run.tokens.subarray(from, from + (slice.length / 2) * this.#blockTokens);
      const own = yield* this.#table.name(slice, tokens, before, run.owner);
      if (typeof own === 'string') {
        if (waiting === undefined) yield* this.#leave({ ...run, parent: before }, at, own);
        return;
      }
      const named = slice.subarray(0, own.length);
      yield* this.#credit(run, waiting, named, before);
      for (let i = 0; i < named.length; i += 2) woken.push(...this.#waiting.followersOf(named, i));
      for (const bare of this.#waiting.withoutTokens(named)) yield* this.#wake(bare, named);
      at += named.length;
      if (named.length < slice.length) {
        if (waiting === undefined) yield* this.#leave(run, at, 'doubted');
        return;
      }
      before = slice.subarray(slice.length - 2);
    }
  }

  *#credit(
    run: Run<Owner>,
    waiting: WaitingRun<Owner> | undefined,
    named: Keys,
    before: Keys | undefined,
  ): Generator<number, void> {
    // Without what was removed while it waited.
    const [here] = split(named, (low, high) => waiting === undefined || this.#waiting.release(waiting, low, high));
    if (here.length === 0) return;
    const isWhole = here.length === named.length;
    yield* run.owner.credit(run, this.#table.own(here), isWhole ? this.#parentOf(before) : 'unknown', run.atS);
    if (waiting !== undefined) run.owner.changed();
  }

  /** Of a run without tokens, blocks that have names by now. */
  *#wake(bare: WaitingRun<Owner>, keys: Keys): Generator<number, void> {
    if (!this.#told.has(bare.namespace)) return;
    const [here] = split(keys, (low, high) => this.#table.isNamed(low, high) && this.#waiting.release(bare, low, high));
    if (here.length === 0) return;
    yield* bare.owner.credit(bare, this.#table.own(here), 'unknown', bare.atS);
    bare.owner.changed();
  }

  /** From there on it has no names. */
  *#leave({ keys, tokens, parent, ...run }: Run<Owner>, at: number, why: Unnamed): Generator<number, void> {
    let before = parent;
    let from = (at / 2) * this.#blockTokens;
    for (const slice of slices(keys.subarray(at))) {
      const blocks = slice.length / 2;
      const its = tokens.subarray(from, from + blocks * this.#blockTokens);
      if (why === 'parent') this.#waiting.hold({ ...run, keys: slice, tokens: its, parent: before });
      if (why === 'room') run.owner.leaveOut(blocks);
      else run.owner.leave(blocks); // until the one before them comes, if it does
      before = slice.subarray(slice.length - 2);
      from += its.length;
      yield waitWork(blocks);
    }
  }

  #parentOf(before: Keys | undefined): Parent {
    if (before === undefined) return 'root';
    const own = this.#table.own(before);
    return own.length === 0 ? 'unknown' : own;
  }
}

/** Those that are so, and the others. */
function split(keys: Keys, is: (low: number, high: number) => boolean): [Keys, Keys] {
  const [those, others]: [number[], number[]] = [[], []];
  for (let at = 0; at < keys.length; at += 2)
    (is(keys[at]!, keys[at + 1]!) ? those : others).push(keys[at]!, keys[at + 1]!);
  return [those.length === keys.length ? keys : Int32Array.from(those), Int32Array.from(others)];
}
