/**
 * A tier that the world is unkind to: reads fail, writes are refused, answers come late and out of order, the whole tier
 * goes out of service and comes back. Everything from one seed, so that a run can be had again. The conformance suite runs
 * over it; what the contract promises must still hold.
 */
import type { HashKey, Namespace } from '@kvtier/identity';
import { Followers } from '../followers.ts';
import type {
  ReadStatus,
  RemoveReason,
  SlotBlock,
  SlotSizes,
  Tier,
  TierChange,
  TierStats,
  TierSupports,
  WriteStatus,
} from '../tier.ts';

export interface Faults {
  readonly seed: number;
  /** Probabilities, 0 to 1. */
  readonly failRead?: number;
  readonly refuseWrite?: number;
  /** An answer waits for up to this many turns of `turn`. */
  readonly maxLateTurns?: number;
  /** Default: the event loop's next turn. A simulation gives its own. */
  readonly turn?: () => Promise<void>;
}

/** Uniform numbers in [0, 1) from a seed (mulberry32). */
export function seededRandom(seed: number): () => number {
  let state = seed >>> 0;
  return () => {
    state = (state + 0x6d2b79f5) >>> 0;
    let mixed = Math.imul(state ^ (state >>> 15), state | 1);
    mixed ^= mixed + Math.imul(mixed ^ (mixed >>> 7), mixed | 61);
    return ((mixed ^ (mixed >>> 14)) >>> 0) / 2 ** 32;
  };
}

export class FaultyTier implements Tier {
  readonly #inner: Tier;
  readonly #faults: Faults;
  readonly #random: () => number;
  readonly #followers = new Followers();
  readonly #held = new Map<string, { namespace: Namespace; hashes: Set<HashKey> }>();
  #outReason = '';
  readonly injected = { failedReads: 0, refusedWrites: 0, lateAnswers: 0, outages: 0 };

  constructor(inner: Tier, faults: Faults) {
    this.#inner = inner;
    this.#faults = faults;
    this.#random = seededRandom(faults.seed);
    inner.follow((change) => this.#changed(change));
  }

  get name(): string {
    return this.#inner.name;
  }

  get supports(): TierSupports {
    return this.#inner.supports;
  }

  /** Out of service from now on, until `restore`. */
  breakDown(reason: string): void {
    if (this.#outReason === '') this.#followers.cleared();
    this.#outReason = reason;
    this.injected.outages++;
  }

  restore(): void {
    this.#outReason = '';
    for (const { namespace, hashes } of this.#held.values()) this.#followers.stored(namespace, [...hashes]);
  }

  lookup(namespace: Namespace, hashes: readonly HashKey[]): number {
    return this.#outReason === '' ? this.#inner.lookup(namespace, hashes) : 0;
  }

  touch(namespace: Namespace, hashes: readonly HashKey[]): void {
    this.#inner.touch(namespace, hashes);
  }

  async write(namespace: Namespace, blocks: readonly SlotBlock[]): Promise<WriteStatus[]> {
    const chosen = blocks.map(() => this.#outReason !== '' || this.#happens(this.#faults.refuseWrite));
    this.injected.refusedWrites += chosen.filter((refused) => refused).length;
    const written = await this.#inner.write(
      namespace,
      blocks.filter((_, index) => !chosen[index]),
    );
    // Late: the tier lists what it stored before its caller hears of it, as any tier may.
    await this.#late();
    return chosen.map((refused) => (refused ? 'refused' : written.shift()!));
  }

  async read(
    namespace: Namespace,
    blocks: readonly SlotBlock[],
    onDone: (index: number, status: ReadStatus) => void,
    sizes?: SlotSizes,
  ): Promise<void> {
    const indexes = [...blocks.keys()];
    const failing = indexes.filter(() => this.#outReason !== '' || this.#happens(this.#faults.failRead));
    const going = indexes.filter((index) => !failing.includes(index));
    this.injected.failedReads += failing.length;
    const answers: Promise<void>[] = failing.map(async (index) => {
      await this.#late();
      onDone(index, 'failed');
    });
    const inner = this.#inner.read(
      namespace,
      going.map((index) => blocks[index]!),
      (at, status) => {
        answers.push(this.#late().then(() => onDone(going[at]!, status)));
      },
      sizes,
    );
    await inner;
    await Promise.all(answers);
  }

  remove(namespace: Namespace, hashes: readonly HashKey[], reason: RemoveReason): number {
    return this.#inner.remove(namespace, hashes, reason);
  }

  follow(listener: (change: TierChange) => void): () => void {
    const held = [...this.#held.values()].map(({ namespace, hashes }) => [namespace, [...hashes]] as const);
    return this.#followers.follow(listener, this.#outReason === '' ? held : []);
  }

  stats(): TierStats {
    const stats = this.#inner.stats();
    if (this.#outReason === '') return stats;
    return { ...stats, blocks: 0, inService: false, outOfServiceReason: this.#outReason };
  }

  checkIntegrity(): void {
    this.#inner.checkIntegrity();
  }

  close(): Promise<void> {
    return this.#inner.close();
  }

  #changed(change: TierChange): void {
    if (change.kind === 'cleared') {
      this.#held.clear();
      if (this.#outReason === '') this.#followers.cleared();
      return;
    }
    const { namespace, hashes, kind } = change;
    let held = this.#held.get(namespace.key);
    if (held === undefined) {
      held = { namespace, hashes: new Set() };
      this.#held.set(namespace.key, held);
    }
    for (const hash of hashes) {
      if (kind === 'stored') held.hashes.add(hash);
      else held.hashes.delete(hash);
    }
    if (this.#outReason === '') this.#followers[kind](namespace, hashes);
  }

  #happens(probability: number | undefined): boolean {
    return probability !== undefined && this.#random() < probability;
  }

  async #late(): Promise<void> {
    const turns = Math.floor(this.#random() * ((this.#faults.maxLateTurns ?? 0) + 1));
    if (turns > 0) this.injected.lateAnswers++;
    const turn = this.#faults.turn ?? nextTurn;
    for (let left = turns; left > 0; left--) await turn();
  }
}

const nextTurn = (): Promise<void> => new Promise((resolve) => setImmediate(resolve));
