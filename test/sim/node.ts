/**
 * One cache node of a world: real store, arena, disk, Redis and S3 tiers over the simulated platform, started, killed and started
 * again. What it is made of is drawn from the seed.
 */

import type { ArenaHandle } from '@kvtier/data-plane';
import { KvError } from '@kvtier/errors';
import { decodeHeader, headerBytes } from '@kvtier/identity';
import { openOrLater } from '@kvtier/node/testing';
import { Store, type StoreLimits, type TierPlan } from '@kvtier/placement';
import { createSystemClock, type Log } from '@kvtier/runtime';
import {
  ArenaMemory,
  ArenaTier,
  type BlockFields,
  type CodecName,
  CodecTier,
  DiskTier,
  type Tier,
  verifyBlocks,
} from '@kvtier/tiers';
import { RedisTier } from '@kvtier/tiers/redis';
import { S3Tier } from '@kvtier/tiers/s3';
import { simRoot } from './virtual-disk.ts';
import { ModelPeerTier, type PeerNetwork } from './virtual-peers.ts';
import { WatchedTier } from './watched-tier.ts';
import type { Life, World } from './world.ts';

export const arenaBytes = 4096 + 24 * 16_384;
export const redisBytes = 90_000;
export const s3PackBytes = 28_672;
export const s3PackCount = 8;
export const s3Bytes = 4096 + s3PackCount * s3PackBytes;
const rebootUs = 60_000;

export const limits: Partial<StoreLimits> = {
  maxReservedBytes: 60_000,
  maxLeasedBytes: 120_000,
  maxLoads: 6,
  maxAwaitedBlocks: 12,
  maxAwaitedInAll: 20,
  awaitRetryMs: 60,
  maxFetchBytes: 90_000,
  fetchBatchBytes: 12_000,
  maxWriteDownBytes: 100_000,
  maxDirtyBytes: 60_000,
  writeDownBatchBytes: 18_000,
  maxHeldBytes: 40_000,
  writeDownsIdle: 3,
  maxPinnedBytes: 12_000,
  maxPinTtlMs: 2_000,
  maxPrefetchedBytes: 40_000,
  maxPrefetches: 3,
  stuckReadMs: 1_500,
  slowReadMs: 700,
  breakerFailures: 3,
  breakerOpenMs: 100,
  breakerMaxOpenMs: 1_500,
  touchBatchBlocks: 8,
  maxTouchBlocks: 64,
  closeDrainMs: 3_000,
};
const diskTimeoutMs = 1_000;
const redisLimitMs = 400;
const s3Limits = { timeLimitMs: 3_000, idleLimitMs: 800, flushMs: 40, refreshMs: 700, packBytes: s3PackBytes };
/** What a tier's own timers and one sweep of its watchers may add to its limit. */
const slackMs = 1_500;
/** A read, a write: how long each may take by itself. A disk write may wait for a segment; one of Redis has three rounds. */
const tierLimitMs: Readonly<Record<string, number>> = {
  disk: 3 * diskTimeoutMs + slackMs,
  peer: 400 + slackMs,
  redis: 4 * redisLimitMs + slackMs,
  s3: 2 * s3Limits.timeLimitMs + slackMs,
};

/** What one node is configured with. */
export interface NodePlan {
  readonly number: number;
  readonly tiers: readonly string[];
  readonly plans: Readonly<Record<string, Partial<TierPlan>>>;
  readonly diskBytes: number;
  readonly devices: number;
  /** Let go of in one turn. */
  readonly unpinBatchBlocks: number;
  /** Of its packs. */
  readonly ttlSeconds: number | undefined;
  readonly policy: 'lru' | 's3-fifo' | 'lfu' | 'fifo';
  /** By tier; what another life or another node encoded is read without. */
  readonly codecs: Readonly<Record<string, CodecName>>;
  /** Of values to and from Redis. */
  readonly transport: 'native' | 'node';
}

