/**
 * A tier whose server was not there at the start: out of service until it can be opened, then the tier itself. What cannot
 * ever work (a wrong password, a foreign bucket) is refused at the start and never comes here.
 *
 * Invariant (law 2): until then lookups miss, writes are refused, nothing waits; tried again with a doubling pause.
 */
import { KvError } from '@kvtier/errors';
import type { HashKey, Namespace } from '@kvtier/identity';
import type { Clock, Log } from '@kvtier/runtime';
import type {
  Following,
  ReadStatus,
  SlotBlock,
  Tier,
  TierChange,
  TierStats,
  TierSupports,
  WriteStatus,
} from '@kvtier/tiers';
import { followInPages, Slices } from '@kvtier/tiers';

const firstPauseMs = 1_000;
const longestPauseMs = 60_000;
/** The node's end waits so long for an opening that is under way. */
const closingMs = 1_000;

export interface LateTierOptions {
  readonly name: string;
  readonly supports: TierSupports;
  readonly capacityBytes: number;
  readonly open: () => Promise<Tier>;
  readonly clock: Clock;
  readonly log: Log;
}

/** The tier; where its server is not there now, one that comes later. KvError for what waiting does not mend. */
export async function openOrLater(options: LateTierOptions): Promise<Tier> {
  try {
    return await options.open();
  } catch (error) {
    const failure = KvError.from(error);
    if (!failure.retry) throw failure;
    options.log.warn({ tier: options.name, reason: failure.message }, 'a tier is not there; it is tried again');
    return new LateTier(options, failure.message);
  }
}

class LateTier implements Tier {
  readonly name: string;
  readonly supports: TierSupports;
  readonly #options: LateTierOptions;
  readonly #listeners = new Map<(change: TierChange) => void, () => void>();
  /** Called with the tier when it is there. */
  readonly #paged = new Set<(tier: Tier) => void>();
  readonly #slices = new Slices();
  #tier: Tier | undefined;
  #reason: string;
  #refused = 0;
  #closed = false;
  #pauseMs = firstPauseMs;
  #cancelPause: () => void = () => {};
  #opening: Promise<void> = Promise.resolve();

  constructor(options: LateTierOptions, reason: string) {
    this.name = options.name;
    this.supports = options.supports;
    this.#options = options;
    this.#reason = reason;
    this.#tryLater();
  }

  lookup(namespace: Namespace, hashes: readonly HashKey[]): number {
    return this.#tier?.lookup(namespace, hashes) ?? 0;
  }

  touch(namespace: Namespace, hashes: readonly HashKey[]): void {
    this.#tier?.touch(namespace, hashes);
  }

  async write(namespace: Namespace, blocks: readonly SlotBlock[]): Promise<WriteStatus[]> {
    if (this.#tier !== undefined) return this.#tier.write(namespace, blocks);
    this.#refused += blocks.length;
    return blocks.map(() => 'refused');
  }

  async read(
    namespace: Namespace,
    blocks: readonly SlotBlock[],
    onDone: (index: number, status: ReadStatus) => void,
  ): Promise<void> {
    if (this.#tier !== undefined) return this.#tier.read(namespace, blocks, onDone);
    for (const index of blocks.keys()) onDone(index, 'missing');
  }

  remove(namespace: Namespace, hashes: readonly HashKey[], reason: 'corrupt' | 'evicted' | 'asked'): number {
    return this.#tier?.remove(namespace, hashes, reason) ?? 0;
  }

  follow(listener: (change: TierChange) => void): () => void {
    this.#listeners.set(listener, this.#tier?.follow(listener) ?? (() => {}));
    return () => {
      this.#listeners.get(listener)?.();
      this.#listeners.delete(listener);
    };
  }

  followInPages(listener: (change: TierChange) => void, onMore?: () => void): Following {
    if (this.#tier !== undefined) return followInPages(this.#tier, listener, onMore);
    let inner: Following | undefined;
    const next = (): boolean => inner?.next() ?? false;
    const begin = (tier: Tier): void => {
      inner = followInPages(tier, listener, onMore);
      if (onMore !== undefined) onMore();
      else if (next()) this.#slices.add(next);
    };
    this.#paged.add(begin);
    const end = (): void => {
      this.#paged.delete(begin);
      this.#slices.remove(next);
      inner?.end();
    };
    return { next, end };
  }

  stats(): TierStats {
    if (this.#tier !== undefined) return this.#tier.stats();
    return {
      ...{ tier: this.name, blocks: 0, bytes: 0, capacityBytes: this.#options.capacityBytes },
      ...{ hits: 0, misses: 0, evictions: 0, corrupt: 0, refused: this.#refused },
      ...{ inService: false, outOfServiceReason: this.#reason },
    };
  }

  checkIntegrity(): void {
    this.#tier?.checkIntegrity();
  }

  async close(): Promise<void> {
    this.#closed = true;
    this.#cancelPause();
    this.#slices.clear();
    let cancel = (): void => {};
    const limit = new Promise<void>((resolve) => {
      cancel = this.#options.clock.after(closingMs, resolve);
    });
    await Promise.race([this.#opening, limit]);
    cancel();
    await this.#tier?.close();
  }

  #tryLater(): void {
    this.#cancelPause = this.#options.clock.after(this.#pauseMs, () => {
      this.#opening = this.#try();
    });
    this.#pauseMs = Math.min(2 * this.#pauseMs, longestPauseMs);
  }

  /** Never rejects. */
  async #try(): Promise<void> {
    try {
      const tier = await this.#options.open();
      if (this.#closed) {
        await tier.close(); // nobody waits for it any more
        return;
      }
      this.#tier = tier;
    } catch (error) {
      this.#reason = KvError.from(error).message;
      if (!this.#closed) this.#tryLater();
      return;
    }
    this.#options.log.info({ tier: this.name }, 'the tier is there now');
    for (const listener of this.#listeners.keys()) this.#listeners.set(listener, this.#tier.follow(listener));
    for (const begin of this.#paged) begin(this.#tier);
  }
}
