/**
 * A process that writes blocks to a Redis tier and is killed at a named step of one write. Says "open" and then the number of
 * each stored block on stdout. Environment: KVTIER_TEST = {url, bytes, payloadBytes, dir, leaseMs, killAt: {step, pass}}.
 */
import { writeSync } from 'node:fs';
import { hashNamed, namespaceNamed, TestBench } from '../../kit/testing/objects.ts';
import { openTier } from './redis.ts';

const settings = JSON.parse(process.env.KVTIER_TEST!) as {
  url: string;
  bytes: number;
  payloadBytes: number;
  dir: string;
  leaseMs: number;
  killAt: { step: string; pass: number };
};
const { url, bytes, payloadBytes, dir, leaseMs, killAt } = settings;
const space = namespaceNamed('writer');
const bench = new TestBench(32 << 20, dir);
let passes = 0;
const tier = await openTier(
  bench,
  { servers: [url], bytes },
  {
    leaseMs,
    onStep: (step) => {
      if (step === killAt.step && ++passes === killAt.pass) process.kill(process.pid, 'SIGKILL');
    },
  },
);
writeSync(1, 'open\n');
for (let number = 0; ; number += 4) {
  const hashes = Array.from({ length: 4 }, (_, i) => hashNamed(number + i));
  const statuses = await bench.write(tier, space, hashes, payloadBytes);
  for (const [i, status] of statuses.entries()) if (status === 'stored') writeSync(1, `${number + i}\n`);
}