export function drawPlan(world: World, number: number, given?: readonly string[]): NodePlan {
  const drawn = [
    ...(world.chance(0.85) ? ['disk'] : []),
    ...(world.chance(0.5) ? ['peer'] : []),
    ...(world.chance(0.6) ? ['redis'] : []),
    ...(world.chance(0.5) ? ['s3'] : []),
  ];
  const tiers = given ?? drawn;
  const plans = Object.fromEntries(
    tiers.map((name): [string, Partial<TierPlan>] => [
      name,
      {
        write: world.pick(['through', 'through', 'back', 'selective']),
        promote: world.chance(0.7),
        ...(world.chance(0.2) ? { ttlSeconds: world.between(1, 3) } : {}),
        ...(world.chance(0.3) ? { settleMs: world.between(1, 40) } : {}),
      },
    ]),
  );
  return {
    ...{ number, tiers, plans },
    diskBytes: 65_536 + world.between(3, 6) * 65_536,
    devices: world.chance(0.25) ? 2 : 1,
    unpinBatchBlocks: world.pick([2, 3, 1_024]),
    ttlSeconds: world.chance(0.3) ? world.between(1_000, 4_000) / 1_000 : undefined,
    policy: world.pick(['lru', 'lru', 's3-fifo', 'lfu', 'fifo']),
    codecs: Object.fromEntries(
      tiers.map((name): [string, CodecName] => [name, world.pick(['none', 'none', 'lz4', 'planes+lz4'])]),
    ),
    transport: world.pick(['native', 'native', 'node']),
  };
}

export class SimNode {
  readonly world: World;
  /** It came up while somebody had set the wall clock: it has no other, and its ends of blocks are wrong. */
  isClockWrong = false;
  /** Of the world: since when it has been up. */
  upSinceMs = 0;
  readonly plan: NodePlan;
  readonly memory: Buffer;
  readonly handle: ArenaHandle;
  /** Store and tiers are there. */
  onUp: (node: SimNode) => void = () => {};
  life: Life;
  state: 'down' | 'starting' | 'up' = 'down';
  arena!: ArenaTier;
  store!: Store;
  lower: WatchedTier[] = [];
  peers: ModelPeerTier | undefined;
  boots = 0;
  /** Reads and writes of former lives. */
  readonly totals: Record<string, number> = {};
  readonly warned = new Map<string, number>();
  readonly #network: PeerNetwork;
  readonly #report: (error: unknown) => void;

  constructor(
    world: World,
    plan: NodePlan,
    arena: { readonly handle: ArenaHandle; readonly memory: Buffer },
    network: PeerNetwork,
    report: (error: unknown) => void,
  ) {
    this.world = world;
    this.plan = plan;
    this.handle = arena.handle;
    this.memory = arena.memory;
    this.#network = network;
    this.#report = report;
    this.life = { name: this.name, alive: false };
  }

  get name(): string {
    return `node${this.plan.number}`;
  }

  get diskCapacityBytes(): number {
    return this.plan.diskBytes * this.plan.devices;
  }

  diskNames(): string[] {
    return Array.from({ length: this.plan.devices }, (_, device) => `${this.name}-${device}`);
  }

