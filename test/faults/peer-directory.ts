/**
 * Nodes with directories of millions of blocks, each a process of its own that answers lines on stdin by lines of JSON.
 *
 *     peer-directory.ts FOLDER give BLOCKS       prints its port; holds that many blocks below its arena, in the index of a disk tier
 *         churn N     from now on N blocks go and N others come in each millisecond; 0: no more
 *         clear       all of it is gone, as when the disk fails
 *         held        what is held: how many, and a sum over their names
 *     peer-directory.ts FOLDER fetch PORT,PORT...    follows them, with the store's index behind
 *         listed N    when N peers have told all: how long it took from the start
 *         held        what it believes they hold, by its own directory and by the index
 *
 * `held` tells the longest turn since the last one and the memory, too.
 */
import { createInterface } from 'node:readline';
import type { HashKey, Namespace } from '@kvtier/identity';
import { Residency } from '@kvtier/placement/testing';
import type { Tier } from '@kvtier/tiers';
import { DiskIndex, Segment } from '@kvtier/tiers/disk/testing';
import { fetchingTier, GivingNode, loopsOf, sharedSecret } from '@kvtier/tiers/peer/testing';
import { namespaceNamed, TestBench, watchTurns } from '@kvtier/tiers/testing';

const space = namespaceNamed('one');
const bytes = Buffer.alloc(32);
function named(number: number): HashKey {
  for (let at = 0; at < 32; at += 4) {
    const mixed = Math.imul(number + at + 1, 0x9e3779b1 + 2 * at);
    bytes.writeUInt32LE(Math.imul(mixed ^ (mixed >>> 15), 0x85ebca6b) >>> 0, at);
  }
  return bytes.toString('latin1') as HashKey;
}

/** Of a set of names, whatever their order. */
class Sum {
  count = 0;
  sum = 0;
  add(hash: HashKey): void {
    this.count++;
    let word = 0x811c9dc5;
    for (let at = 0; at < hash.length; at++) word = Math.imul(word ^ hash.charCodeAt(at), 0x01000193);
    this.sum = (this.sum + (word >>> 0)) % 2 ** 40;
  }
}

/** In slices of its own, so that the turns that are watched are those of the node. */
async function sumOf(tier: Pick<Tier, 'followInPages'>, each: (namespace: Namespace, hash: HashKey) => void) {
  const sum = new Sum();
  const following = tier.followInPages!(({ namespace, hashes }) => {
    for (const hash of hashes) {
      sum.add(hash);
      each(namespace!, hash);
    }
  });
  while (following.next()) await new Promise((resolve) => setImmediate(resolve));
  following.end();
  return { count: sum.count, sum: sum.sum };
}

// Whoever kills it removes the folder: this process does not come to it.
const [folder, role, argument] = process.argv.slice(2) as [string, string, string];
const bench = new TestBench(16 << 20, folder);
const turns = watchTurns();
let longest = { cpuMs: 0, realMs: 0 };
const memory = (): object => {
  const { rss, heapUsed, external } = process.memoryUsage();
  return { ...longest, rssMiB: rss >> 20, heapMiB: heapUsed >> 20, externalMiB: external >> 20 };
};

async function give(count: number): Promise<(what: string, number: number) => Promise<unknown>> {
  const index = new DiskIndex();
  const segments = Array.from({ length: Math.ceil(count / 1000) + 1 }, (_, id) => new Segment(id, '', 0, 0, 0));
  for (const segment of segments) index.register(segment);
  let [first, end] = [0, 0];
  const store = (): void => void index.add(space, named(end), segments[end++ % segments.length]!, 1, 1);
  while (end < count) store();
  const below = {
    lookup: (namespace: Namespace, hashes: readonly HashKey[]) => index.prefix(namespace, hashes),
    follow: (listener: Parameters<Tier['follow']>[0]) => index.follow(listener),
    followInPages: (listener: Parameters<Tier['follow']>[0]) => index.followInPages(listener),
  } as Tier;
  const node = await GivingNode.open(bench, { below });
  process.stdout.write(`${node.server.port}\n`);
  let churn: NodeJS.Timeout | undefined;
  return async (what, number) => {
    if (what === 'churn') {
      clearInterval(churn);
      churn = setInterval(() => {
        for (let i = 0; i < number; i++) {
          store();
          index.remove(index.get(space, named(first++)));
        }
      }, 1);
      if (number === 0) clearInterval(churn);
      return 'done';
    }
    if (what === 'clear') {
      index.drop(segments, true);
      return 'done';
    }
    longest = turns.take();
    return { ...(await sumOf(index, () => {})), ...memory(), peers: node.server.counts.peers };
  };
}

async function fetchFrom(ports: readonly number[]): Promise<(what: string, number: number) => Promise<unknown>> {
  const startMs = performance.now();
  const engine = loopsOf(bench, sharedSecret());
  const tier = fetchingTier(bench, engine, ports, { maxBlocks: 16 << 20 });
  const residency = new Residency();
  residency.follow(tier, 1);
  process.stdout.write('0\n');
  return async (what, number) => {
    if (what === 'listed') {
      while (tier.stats().detail!.listed_peers !== number) await new Promise((resolve) => setTimeout(resolve, 10));
      return { ms: performance.now() - startMs };
    }
    longest = turns.take();
    let indexed = 0;
    const told = await sumOf(tier, (namespace, hash) => {
      if (residency.tiers(namespace, hash) === 2) indexed++;
    });
    const isIndexed = indexed === told.count && residency.count === told.count && residency.settled;
    return { ...told, isIndexed, ...memory(), connected: tier.stats().detail!.connected_peers };
  };
}

const answer = role === 'give' ? await give(Number(argument)) : await fetchFrom(argument.split(',').map(Number));
turns.take();
for await (const line of createInterface({ input: process.stdin })) {
  const [what, number] = line.split(' ');
  process.stdout.write(`${JSON.stringify(await answer(what!, Number(number)))}\n`);
}
bench.dispose();
process.exit(0);
