/**
 * A node that gives what its arena holds and fetches from others, as a process of its own: `peer-node.ts DIR PAYLOAD_BYTES PORT,PORT...`
 * (those of its peers). Prints its own port. Each line on stdin is answered by a line of JSON; N blocks are the first N of one chain:
 * `hold N` computes them into the arena; `see N P` waits until exactly P peers are there, have told all, and hold exactly N; `fetch N` reads
 * them from its peers, keeps them in the arena as a store does, and tells how each ended. A wrong block ends it.
 */
import { join } from 'node:path';
import { createInterface } from 'node:readline';
import { hashNamed, namespaceNamed, TestBench } from '../../kit/testing/objects.ts';
import { fetchingTier, GivingNode, until } from './peer-pair.ts';

const [dir, payload, peerPorts] = process.argv.slice(2) as [string, string, string];
const payloadBytes = Number(payload);
const space = namespaceNamed('one');
const chain = (count: number) => Array.from({ length: count }, (_, i) => hashNamed(i));
const bench = new TestBench(64 << 20, join(dir, `node-${process.pid}`));
const node = await GivingNode.open(bench, { heartbeatMs: 300 });
const ports = peerPorts.split(',').filter((port) => port !== '');
const tier = fetchingTier(bench, node.loops, ports.map(Number), { readLimitMs: 20_000 });

async function answer(what: string, count: number, peers: number): Promise<unknown> {
  if (what === 'hold') return bench.write(bench.tier, space, chain(count), payloadBytes);
  if (what === 'see') {
    await until(`${peers} peers hold ${count}`, () => {
      const { connected_peers, listed_peers, usable_peers } = tier.stats().detail!;
      const are = [connected_peers, listed_peers, usable_peers];
      return are.every((each) => each === peers) && tier.lookup(space, chain(1024)) === count;
    });
    return 'seen';
  }
  const statuses = await bench.read(tier, space, chain(count), payloadBytes);
  const ready = chain(count).filter((_, index) => statuses[index] === 'ready');
  await bench.write(bench.tier, space, ready, payloadBytes);
  return statuses;
}

process.stdout.write(`${node.server.port}\n`);
for await (const line of createInterface({ input: process.stdin })) {
  const [what, count, peers] = line.split(' ');
  process.stdout.write(`${JSON.stringify(await answer(what!, Number(count), Number(peers)))}\n`);
}
await tier.close();
await node.close();
bench.dispose();