  /** A new life begins, in a while. */
  boot(afterUs = rebootUs): void {
    this.state = 'starting';
    this.life = { name: `${this.name}.${++this.boots}`, alive: true };
    const start = (): void => {
      this.#open().catch((error: unknown) => {
        if (!(error instanceof KvError)) this.#report(error);
        this.world.note(`${this.name} cannot start: ${KvError.from(error).message}`);
        this.end();
        this.boot(300_000); // the supervisor's pause
      });
    };
    this.world.schedule(afterUs, 'starts', start, this.life);
  }

  /** The process is gone, from one instant to the next. */
  end(): void {
    this.life.alive = false;
    this.state = 'down';
    this.#network.hosts.delete(this.plan.number);
    this.#network.reset(this.plan.number);
    for (const tier of this.lower) this.#count(tier);
    this.lower = [];
    this.peers = undefined;
  }

  /** Reads and writes by tier and status, all lives. */
  counts(): Readonly<Record<string, number>> {
    for (const tier of this.lower) this.#count(tier);
    return this.totals;
  }

  #count(tier: WatchedTier): void {
    for (const counts of [tier.reads, tier.writes]) {
      for (const [status, count] of Object.entries(counts)) {
        const name = `${tier.name}.${status}`;
        this.totals[name] = (this.totals[name] ?? 0) + count;
        (counts as Record<string, number>)[status] = 0;
      }
    }
  }

  async #open(): Promise<void> {
    const { world, plan, handle, memory } = this;
    memory.fill(0xaa, 4096);
    const filling = new Set<number>();
    const arena = new ArenaTier({
      ...{ arena: handle, arenaBytes, chunkBytes: 16_384, policy: plan.policy },
      nowUs: () => world.nowUs,
    });
    const opened: Tier[] = [];
    try {
      for (const name of plan.tiers) opened.push(await this.#openTier(name, arena));
    } catch (error) {
      for (const tier of opened) await tier.close();
      throw error;
    }
    this.peers = opened.find((tier) => tier instanceof ModelPeerTier);
    const coded = {
      arena: handle,
      memory: new ArenaMemory(handle, arenaBytes),
      slots: arena,
      nowUs: () => world.nowUs,
    };
    const lower = opened.map(
      (tier) =>
        new WatchedTier(new CodecTier({ inner: tier, codec: plan.codecs[tier.name]!, ...coded }), {
          ...{ world, memory, filling, node: this.name, report: this.#report },
          limitMs: tierLimitMs[tier.name]!,
        }),
    );
    this.arena = arena;
    this.lower = lower;
    this.store = new Store({
      ...{ arena, lower, plans: plan.plans, log: this.#log(), clock: createSystemClock() },
      limits: { ...limits, unpinBatchBlocks: plan.unpinBatchBlocks },
      quotas: { small: { arena: 20_000, disk: 30_000 } },
      readHeader: (slot) => this.#header(slot),
      verify: (namespace, blocks) => verifyBlocks(handle, namespace, blocks),
    });
    this.state = 'up';
    this.isClockWrong = world.wallStepMs !== 0;
    this.upSinceMs = world.nowMs;
    this.#network.hosts.set(plan.number, { number: plan.number, life: this.life, arena, memory });
    world.note(`${this.name} is up: ${plan.tiers.join(' ')}`);
    this.onUp(this);
  }

  #openTier(name: string, slots: ArenaTier): Promise<Tier> {
    const { handle, plan } = this;
    const log = this.#log();
    const memory = new ArenaMemory(handle, arenaBytes);
    const shared = { arena: handle, memory, slots, log };
    const supports = { persistent: true, shared: true, writable: true, evicts: true };
    if (name === 'disk') {
      return DiskTier.open({
        ...shared,
        dirs: this.diskNames().map((disk) => `${simRoot}${disk}/segments`),
        ...{ capacityBytes: this.diskCapacityBytes, segmentBytes: 65_536, timeoutMs: diskTimeoutMs },
        ...{ retry: { firstMs: 150, longestMs: 1_500 }, checkpointMs: 700, maxPendingBytes: 80_000 },
        onOutOfService: () => {
          this.totals['disk.outages'] = (this.totals['disk.outages'] ?? 0) + 1;
        },
      });
    }
    if (name === 'peer') return Promise.resolve(new ModelPeerTier(this.#network, plan.number, slots, this.memory));
    const openRedis = () =>
      RedisTier.open({
        ...shared,
        settings: {
          ...{ mode: 'single', servers: ['redis://sim:1'], database: 0, keyPrefix: 'kvtier:' },
          ...{ bytes: redisBytes, partBytes: 4096, connections: 2, depth: 2, timeLimitMs: redisLimitMs, policies: {} },
        },
        ...{ pollMs: 50, leaseMs: 3_000, maxPendingBytes: 60_000, openWithoutServer: true, transport: plan.transport },
        clock: createSystemClock(),
      });
    const openS3 = () =>
      S3Tier.open({
        ...shared,
        ...s3Limits,
        ...{ bucket: 'bucket', endpoint: 'http://sim:1', bytes: s3Bytes, ttlSeconds: plan.ttlSeconds },
        ...{ accessKeyId: 'sim', secretAccessKey: 'sim' },
      });
    const [open, capacityBytes] = name === 'redis' ? [openRedis, redisBytes] : [openS3, s3Bytes];
    return openOrLater({ name, supports, capacityBytes, open, clock: createSystemClock(), log });
  }

  #header(slot: number): BlockFields | undefined {
    const header = decodeHeader(this.memory.subarray(slot, slot + headerBytes));
    if ('error' in header) return undefined;
    const { hash, parent, tokenCount, payloadBytes, payloadChecksum: checksum, expiresS } = header;
    return { hash, parent, tokenCount, payloadBytes, checksum, expiresS };
  }

  #log(): Log {
    const say = (fields: object, message: string): void => {
      this.warned.set(message, (this.warned.get(message) ?? 0) + 1);
      const { reason = '' } = fields as { reason?: string };
      this.world.note(`${this.name} logs: ${message}${reason === '' ? '' : `: ${reason}`}`);
    };
    return { info: () => {}, warn: say, error: say };
  }
}
