/**
 * A router that starts late, knows nothing of this cluster and hashes by itself: from a node's KV events alone it learns which tokens
 * each tier holds, live and in the snapshot.
 */
import { type BlockStored, type KvEvent, KvEventSubscriber } from '@kvtier/events';
import { ChainHasher, hashKeyOf, SequenceHashes } from '@kvtier/identity';
import { afterEach, expect, it, vi } from 'vitest';
import { ask, describe, EngineRig } from '../faults/engine-rig.ts';

let rig: EngineRig | undefined;
const subscribers: KvEventSubscriber[] = [];
afterEach(async () => {
  for (const subscriber of subscribers.splice(0)) subscriber.close();
  await rig?.close();
  rig = undefined;
});

const patience = { timeout: 20_000 };

/** What such a router keeps: by medium, the blocks whose name it has found itself. `plain`: those that it could not. */
class Router {
  readonly hasher: ChainHasher;
  readonly held = new Map<string, Set<string>>();
  readonly topics = new Set<string>();
  readonly subscriber: KvEventSubscriber;
  readonly run: Promise<void>;
  plain = 0;

  constructor(hasher: ChainHasher, endpoints: { endpoint: string; replayEndpoint: string }) {
    this.hasher = hasher;
    const subscriber = new KvEventSubscriber(endpoints);
    this.subscriber = subscriber;
    subscribers.push(subscriber);
    this.run = (async () => {
      for await (const item of subscriber) {
        if (item.kind !== 'batch') continue;
        this.topics.add(item.topic);
        for (const event of item.batch.events) this.#apply(event);
      }
    })();
  }

  #apply(event: KvEvent): void {
    if (event.type === 'BlockStored') this.#stored(event);
  }

  /** In a snapshot a block may come before its parent: its own tokens and its parent's name are enough to check one step of the chain. */
  #stored({ blockHashes, parentBlockHash, tokenIds, blockSize, medium }: BlockStored): void {
    if (tokenIds.length === 0) {
      this.plain += blockHashes.length;
      return;
    }
    expect(blockSize).toBe(this.hasher.blockTokens);
    expect(tokenIds).toHaveLength(blockHashes.length * blockSize);
    let parent = parentBlockHash === null ? null : Buffer.from(String(parentBlockHash), 'latin1');
    for (const [at, hash] of blockHashes.entries()) {
      const own = Buffer.alloc(this.hasher.hashBytes);
      this.hasher.hashInto(own, parent, Uint32Array.from(tokenIds.slice(at * blockSize, (at + 1) * blockSize)));
      expect(own.toString('latin1')).toBe(hash);
      const held = this.held.get(medium!) ?? new Set();
      this.held.set(medium!, held.add(String(hash)));
      parent = own;
    }
  }
}

it('a node that is asked for tokens tells them, live and to who comes late', async () => {
  const endpoints = (folder: string) => ({ endpoint: `ipc://${folder}/pub`, replayEndpoint: `ipc://${folder}/replay` });
  rig = new EngineRig();
  const at = endpoints(rig.folder);
  const topic = 'kv@10.0.0.1:8000@demo';
  // Four batches can be replayed: who comes late needs the snapshot.
  const ours = { intBlockHashes: false, tokenIdBytes: 1 << 20, namespaceTopics: false, bufferSteps: 4 };
  rig.node.configure({ kvEvents: { ...at, topic, ...ours } });
  await rig.node.start();
  await rig.worker.start();
  const client = rig.client('worker');
  await vi.waitUntil(async () => (await describe(client)).tierAttached, patience);
  const { blockTokens, hashAlgorithm, hashSeed } = await describe(client);
  const hasher = new ChainHasher({ algorithm: hashAlgorithm as 'sha256_cbor', rootSeed: hashSeed, blockTokens });
  const live = new Router(hasher, at);
  const prompts = [rig.prompt(0, 0), rig.prompt(0, 1), rig.prompt(1, 0)];
  const names = new Set<string>();
  for (const prompt of prompts) {
    await ask(client, prompt);
    const hashes = new SequenceHashes(hasher);
    hashes.append(Uint32Array.from(prompt));
    for (let block = 0; block < hashes.blockCount; block++) names.add(hashKeyOf(hashes.slice(block, block + 1)));
  }
  expect(names.size).toBeGreaterThan(10);
  const holdsAll = (router: Router): boolean =>
    ['CPU', 'DISK'].every((medium) => [...names].every((name) => router.held.get(medium)?.has(name)));
  await vi.waitUntil(() => holdsAll(live), patience);
  const late = new Router(hasher, at);
  await vi.waitUntil(() => holdsAll(late), patience);
  expect(late.subscriber.stats().snapshots).toBe(1);
  expect([live.plain, late.plain]).toEqual([0, 0]);
  for (const { topics } of [live, late]) expect([...topics].filter((one) => one !== '')).toEqual([topic]);
}, 60_000);
