/**
 * Our stream decoded by Python's msgpack over pyzmq (Debian: python3-zmq, python3-msgpack), and the stream of a Python
 * publisher in the older encoding followed by ours. Python stands for the consumers and publishers of others.
 */
import { spawn, spawnSync } from 'node:child_process';
import { once } from 'node:events';
import { mkdtempSync, rmSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { text } from 'node:stream/consumers';
import { fileURLToPath } from 'node:url';
import { hashKeyOf, integerForm } from '@kvtier/identity';
import { afterEach, beforeEach, describe, expect, it } from 'vitest';
import type { StreamItem } from './continuity.ts';
import type { KvEvent } from './event.ts';
import { KvEventPublisher } from './publisher.ts';
import { KvEventSubscriber } from './subscriber.ts';
import { NaiveHolders } from './testing/naive-holders.ts';

const python = '/usr/bin/python3';
const peer = fileURLToPath(new URL('./testing/peer.py', import.meta.url));
const found = spawnSync(python, ['-c', 'import zmq, msgpack'], { encoding: 'utf8' });
const missing = found.status !== 0;
if (missing)
  process.stderr.write(
    'SKIPPED: KV events against Python (both directions): apt-get install python3-zmq python3-msgpack to run them\n',
  );

let folder: string;
beforeEach(() => {
  folder = mkdtempSync(join(tmpdir(), 'kvtier-ev-'));
});
afterEach(() => rmSync(folder, { recursive: true }));

const key = (fill: number) => hashKeyOf(Buffer.alloc(32, fill));
const events: KvEvent[] = [
  {
    type: 'BlockStored',
    blockHashes: [key(0x11), key(0xf2)],
    parentBlockHash: key(0x7f),
    tokenIds: [1, 200, 70_000, 4_000_000_000],
    blockSize: 2,
    loraId: null,
    medium: 'GPU',
    loraName: 'sql',
    extraKeys: [['sql', ['image', -3]], null],
    groupIdx: 1,
    kvCacheSpecKind: 'sliding_window',
    kvCacheSpecSlidingWindow: 512,
  },
  { type: 'BlockRemoved', blockHashes: [key(0x11)], medium: 'DISK', locality: 'LOCAL' },
  { type: 'AllBlocksCleared' },
];
const inPython = [
  {
    type: 'BlockStored',
    block_hashes: [`${integerForm(key(0x11))}`, `${integerForm(key(0xf2))}`],
    parent_block_hash: `${integerForm(key(0x7f))}`,
    token_ids: [1, 200, 70_000, 4_000_000_000],
    block_size: 2,
    lora_id: null,
    medium: 'GPU',
    lora_name: 'sql',
    extra_keys: [['sql', ['image', -3]], null],
    group_idx: 1,
    kv_cache_spec_kind: 'sliding_window',
    kv_cache_spec_sliding_window: 512,
  },
  { type: 'BlockRemoved', block_hashes: [`${integerForm(key(0x11))}`], medium: 'DISK', locality: 'LOCAL' },
  { type: 'AllBlocksCleared' },
];

describe.skipIf(missing)('with Python', () => {
  it('reads our stream and our replay as the same events', async () => {
    const endpoint = `ipc://${folder}/pub`;
    const replayEndpoint = `ipc://${folder}/replay`;
    const publisher = await KvEventPublisher.start({ endpoint, replayEndpoint, topic: 'kv', dataParallelRank: 3 });
    const child = spawn(python, [peer, 'read', publisher.endpoint, publisher.replayEndpoint!, '20'], {
      stdio: ['ignore', 'pipe', 'inherit'],
    });
    // It joins whenever it does, reads on until it has 20 batches in a row, and then has all before them replayed.
    const timer = setInterval(() => publisher.publish(events), 5);
    try {
      const [said] = await Promise.all([text(child.stdout), once(child, 'close')]);
      const batches = JSON.parse(said) as { topic: string; seq: number; ts: number; rank: number; events: unknown }[];
      expect(batches.length).toBeGreaterThanOrEqual(20);
      expect(batches.map(({ seq }) => seq)).toEqual(batches.map((_, i) => i));
      for (const { topic, rank, ts, events: read } of batches) {
        expect([topic, rank]).toEqual(['kv', 3]);
        expect(Math.abs(ts - Date.now() / 1_000)).toBeLessThan(600);
        expect(read).toEqual(inPython);
      }
    } finally {
      clearInterval(timer);
      child.kill('SIGKILL');
      await publisher.close();
    }
  });

  it.each([
    ['today’s replay answers', 'topic'],
    ['replay answers without a topic, as until July 2026', 'bare'],
  ])('its stream in the older encoding, and %s, are followed', async (_, answers) => {
    const endpoint = `ipc://${folder}/pub`;
    const replayEndpoint = `ipc://${folder}/replay`;
    const child = spawn(python, [peer, 'write', endpoint, replayEndpoint, answers], {
      stdio: ['ignore', 'pipe', 'inherit'],
    });
    const subscriber = new KvEventSubscriber({ endpoint, replayEndpoint, topic: 'py', replayDeadlineMs: 60_000 });
    const index = new NaiveHolders();
    const items: StreamItem[] = [];
    try {
      for await (const item of subscriber) {
        items.push(item);
        index.apply('python', item);
        if (items.length === 20) break;
      }
      expect(items.map((item) => (item.kind === 'batch' ? item.seq : item.kind))).toEqual(items.map((__, i) => i));
      const [first] = items;
      expect(first?.kind === 'batch' && first.batch).toEqual({
        ts: expect.any(Number),
        dataParallelRank: 2,
        events: [
          {
            type: 'BlockStored',
            blockHashes: [2n ** 63n, 5n],
            parentBlockHash: null,
            tokenIds: [1, 2, 3, 4],
            blockSize: 2,
            loraId: 7,
            medium: 'GPU',
            loraName: null,
            extraKeys: null,
            groupIdx: null,
            kvCacheSpecKind: null,
            kvCacheSpecSlidingWindow: null,
            locality: null,
          },
          { type: 'BlockRemoved', blockHashes: [5n], medium: 'GPU', groupIdx: null, locality: null },
        ],
      });
      expect(index.holdersOf(2n ** 63n)).toEqual(['python py 2 0 GPU']);
      expect(index.holdersOf(5n)).toEqual([]);
      expect(subscriber.stats().replayed).toBeGreaterThanOrEqual(10); // every other one is sent to nobody
    } finally {
      subscriber.close();
      child.kill('SIGKILL');
      await once(child, 'close');
    }
  });
});
