/** Whose turn it is to have blocks read: what many who wait cost, and that none of them is forgotten. */
import type { HashKey } from '@kvtier/identity';
import { describe, expect, it, vi } from 'vitest';
import { Counters } from './counters.ts';
import { lookedAtInLine } from './fetch-turns.ts';
import { Fetcher } from './fetcher.ts';
import type { FetchClient, FetchRequest, NamespaceState } from './fetches.ts';
import { defaultLimits } from './limits.ts';
import { chain, namespaceNamed } from './testing/bench.ts';
import { ManualClock, ModelArena, SteppedTier, settled, silent } from './testing/model.ts';
import { TierGate } from './tier-gate.ts';

const namespace = namespaceNamed('n');
const state: NamespaceState = {
  ...{ namespace, payloadBytes: 1, holders: 1 },
  ...{ writing: new Set(), fetching: new Map(), awaited: new Map() },
};

/** It wants all blocks of a chain. */
class Client implements FetchClient {
  readonly state = state;
  readonly priority;
  readonly tenant = 0;
  readonly hashes: readonly HashKey[];
  readonly arrivals: string[] = [];
  asked = 0;
  #at = 0;

  constructor(hashes: readonly HashKey[], priority: 'demand' | 'prefetch' = 'demand') {
    this.hashes = hashes;
    this.priority = priority;
  }

