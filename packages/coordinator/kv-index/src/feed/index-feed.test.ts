/** The feed over real sockets: engines and nodes that publish, restart, lie and fall silent, as a router sees them. */
import { mkdtempSync, rmSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { type NodeRecord, nodeRecordSchema, workerRecordSchema } from '@kvtier/config';
import { type KvEvent, KvEventPublisher, type KvEventPublisherOptions } from '@kvtier/events';
import { ChainHasher, hashKeyOf } from '@kvtier/identity';
import { afterEach, beforeEach, describe, expect, it, vi } from 'vitest';
import type { Keys } from '../chains.ts';
import { keysOfHashes } from '../keys.ts';
import { type FollowedWorker, IndexFeed, type IndexFeedOptions } from './index-feed.ts';

const blockTokens = 16;
const hasher = new ChainHasher({ algorithm: 'sha256_cbor', blockTokens });
const namespace = '0011223344556677';

/** A prompt of so many blocks, with its hashes as events have them and as the index has them. */
function promptOf(seed: number, blocks: number) {
  const tokens = Uint32Array.from({ length: blocks * blockTokens }, (_, i) => (seed * 7_919 + i * 31) % 30_000);
  const packed = hasher.hashBlocks(null, tokens);
  const hashes = Array.from({ length: blocks }, (_, i) => hashKeyOf(packed.subarray(32 * i, 32 * i + 32)));
  return { tokens: [...tokens], hashes, keys: keysOfHashes(packed, 32) };
}
type Prompt = ReturnType<typeof promptOf>;

const stored = ({ hashes, tokens }: Prompt, from = 0, to = hashes.length, more: object = {}): KvEvent => ({
  type: 'BlockStored',
  blockHashes: hashes.slice(from, to),
  parentBlockHash: from === 0 ? null : hashes[from - 1]!,
  tokenIds: tokens.slice(from * blockTokens, to * blockTokens),
  ...{ blockSize: blockTokens, loraId: null, loraName: null, medium: 'GPU', ...more },
});

let folder: string;
let feed: IndexFeed | undefined;
const publishers: KvEventPublisher[] = [];
const lines: string[] = [];
const log = (_: object, message: string): void => void lines.push(message);
const logger = { info: log, warn: log };

beforeEach(() => {
  folder = mkdtempSync(join(tmpdir(), 'kvtier-feed-'));
  lines.length = 0;
});
afterEach(async () => {
  feed?.close();
  for (const publisher of publishers.splice(0)) await publisher.close();
  rmSync(folder, { recursive: true });
});

function open(options: Partial<IndexFeedOptions> = {}): IndexFeed {
  feed = new IndexFeed({ maxBytes: 8 << 20, blockTokens, logger, ...options });
  return feed;
}

const endpointsOf = (name: string) => ({
  endpoint: `ipc://${folder}/${name}`,
  replayEndpoint: `ipc://${folder}/${name}-replay`,
});

async function publish(name: string, options: Partial<KvEventPublisherOptions> = {}): Promise<KvEventPublisher> {
  const publisher = await KvEventPublisher.start({ ...endpointsOf(name), ...options });
  publishers.push(publisher);
  return publisher;
}

function worker(number: number, options: Partial<FollowedWorker> & { kind?: string; events?: null } = {}) {
  const name = `w${number}`;
  const { kind = 'kvtier', events = endpointsOf(name), ...rest } = options;
  const record = workerRecordSchema.parse({ name, kind, address: 'unix:/x', node: rest.node?.name ?? null, events });
  return { number, record, node: undefined, totalBlocks: 1_000, ...rest } satisfies FollowedWorker;
}

const node = (name: string): NodeRecord =>
  nodeRecordSchema.parse({ name, peer: { host: '127.0.0.1', port: 1 }, events: endpointsOf(name) });

const blocksOf = (keys: Keys, numbers: number[]): number[] => feed!.match(keys, numbers).map(({ blocks }) => blocks);
const wait = { timeout: 15_000, interval: 10 };

describe('what a worker has at hand', () => {
  it('is what its engine, its node and the shared tiers hold, each block on its nearest medium', async () => {
    const [a, b] = [await publish('w0'), await publish('w1')];
    const [n, m] = [await publish('n'), await publish('m')];
    const feed = open();
    feed.follow([worker(0, { node: node('n') }), worker(1, { node: node('m') }), worker(2, { events: null })]);
    const prompt = promptOf(1, 10);
    a.publish([stored(prompt, 0, 2)]);
    a.publish([stored(prompt, 2, 4)]);
    b.publish([stored(prompt, 0, 1)]);
    const tier = { parentBlockHash: null, tokenIds: [], blockSize: 0 };
    n.publish([stored(prompt, 0, 6, { ...tier, medium: 'CPU' })], `@${namespace}`);
    n.publish([stored(prompt, 6, 8, { ...tier, medium: 'DISK' })], `@${namespace}`);
    // Both nodes tell of the shared tier, and of their peers' blocks, which are told by those.
    for (const one of [n, m]) {
      one.publish([stored(prompt, 8, 9, { ...tier, medium: 'S3' })], `@${namespace}`);
      one.publish([stored(prompt, 9, 10, { ...tier, medium: 'PEER' })], `@${namespace}`);
    }
    const remote = { remoteMedium: 3 };
    await vi.waitFor(() => {
      expect(feed.match(prompt.keys, [0, 1, 2, 9])).toEqual([
        { blocks: 9, byMedium: Int32Array.of(4, 2, 2, 0, 0, 1, 0, 0), remoteBlocks: 0, ...remote },
        { blocks: 1, byMedium: Int32Array.of(1, 0, 0, 0, 0, 0, 0, 0), remoteBlocks: 7, ...remote },
        { blocks: 0, byMedium: new Int32Array(8), remoteBlocks: 0, ...remote },
        { blocks: 0, byMedium: new Int32Array(8), remoteBlocks: 0, ...remote },
      ]);
    }, wait);
    // Another model's blocks on the same node are not ours.
    feed.follow([worker(0, { node: node('n'), namespaces: ['ffffffffffffffff'] }), worker(1)]);
    expect(blocksOf(prompt.keys, [0, 1])).toEqual([4, 1]);
  });
});
