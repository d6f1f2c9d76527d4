/**
 * How much of a prompt each target has at hand. What it takes is waiting for memory that lies in no cache, and what it leaves to be
 * collected: each decision asks, of all workers.
 *
 *   - Look-ups that do not need each other's answers are under way together: of the prompt's first and last block, then of the two where
 *     the run of the last one begins, which mostly is where the run of the first one is left.
 *   - Sets are read as they stand, and what was cleared since is left out of the sources that are asked for: to settle a set takes longer than
 *     all the rest, and one source that leaves would have it done with the sets of all prompts.
 *   - Blocks are counted in arrays that stay. Targets that hold the same of a prompt share one answer: mostly a few answers for all workers.
 */
import { type Chains, loose } from './chains.ts';
import { maxMedia } from './clears.ts';
import { none } from './hash-table.ts';
import type { Keys } from './keys.ts';
import { empty } from './run.ts';
import type { Targets } from './targets.ts';

export interface Match {
  /** Leading blocks that are all at hand. */
  readonly blocks: number;
  /** Of these, how many lie on each medium, counted on the lowest-numbered one that holds the block. Not to be written: others may share it. */
  readonly byMedium: Int32Array;
}

/** Most workers hold nothing of a prompt: they share this. */
const nothing: Match = { blocks: 0, byMedium: new Int32Array(maxMedia) };
/** So many answers before a target's are compared with its own. */
const compared = 16;
/** Where this share of a row is asked for, what was cleared is left out of the whole row at once. */
const wholeShare = 1 / 8;

export class Matcher {
  readonly #chains: Chains;
  /** Targets that hold all blocks so far. */
  #alive = new Int32Array(64);
  #living = 0;
  /** Of each target, blocks on each medium. */
  #counts = new Int32Array(64 * maxMedia);
  /** Of each target, all of its blocks. */
  #blocks = new Int32Array(64);
  /** Blocks that had to be looked up one by one, as nothing was known of their order. */
  looseSteps = 0;

  constructor(chains: Chains) {
    this.#chains = chains;
  }

  match(keys: Keys, targets: Targets, stamp: number): Match[] {
    const { count } = targets;
    if (this.#alive.length < count) {
      this.#alive = new Int32Array(count);
      this.#counts = new Int32Array(count * maxMedia);
      this.#blocks = new Int32Array(count);
    }
    this.#living = count;
    for (let i = 0; i < count; i++) this.#alive[i] = i;
    this.#counts.fill(0, 0, count * maxMedia);
    this.#blocks.fill(0, 0, count);
    if (keys.length > 0) this.#scan(keys, targets, stamp);
    return this.#answers(count);
  }

  #scan(keys: Keys, targets: Targets, stamp: number): void {
    const { table, runs, sets } = this.#chains;
    const count = keys.length >>> 1;
    const last = this.#chains.lastOf(keys);
    let position = 0;
    scan: while (position < count && this.#living > 0) {
      const record = table.find(keys[2 * position]!, keys[2 * position + 1]!);
      if (record === none) break;
      const runNumber = table.runOf(record);
      if (runNumber === loose) {
        if (this.#take(1, sets.latest(table.placeOf(record)), targets) === 0) break;
        position++;
        this.looseSteps++;
        continue;
      }
      const run = runs[runNumber]!;
      const place = table.placeOf(record);
      if (place >= run.end) break;
      run.stamp = stamp;
      const most = Math.min(run.end - place, count - position);
      const end = place + this.#chains.extent(keys, position, record, runNumber, place, most, last);
      let segment = run.segmentAt(place);
      for (let from = place; from < end; segment++) {
        const to = Math.min(run.endOf(segment), end);
        const set = sets.latest(run.setOf(segment));
        if (set === empty) {
          // Nobody holds it as part of this run; it may have come back since, with a record of its own.
          if (from === place) break scan;
          position += from - place;
          continue scan;
        }
        if (this.#take(to - from, set, targets) === 0) break scan;
        from = to;
      }
      position += end - place;
    }
  }

  /** `length` more blocks with these holders, but for what was cleared since; how many targets go on. */
  #take(length: number, set: number, { ends, sources }: Targets): number {
    const { sets } = this.#chains;
    const width = sets.widthOf(set);
    const isStale = sets.isStale(set);
    const isWhole = isStale && this.#living >= width * wholeShare;
    const slab = isWhole ? sets.rowLeft(set) : sets.slabOf(set);
    const first = isWhole ? 0 : sets.firstOf(set);
    const isMasked = isStale && !isWhole;
    const alive = this.#alive;
    const counts = this.#counts;
    const blocks = this.#blocks;
    const living = this.#living;
    let kept = 0;
    for (let i = 0; i < living; i++) {
      const target = alive[i]!;
      const end = ends[target]!;
      let media = 0;
      for (let at = target === 0 ? 0 : ends[target - 1]!; at < end; at++) {
        const source = sources[at]!;
        const held = source < width ? slab[first + source]! : 0;
        media |= isMasked && held !== 0 ? sets.left(set, source, held) : held;
      }
      if (media === 0) continue;
      blocks[target]! += length;
      counts[target * maxMedia + 31 - Math.clz32(media & -media)]! += length;
      alive[kept++] = target;
    }
    this.#living = kept;
    return kept;
  }

  #answers(count: number): Match[] {
    const counts = this.#counts;
    const blocks = this.#blocks;
    const found = new Array<Match>(count).fill(nothing);
    /** Targets whose answers were made. */
    const made: number[] = [];
    for (let target = 0; target < count; target++) {
      const held = blocks[target]!;
      if (held === 0) continue;
      let same = none;
      for (let i = made.length - 1; same === none && i >= 0 && i >= made.length - compared; i--)
        if (blocks[made[i]!] === held && this.#areAlike(made[i]!, target)) same = made[i]!;
      if (same !== none) {
        found[target] = found[same]!;
        continue;
      }
      const byMedium = new Int32Array(maxMedia);
      for (let medium = 0; medium < maxMedia; medium++) byMedium[medium] = counts[target * maxMedia + medium]!;
      found[target] = { blocks: held, byMedium };
      made.push(target);
    }
    return found;
  }

  #areAlike(a: number, b: number): boolean {
    const counts = this.#counts;
    for (let medium = 0; medium < maxMedia; medium++)
      if (counts[a * maxMedia + medium] !== counts[b * maxMedia + medium]) return false;
    return true;
  }
}
