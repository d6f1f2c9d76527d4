/** A store over the model world, and engines in it that write and read "bytes" by name. For tests, also of other rooms. */
import type { HashKey, Namespace } from '@kvtier/identity';
import type { ArenaBlock } from '@kvtier/tiers';
import type { StoreLimits } from '../limits.ts';
import type { LoadEvents, LoadReason } from '../load.ts';
import type { OpenOptions, StoreOptions } from '../parts.ts';
import { Store } from '../store.ts';
import { ManualClock, ModelArena, SteppedTier, settled, silent } from './model.ts';

/** A block is one "byte" here, so that limits in bytes are limits in blocks. */
export const payloadBytes = 1;

export function namespaceNamed(name: string): Namespace {
  return { digest: new Uint8Array(32), key: name };
}

/** Names of a chain's blocks: "a0", "a1", ... */
export function chain(name: string, count: number, first = 0): HashKey[] {
  return Array.from({ length: count }, (_, index) => `${name}${first + index}` as HashKey);
}

export interface BenchOptions {
  /** Names of the lower tiers, fastest first; default: "disk". */
  readonly lower?: readonly string[];
  readonly plans?: StoreOptions['plans'];
  readonly quotas?: StoreOptions['quotas'];
  readonly runningUs?: StoreOptions['runningUs'];
}

export class Bench {
  readonly clock = new ManualClock();
  readonly arena: ModelArena;
  readonly lower: readonly SteppedTier[];
  /** The first of `lower`. */
  readonly disk: SteppedTier;
  readonly store: Store;
  /** Names of blocks whose next verification finds that they are not sound. */
  readonly damaged = new Set<string>();

  constructor(slotCount: number, limits: Partial<StoreLimits> = {}, options: BenchOptions = {}) {
    this.arena = new ModelArena(slotCount);
    this.lower = (options.lower ?? ['disk']).map((name) => new SteppedTier(name, this.arena));
    this.disk = this.lower[0]!;
    const generous = { maxReservedBytes: 1000, maxLeasedBytes: 1000, maxFetchBytes: 1000, maxWriteDownBytes: 1000 };
    this.store = new Store({
      arena: this.arena,
      lower: this.lower,
      plans: options.plans,
      quotas: options.quotas,
      readHeader: (slot) => this.arena.headers.get(slot)!,
      verify: async ({ key }, blocks) =>
        blocks.map(({ hash, slot }) => {
          const name = this.arena.content.get(slot);
          return name === key + hash && !this.damaged.delete(name);
        }),
      clock: this.clock,
      runningUs: options.runningUs,
      log: silent,
      limits: { ...generous, fetchBatchBytes: 4, writeDownBatchBytes: 4, ...limits },
    });
  }

  engine(namespace = 'n', traits: OpenOptions = {}): BlockWriter {
    return new BlockWriter(this, namespaceNamed(namespace), traits);
  }

  /** Answer the oldest job of this kind; returns false when there is none. */
  answer(kind: 'read' | 'write', as: Answer, tier = this.disk): boolean {
    const index = tier.jobs.findIndex((job) => job.kind === kind);
    if (index === -1) return false;
    tier.jobs.splice(index, 1)[0]!.finish(as);
    return true;
  }

  /** Answer all jobs of this kind, also those that come of it. */
  async answerAll(kind: 'read' | 'write', as: Answer, tier = this.disk): Promise<void> {
    await settled();
    while (this.answer(kind, as, tier)) await settled();
  }
}

export type Answer = 'ready' | 'corrupt' | 'failed' | 'missing' | 'stored' | 'refused';

export interface LoadView {
  readonly hashes: readonly HashKey[];
  readonly blocks: ArenaBlock[];
  readonly tiers: string[];
  loaded: number;
  reason: LoadReason | undefined;
}

export class BlockWriter {
  readonly bench: Bench;
  readonly namespace: Namespace;
  readonly holdings;
  readonly loads = new Map<bigint, LoadView>();
  #nextLoad = 1n;

  constructor(bench: Bench, namespace: Namespace, traits: OpenOptions = {}) {
    this.bench = bench;
    this.namespace = namespace;
    this.holdings = bench.store.open(namespace, payloadBytes, 16, traits);
  }

  /** Reserve, write and commit what can be; returns the statuses. */
  put(hashes: readonly HashKey[], parent: HashKey | null = null): string[] {
    const reserved = this.holdings.reserve(parent, hashes);
    const slots: number[] = [];
    for (const [index, { slot }] of reserved.entries()) {
      if (slot === undefined) continue;
      this.bench.arena.content.set(slot, this.namespace.key + hashes[index]!);
      slots.push(slot);
    }
    this.holdings.commit(
      slots,
      slots.map(() => 0n),
    );
    return reserved.map(({ status }) => status);
  }

  load(hashes: readonly HashKey[], deadlineMs = 1000, awaitMs = 0): bigint {
    const id = this.#nextLoad++;
    const view: LoadView = { hashes, blocks: [], tiers: [], loaded: -1, reason: undefined };
    this.loads.set(id, view);
    const events: LoadEvents = {
      onReady: (first, blocks, tier) => {
        if (first !== view.blocks.length || view.reason !== undefined) throw new Error('ready out of order');
        view.blocks.push(...blocks);
        view.tiers.push(...blocks.map(() => tier));
      },
      onDone: (loaded, reason) => {
        if (view.reason !== undefined) throw new Error('done twice');
        view.loaded = loaded;
        view.reason = reason;
      },
    };
    this.holdings.load(id, hashes, deadlineMs, events, awaitMs);
    return id;
  }

  lookup(hashes: readonly HashKey[]) {
    return this.bench.store.lookup(this.holdings.state, hashes);
  }

  /** Every leased slot holds the bytes of its block. */
  checkLeases(): void {
    for (const view of this.loads.values()) {
      for (const [index, { slot }] of view.blocks.entries()) {
        const found = this.bench.arena.content.get(slot);
        const expected = this.namespace.key + view.hashes[index]!;
        if (found !== expected) throw new Error(`leased slot ${slot} holds ${found}, not ${expected}`);
      }
    }
  }

  release(id: bigint, corrupt: number[] = []): void {
    this.loads.delete(id);
    this.holdings.release(id, corrupt);
  }
}

export { ManualClock, ModelArena, SteppedTier, settled, silent } from './model.ts';
