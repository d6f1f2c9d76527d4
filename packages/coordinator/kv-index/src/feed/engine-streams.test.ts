/** Several data-parallel engines behind one address, each with blocks and a publisher of its own, as a router sees them. */
import { mkdtempSync, rmSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { workerRecordSchema } from '@kvtier/config';
import { type KvEvent, KvEventPublisher } from '@kvtier/events';
import { ChainHasher, hashKeyOf } from '@kvtier/identity';
import { afterEach, beforeEach, expect, it, vi } from 'vitest';
import { keysOfHashes } from '../keys.ts';
import type { FollowedWorker } from './followed.ts';
import type { Subscribe } from './followed-stream.ts';
import { IndexFeed } from './index-feed.ts';
import { subscribeWith } from './subscribe.ts';

const [blockTokens, blocks] = [16, 8];
const tokens = Uint32Array.from({ length: blocks * blockTokens }, (_, i) => i * 31);
const packed = new ChainHasher({ algorithm: 'sha256_cbor', blockTokens }).hashBlocks(null, tokens);
const hashes = Array.from({ length: blocks }, (_, i) => hashKeyOf(packed.subarray(32 * i, 32 * i + 32)));
const keys = keysOfHashes(packed, 32);
const wait = { timeout: 15_000, interval: 10 };

let folder: string;
let feed: IndexFeed;
/** By port. */
let engines: Map<number, KvEventPublisher>;
let opened: string[];
let warnings: string[];
const local = (endpoint: string): string => `ipc://${folder}/${endpoint.split(':').at(-1)}`;
/** Ports of a host are sockets in a folder: so no other process has them. */
const subscribe: Subscribe = (events) => {
  opened.push(events.endpoint);
  const { endpoint, replayEndpoint } = events;
  const here = { ...events, endpoint: local(endpoint), replayEndpoint: local(replayEndpoint!) };
  return subscribeWith({ curve: undefined, trustedNetwork: false })(here, true);
};

async function start(port: number): Promise<void> {
  const replayEndpoint = local(`:${port + 100}`);
  engines.set(port, await KvEventPublisher.start({ endpoint: local(`:${port}`), replayEndpoint }));
}

beforeEach(async () => {
  folder = mkdtempSync(join(tmpdir(), 'kvtier-engines-'));
  [engines, opened, warnings] = [new Map(), [], []];
  const logger = { info: () => {}, warn: (_: object, message: string) => void warnings.push(message) };
  feed = new IndexFeed({ maxBytes: 8 << 20, blockTokens, logger, subscribe });
  for (const port of [5557, 5558, 5559]) await start(port);
});
afterEach(async () => {
  feed.close();
  for (const engine of engines.values()) await engine.close();
  rmSync(folder, { recursive: true });
});

function follow(engines: number | undefined, more: { ranks?: number; kind?: string } = {}): void {
  const { ranks, kind = 'openai' } = more;
  const events = { endpoint: 'tcp://10.0.0.1:5557', replayEndpoint: 'tcp://10.0.0.1:5657', ranks };
  const record = workerRecordSchema.parse({ name: 'a', kind, address: 'http://10.0.0.1:8000', events });
  feed.follow([{ number: 0, record, node: undefined, totalBlocks: 1_000, engines } satisfies FollowedWorker]);
}

const store = (port: number, count: number): void => {
  const event: KvEvent = {
    type: 'BlockStored',
    blockHashes: hashes.slice(0, count),
    parentBlockHash: null,
    tokenIds: [...tokens.subarray(0, count * blockTokens)],
    ...{ blockSize: blockTokens, loraId: null, loraName: null, medium: 'GPU' },
  };
  engines.get(port)!.publish([event]);
};
const held = (): number => feed.match(keys, [0])[0]!.blocks;
const why = (): string | undefined => feed.state().workers[0]!.why;

it('the engine that holds least counts, and one that holds nothing is one of them', async () => {
  follow(3);
  expect(opened).toEqual(['tcp://10.0.0.1:5557', 'tcp://10.0.0.1:5558', 'tcp://10.0.0.1:5559']);
  store(5557, 8);
  store(5558, 3);
  engines.get(5559)!.publish([{ type: 'AllBlocksCleared' }]);
  await vi.waitFor(() => expect([feed.state().index.blocks, why()]).toEqual([blocks, undefined]), wait);
  expect(held()).toBe(0);
  store(5559, 5);
  await vi.waitFor(() => expect(held()).toBe(3), wait);
  store(5558, 8);
  await vi.waitFor(() => expect(held()).toBe(5), wait);
  // What one of them loses is gone there alone.
  engines.get(5558)!.publish([{ type: 'AllBlocksCleared' }]);
  store(5558, 4);
  await vi.waitFor(() => expect(held()).toBe(4), wait);
});

it('its record may say how many are here; more that its metrics tell of are elsewhere', async () => {
  follow(3, { ranks: 2 });
  expect(opened).toEqual(['tcp://10.0.0.1:5557', 'tcp://10.0.0.1:5558']);
  store(5557, 8);
  store(5558, 3);
  await vi.waitFor(() => expect([held(), why()]).toEqual([3, undefined]), wait);
});

it('those that its metrics tell of later are followed from then on', async () => {
  follow(undefined);
  store(5557, 8);
  store(5558, 3);
  await vi.waitFor(() => expect(held()).toBe(8), wait);
  follow(2);
  await vi.waitFor(() => expect([held(), why()]).toEqual([3, undefined]), wait);
  opened.length = 0;
  follow(2);
  expect(opened).toEqual([]);
});

it('a worker of ours is one engine', () => {
  follow(3, { kind: 'kvtier' });
  expect(opened).toEqual(['tcp://10.0.0.1:5557']);
});

it('where one of them is not heard, what the worker holds is guessed, and one line says which', async () => {
  follow(2);
  store(5557, 8);
  store(5558, 8);
  await vi.waitFor(() => expect(held()).toBe(8), wait);
  warnings.length = 0;
  await engines.get(5558)!.close();
  engines.delete(5558);
  const what = 'not connected to its KV events';
  const remedy = 'look whether it listens at tcp://10.0.0.1:5558';
  await vi.waitFor(() => expect(why()).toBe(`${what}: ${remedy}`), wait);
  expect(warnings).toEqual([`worker a: ${what}; what it holds is guessed from what it was sent; ${remedy}`]);
  expect(held()).toBe(0);
  await start(5558);
  store(5558, 2);
  await vi.waitFor(() => expect([held(), why()]).toEqual([2, undefined]), wait);
});
