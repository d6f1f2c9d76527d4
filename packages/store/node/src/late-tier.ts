/**
 * A tier whose server was not there at the start, or said nothing: out of service until it can be opened, then the tier itself. What
 * cannot ever work (a wrong password, a foreign bucket) is refused at the start, where its server says so in time.
 *
 *     openOrLater ──opened within `startMs`──▶ the tier
 *          │ └──not opened yet──▶ LateTier: its opening goes on ──opened──▶ the tier
 *          └──failed, may pass──▶ LateTier: pause ──▶ opening ──failed──▶ twice the pause ...
 *
 * Invariant (law 2): until then lookups miss, writes are refused, nothing waits; no two openings at one time.
 */
import { KvError } from '@kvtier/errors';
import type { HashKey, Namespace } from '@kvtier/identity';
import type { Clock, Log } from '@kvtier/runtime';
import type {
  Following,
  ReadStatus,
  RemoveReason,
  SlotBlock,
  SlotSizes,
  Tier,
  TierChange,
  TierStats,
  TierSupports,
  WriteStatus,
} from '@kvtier/tiers';
import { followInPages, Slices } from '@kvtier/tiers';

/** The node's start waits so long for an opening: longer than a server takes that answers, or refuses. */
const startMs = 3_000;
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

/** The tier; where its server is not there now, or does not say so in time, one that comes later. KvError for what waiting does not mend. */
export async function openOrLater(options: LateTierOptions): Promise<Tier> {
  const { name, clock, log } = options;
  const opening = options.open();
  let cancel = (): void => {};
  const limit = new Promise<undefined>((resolve) => {
    cancel = clock.after(startMs, () => resolve(undefined));
  });
  try {
    const tier = await Promise.race([opening, limit]);
    if (tier !== undefined) return tier;
  } catch (error) {
    const failure = KvError.from(error);
    if (!failure.retry) throw failure;
    log.warn({ tier: name, reason: failure.message }, 'a tier is not there; it is tried again');
    return new LateTier(options, failure.message);
  } finally {
    cancel();
  }
  const reason = `${name}: not open after ${startMs / 1000} s; its server may be silent`;
  log.warn({ tier: name, reason }, 'a tier is not there yet; the node does not wait for it');
  return new LateTier(options, reason, opening);
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

  /** `opening`: one that has begun; else the next one is some time away. */
  constructor(options: LateTierOptions, reason: string, opening?: Promise<Tier>) {
    this.name = options.name;
    this.supports = options.supports;
    this.#options = options;
    this.#reason = reason;
    if (opening === undefined) this.#tryLater();
    else this.#opening = this.#take(opening);
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
    sizes?: SlotSizes,
  ): Promise<void> {
    if (this.#tier !== undefined) return this.#tier.read(namespace, blocks, onDone, sizes);
    for (const index of blocks.keys()) onDone(index, 'missing');
  }

  remove(namespace: Namespace, hashes: readonly HashKey[], reason: RemoveReason): number {
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
      this.#opening = this.#take(this.#options.open());
    });
    this.#pauseMs = Math.min(2 * this.#pauseMs, longestPauseMs);
  }

  /** Never rejects. */
  async #take(opening: Promise<Tier>): Promise<void> {
    const { log } = this.#options;
    try {
      const tier = await opening;
      if (this.#closed) {
        await tier.close(); // nobody waits for it any more
        return;
      }
      this.#tier = tier;
    } catch (error) {
      const { message, retry } = KvError.from(error);
      // A start would have been refused: said once, as long as it does not change.
      if (!retry && message !== this.#reason)
        log.error({ tier: this.name, reason: message }, 'a tier cannot be opened');
      this.#reason = message;
      if (!this.#closed) this.#tryLater();
      return;
    }
    log.info({ tier: this.name }, 'the tier is there now');
    for (const listener of this.#listeners.keys()) this.#listeners.set(listener, this.#tier.follow(listener));
    for (const begin of this.#paged) begin(this.#tier);
  }
}