  next(): FetchRequest | undefined {
    this.asked++;
    const hash = this.hashes[this.#at];
    return hash === undefined ? undefined : { index: this.#at, hash };
  }

  advance(): void {
    this.#at++;
  }

  /** It wants nothing more. */
  end(): void {
    this.#at = this.hashes.length;
  }

  wants(): boolean {
    return true;
  }

  arrived(index: number, tier: string): void {
    this.arrivals.push(`${this.hashes[index]} ${tier}`);
  }

  failed(index: number, reason: string): void {
    this.arrivals.push(`${this.hashes[index]} ${reason}`);
  }
}

/** Two tiers that read one block at a time, a thousandth of what is asked of the first one. */
class World {
  readonly clock = new ManualClock();
  readonly arena = new ModelArena(20_000);
  readonly tiers = ['disk', 's3'].map((name) => new SteppedTier(name, this.arena));
  readonly locate = vi.fn((_: NamespaceState, hash: HashKey) =>
    this.#gates.find(({ tier }) => tier.lookup(namespace, [hash]) === 1),
  );
  readonly fetcher: Fetcher;
  readonly #gates: readonly TierGate[];

  constructor(batchBlocks = 1) {
    state.fetching.clear();
    const limits = { ...defaultLimits(20_000), maxFetchBytes: 2 * batchBlocks, fetchBatchBytes: batchBlocks };
    this.#gates = this.tiers.map((tier, at) => new TierGate(tier, at + 1, 2, this.clock, limits));
    this.fetcher = new Fetcher({
      ...{ arena: this.arena, clock: this.clock, log: silent, limits, counters: new Counters(), failpoint: undefined },
      pins: { isLeaving: () => false },
      tenants: { reserve: () => true, settle: () => {}, during: (_, publish) => publish() },
      readHeader: (slot) => this.arena.headers.get(slot)!,
      ownerOf: () => 0,
      isOver: () => false,
      locate: this.locate,
      onPromoted: () => {},
      onIdle: () => {},
    });
  }

  /** Each wants a chain of its own, which that tier holds. */
  clients(tier: number, count: number, blocks: number, name = `t${tier}-`, priority?: 'prefetch'): Client[] {
    return Array.from({ length: count }, (_, at) => {
      const client = new Client(chain(`${name}${at}.`, blocks), priority);
      this.tiers[tier]!.put(namespace, client.hashes);
      this.fetcher.add(client);
      return client;
    });
  }

  reading(tier = 0): string[] {
    return this.tiers[tier]!.jobs.map(({ hashes }) => hashes[0]!);
  }

  async answer(tier = 0): Promise<void> {
    this.tiers[tier]!.jobs.shift()!.finish('ready');
    await settled();
  }
}

describe('of many who wait until a tier reads more', () => {
  it('a few are looked at when a read ends', async () => {
    const world = new World();
    const clients = world.clients(0, 2_000, 3);
    await world.answer(); // the first one came first, and is first again
    for (let round = 1; round <= 20; round++) {
      world.locate.mockClear();
      await world.answer();
      expect(world.reading()).toEqual([`t0-${round}.0`]);
      // The first of them for its block, for its next one, and when it is behind all others; the one after it; and a few more.
      expect(world.locate).toHaveBeenCalledTimes(4 + lookedAtInLine);
    }
    expect(clients.slice(18, 21).map(({ arrivals }) => arrivals)).toEqual([['t0-18.0 disk'], ['t0-19.0 disk'], []]);
  });

  it('each has its turn, one batch at a time, in the order in which they came', async () => {
    const world = new World(2);
    world.clients(0, 100, 4);
    const order: string[] = [];
    while (world.reading().length > 0) {
      order.push(world.reading().join());
      await world.answer();
      await world.answer();
    }
    expect(order).toEqual([
      't0-0.0,t0-0.1',
      ...['t0-0.2,t0-0.3', ...Array.from({ length: 99 }, (_, at) => `t0-${at + 1}.0,t0-${at + 1}.1`)],
      ...Array.from({ length: 99 }, (_, at) => `t0-${at + 1}.2,t0-${at + 1}.3`),
    ]);
  });

  it('none keeps those waiting whose blocks lie in another tier', async () => {
    const world = new World();
    world.clients(0, 2_000, 2);
    const [other] = world.clients(1, 1, 3);
    for (let block = 0; block < 3; block++) {
      expect(world.reading(1)).toEqual([`t1-0.${block}`]);
      await world.answer(1);
    }
    expect(other!.arrivals).toEqual(['t1-0.0 s3', 't1-0.1 s3', 't1-0.2 s3']);
    expect(world.reading()).toEqual(['t0-0.0']);
  });

  it('each is told soon what came another way, and goes on where another tier holds what follows', async () => {
    const world = new World();
    const clients = world.clients(0, 1_000, 3);
    const late = clients[900]!;
    world.tiers[0]!.remove(namespace, late.hashes);
    world.tiers[1]!.put(namespace, late.hashes.slice(1));
    const slot = world.arena.allocate(namespace, 1)!;
    const about = { parent: null, tokenCount: 16, payloadBytes: 1, checksum: 0n };
    world.arena.publish(namespace, { hash: late.hashes[0]!, ...about }, slot);
    for (let pump = 0; pump < Math.ceil(1_000 / lookedAtInLine); pump++) world.fetcher.pump();
    expect(late.arrivals).toEqual([`${late.hashes[0]} arena`]);
    expect(world.reading(1)).toEqual([late.hashes[1]]);
    await world.answer(1);
    expect(world.reading(1)).toEqual([late.hashes[2]]);
    expect(world.reading()).toEqual(['t0-0.0']);
  });

  it('those that want nothing more are let go, though nothing is read', () => {
    const world = new World();
    const clients = world.clients(0, 1_000, 3);
    for (const client of clients) client.end();
    for (let pump = 0; pump < Math.ceil(1_000 / lookedAtInLine); pump++) world.fetcher.pump();
    const asked = clients.map((client) => client.asked);
    for (let pump = 0; pump < 1_000; pump++) world.fetcher.pump();
    expect(clients.map((client) => client.asked)).toEqual(asked);
  });

  it('prefetches wait for themselves, behind all loads', async () => {
    const world = new World(2);
    world.clients(0, 3, 2, 'p', 'prefetch');
    world.clients(0, 3, 2, 'd');
    const order: string[] = [];
    while (world.reading().length > 0) {
      order.push(world.reading()[0]!);
      await world.answer();
    }
    expect(order).toEqual([
      ...['p0.0', 'd0.0', 'd0.1', 'd1.0', 'd2.0', 'd1.1', 'd2.1'],
      ...['p0.1', 'p1.0', 'p2.0', 'p1.1', 'p2.1'],
    ]);
  });
});
