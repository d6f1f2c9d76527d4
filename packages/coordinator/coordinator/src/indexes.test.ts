/** What workers say of themselves, as their model's index uses it. */
import { mkdtempSync, rmSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { nodeRecordSchema } from '@kvtier/config';
import { factsOf, recordOf } from '@kvtier/dispatch/testing';
import { KvEventPublisher } from '@kvtier/events';
import { ChainHasher, hashKeyOf } from '@kvtier/identity';
import { keysOfHashes } from '@kvtier/kv-index';
import type { Worker, WorkerFacts } from '@kvtier/registry';
import { createLogger } from '@kvtier/telemetry';
import { afterEach, beforeEach, expect, it, vi } from 'vitest';
import { Indexes } from './indexes.ts';

const [mine, others] = ['0011223344556677', 'ffeeddccbbaa9988'];
const packed = new ChainHasher({ algorithm: 'sha256_cbor', blockTokens: 16 }).hashBlocks(null, new Uint32Array(6 * 16));
const blockHashes = Array.from({ length: 6 }, (_, i) => hashKeyOf(packed.subarray(32 * i, 32 * i + 32)));

let folder: string;
let node: KvEventPublisher;
let indexes: Indexes | undefined;
const endpoints = () => ({ endpoint: `ipc://${folder}/n`, replayEndpoint: `ipc://${folder}/n-replay` });
beforeEach(async () => {
  folder = mkdtempSync(join(tmpdir(), 'kvtier-indexes-'));
  node = await KvEventPublisher.start(endpoints());
});
afterEach(async () => {
  indexes?.close();
  await node.close();
  rmSync(folder, { recursive: true });
});

/** Of two workers, the first beside the node, that say this of themselves: blocks of the prompt that each has at hand. */
function follow(part: Partial<WorkerFacts>): () => number[] {
  const workers = ['a', 'b'].map((name, number): Worker => {
    const record = recordOf(name, { node: number === 0 ? 'n' : null });
    const facts = factsOf({ modelDir: '/m', ...part });
    return { number, record, state: 'ready', why: undefined, facts } as unknown as Worker;
  });
  const nodes = [nodeRecordSchema.parse({ name: 'n', events: endpoints() })];
  const fleet = { workers: () => workers, nodes: () => nodes, onChange: () => () => {} };
  const logger = createLogger('indexes-test', 'silent');
  indexes = new Indexes({ fleet, maxBytes: 1 << 24, tokenizers: {}, logger });
  const keys = keysOfHashes(packed, 32);
  return () => indexes!.match('demo', keys, [0, 1]).map(({ blocks }) => blocks);
}

it('a node that keeps blocks of several models counts for those of its worker, by the namespaces that this one names', async () => {
  const held = follow({ namespaces: [mine] });
  const tier = { parentBlockHash: null, tokenIds: [], blockSize: 0, loraId: null, loraName: null, medium: 'CPU' };
  node.publish([{ type: 'BlockStored', blockHashes, ...tier }], `@${others}`);
  node.publish([{ type: 'BlockStored', blockHashes: blockHashes.slice(0, 4), ...tier }], `@${mine}`);
  await vi.waitFor(() => expect(held()).toEqual([4, 0]), { timeout: 15_000, interval: 10 });
  node.publish([{ type: 'BlockRemoved', blockHashes: blockHashes.slice(2), medium: 'CPU' }], `@${mine}`);
  await vi.waitFor(() => expect(held()).toEqual([2, 0]), { timeout: 15_000, interval: 10 });
});
