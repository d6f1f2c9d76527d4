/** A session server over a model store, and clients of it, as tests of this room use them. */
import { mkdtempSync, rmSync } from 'node:fs';
import { tmpdir } from 'node:os';
import path from 'node:path';
import { native } from '@kvtier/data-plane';
import type { StoreLimits } from '@kvtier/placement';
import { Bench, silent } from '@kvtier/placement/testing';
import { systemClock } from '@kvtier/runtime';
import type { SessionLimits } from '../limits.ts';
import type { SessionServerOptions, TokenSink } from '../options.ts';
import { SessionServer } from '../server.ts';
import { packed, RawClient } from './raw-client.ts';

export const headerBytes = 256;

export class ServedBench {
  readonly folder = mkdtempSync(path.join(tmpdir(), 'kvtier-session-'));
  socketPath = path.join(this.folder, 'run', 'node.sock');
  bench!: Bench;
  server: SessionServer | undefined;
  /** Laid over the server's options. */
  more: Partial<SessionServerOptions> = {};
  /** Laid over those of the store. */
  storeLimits: Partial<StoreLimits> = {};
  /** Called for each answer about statistics. */
  gauges: () => Record<string, number> = () => ({});
  readonly #clients: RawClient[] = [];

  async start(
    limits: Partial<SessionLimits> = {},
    slotCount = 8,
    options: ConstructorParameters<typeof Bench>[2] = {},
    tokens: TokenSink | null = null,
  ): Promise<void> {
    this.bench = new Bench(slotCount, { maxReservedBytes: 6, ...this.storeLimits }, options);
    this.server = await SessionServer.listen({
      socketPath: this.socketPath,
      store: this.bench.store,
      arenaPath: '/dev/shm/none',
      arenaBytes: 1 << 20,
      maxPayloadBytes: 1000,
      arenaId: 99n,
      headerBytes,
      bootEpoch: 0xfedc_ba98_7654_3210n,
      peerCredentials: (fd) => native.peerCredentials(fd),
      clock: systemClock,
      log: silent,
      gauges: () => this.gauges(),
      tokens,
      limits: { quarantinePollMs: 10, ...limits },
      ...this.more,
    });
  }

  async connect(): Promise<RawClient> {
    const client = await RawClient.connect(this.socketPath);
    this.#clients.push(client);
    return client;
  }

  async attached(previousSession: Buffer = Buffer.alloc(0)): Promise<RawClient & { id: Buffer }> {
    const client = await this.connect();
    const { session } = await client.attach({ previousSession });
    return Object.assign(client, { id: session });
  }

  async close(): Promise<void> {
    for (const client of this.#clients.splice(0)) client.socket.destroy();
    await this.server?.close();
    rmSync(this.folder, { recursive: true });
  }
}

/** Reserve and commit a chain. */
export async function put(client: RawClient, name: string, count: number): Promise<void> {
  const { offsets } = await client.call(
    { $case: 'reserve', value: { parent: Buffer.alloc(0), hashes: packed(name, count) } },
    'reserved',
  );
  const checksums = offsets.map((_, index) => BigInt(index) + (1n << 60n));
  await client.call({ $case: 'commit', value: { offsets, checksums } }, 'done');
}
