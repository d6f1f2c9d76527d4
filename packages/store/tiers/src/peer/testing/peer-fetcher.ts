/**
 * A fetching node as a process of its own: `peer-fetcher.ts DIR HOST PORT BLOCKS PAYLOAD_BYTES READ_LIMIT_MS [tls]`. Each line on stdin is
 * a read of all blocks, answered by a line of JSON: how many ended how, and the milliseconds it took. A wrong block ends it.
 */
import { join } from 'node:path';
import { createInterface } from 'node:readline';
import { certificatesIn } from '../../kit/testing/certificates.ts';
import { hashNamed, namespaceNamed, TestBench } from '../../kit/testing/objects.ts';
import { fetchingTier, loopsOf, sharedSecret } from './peer-pair.ts';

const [dir, host, port, blocks, payloadBytes, readLimitMs, encryption] = process.argv.slice(2);
const bench = new TestBench(64 << 20, join(dir!, `fetcher-${process.pid}`));
const hashes = Array.from({ length: Number(blocks) }, (_, i) => hashNamed(i));
const security = encryption === 'tls' ? certificatesIn(dir!) : sharedSecret();
const loops = loopsOf(bench, security);
const peers = [{ host: host!, port: Number(port) }];
const tier = fetchingTier(bench, loops, [], { security, peers, readLimitMs: Number(readLimitMs) });
process.stdout.write('ready\n');
for await (const _ of createInterface({ input: process.stdin })) {
  const startMs = performance.now();
  const statuses = await bench.read(tier, namespaceNamed('one'), hashes, Number(payloadBytes));
  const counts: Record<string, number> = { ready: 0, missing: 0, failed: 0, corrupt: 0 };
  for (const status of statuses) counts[status!]!++;
  process.stdout.write(`${JSON.stringify({ ...counts, ms: performance.now() - startMs })}\n`);
}
await tier.close();
await loops.close();
bench.dispose();
