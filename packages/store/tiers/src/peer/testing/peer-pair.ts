/**
 * Two nodes for tests of the peer tier: one that gives, with an arena of its own, and one that fetches, over real sockets.
 * `PeerPair` is a tier whose writes go into the giving node and whose reads come over the wire.
 */
import { randomBytes } from 'node:crypto';
import { join } from 'node:path';
import { native } from '@kvtier/data-plane';
import { type HashKey, headerBytes, type Namespace } from '@kvtier/identity';
import { silentLog, TestBench } from '../../kit/testing/objects.ts';
import type { ReadStatus, RemoveReason, SlotBlock, Tier, TierChange, TierStats, WriteStatus } from '../../kit/tier.ts';
import type { PeerSecurity } from '../control.ts';
import { PeerLoops } from '../peer-loops.ts';
import { PeerServer, type PeerServerOptions } from '../peer-server.ts';
import { PeerTier, type PeerTierOptions } from '../peer-tier.ts';

export const sharedSecret = (): PeerSecurity => ({
  encryption: 'none',
  secrets: [Buffer.from('a secret of these tests')],
});

/** Polls, as what it waits for happens in another thread or process; throws after 20 s. */
export async function until(what: string, holds: () => boolean): Promise<void> {
  const limitMs = performance.now() + 20_000;
  while (!holds()) {
    if (performance.now() > limitMs) throw new Error(`never: ${what}`);
    await new Promise((resolve) => setTimeout(resolve, 2));
  }
}

export function loopsOf(bench: TestBench, security: PeerSecurity, stallMs = 5000, maxConnections = 64): PeerLoops {
  const tls = security.encryption === 'tls';
  return new PeerLoops({ arena: bench.arena, tls, threads: 2, maxConnections, stallMs });
}

export class GivingNode {
  readonly bench: TestBench;
  readonly loops: PeerLoops;
  readonly server: PeerServer;

  constructor(bench: TestBench, loops: PeerLoops, server: PeerServer) {
    this.bench = bench;
    this.loops = loops;
    this.server = server;
  }

  /** `stallMs`, `maxConnections`: of its loops. */
  static async open(
    bench: TestBench,
    options: Partial<PeerServerOptions> = {},
    stallMs?: number,
    maxConnections?: number,
  ): Promise<GivingNode> {
    const security = options.security ?? sharedSecret();
    const loops = loopsOf(bench, security, stallMs, maxConnections);
    const server = await PeerServer.open({
      ...{ loops, arena: bench.arena, slots: bench.tier, security, host: '127.0.0.1', port: 0, dataPort: 0 },
      ...{ epoch: randomBytes(8).readBigUInt64LE(), log: silentLog, heartbeatMs: 1000 },
      ...options,
    });
    return new GivingNode(bench, loops, server);
  }

  async close(): Promise<void> {
    await this.server.close();
    await this.loops.close();
  }
}

export function fetchingTier(
  bench: TestBench,
  loops: PeerLoops,
  ports: readonly number[],
  options: Partial<PeerTierOptions> = {},
): PeerTier {
  return new PeerTier({
    ...{
      loops,
      slots: bench.tier,
      peers: ports.map((port) => ({ host: '127.0.0.1', port })),
      security: sharedSecret(),
    },
    ...{ epoch: 1n, log: silentLog, streams: 2, maxRetryMs: 200, ...options },
  });
}

export class PeerPair implements Tier {
  readonly name = 'peer';
  readonly supports = { persistent: false, shared: true, writable: true, evicts: true };
  readonly #local: TestBench;
  readonly #node: GivingNode;
  readonly #held: Tier;
  readonly #loops: PeerLoops;
  readonly #tier: PeerTier;

  private constructor(local: TestBench, node: GivingNode, held: Tier, loops: PeerLoops, tier: PeerTier) {
    this.#local = local;
    this.#node = node;
    this.#held = held;
    this.#loops = loops;
    this.#tier = tier;
  }

  /** `makeHeld`: what the giving node keeps its blocks in, below its arena; undefined: its arena. */
  static async open(
    local: TestBench,
    security: PeerSecurity,
    makeHeld?: (remote: TestBench) => Promise<Tier>,
  ): Promise<PeerPair> {
    const remote = new TestBench(8 << 20, join(local.dir, 'remote'));
    const below = await makeHeld?.(remote);
    const node = await GivingNode.open(remote, { security, below });
    const loops = loopsOf(local, security);
    const tier = fetchingTier(local, loops, [node.server.port], { security });
    await until('the pair is connected', () => tier.stats().detail!.usable_peers === 1);
    return new PeerPair(local, node, below ?? remote.tier, loops, tier);
  }

  lookup(namespace: Namespace, hashes: readonly HashKey[]): number {
    return this.#tier.lookup(namespace, hashes);
  }

  touch(namespace: Namespace, hashes: readonly HashKey[]): void {
    this.#held.touch(namespace, hashes);
  }

  /** The objects come to be in the other node; ends when the index has heard of all that they changed there. */
  async write(namespace: Namespace, blocks: readonly SlotBlock[]): Promise<WriteStatus[]> {
    const remote = this.#node.bench;
    const statuses: WriteStatus[] = [];
    for (const { hash, slot } of blocks) {
      const bytes = this.#local.tier.slotBytesOf(slot);
      const other = remote.emptySlot(bytes - headerBytes);
      native.arenaWrite(remote.arena, other, native.arenaRead(this.#local.arena, slot, bytes));
      statuses.push(...(await this.#held.write(namespace, [{ hash, slot: other }])));
      remote.tier.free(other);
    }
    await this.#heard();
    return statuses;
  }

  read(namespace: Namespace, blocks: readonly SlotBlock[], onDone: (index: number, status: ReadStatus) => void) {
    return this.#tier.read(namespace, blocks, onDone);
  }

  remove(namespace: Namespace, hashes: readonly HashKey[], reason: RemoveReason): number {
    this.#held.remove(namespace, hashes, 'asked');
    return this.#tier.remove(namespace, hashes, reason);
  }

  follow(listener: (change: TierChange) => void): () => void {
    return this.#tier.follow(listener);
  }

  stats(): TierStats {
    const { bytes, capacityBytes, evictions } = this.#held.stats();
    return { ...this.#tier.stats(), bytes, capacityBytes, evictions };
  }

  checkIntegrity(): void {
    this.#tier.checkIntegrity();
    this.#held.checkIntegrity();
  }

  async close(): Promise<void> {
    await this.#tier.close();
    await this.#loops.close();
    await this.#node.close();
    await this.#held.close();
    this.#node.bench.dispose();
  }

  /** The index lists as many blocks as are held there. */
  #heard(): Promise<void> {
    return until('the index has heard', () => this.#tier.stats().blocks === this.#held.stats().blocks);
  }
}
