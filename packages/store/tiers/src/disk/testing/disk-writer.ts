/**
 * A process that writes blocks to a disk tier until it is killed, and says on stdout which were stored: "N" for block N, in
 * order. Environment: KVTIER_TEST = {dir, capacityBytes, segmentBytes, payloadBytes, first, backend, killAt?: {step, pass}}.
 */
import { writeSync } from 'node:fs';
import { hashNamed, namespaceNamed, silentLog, TestBench } from '../../kit/testing/objects.ts';
import { DiskTier } from '../disk-tier.ts';

const settings = JSON.parse(process.env.KVTIER_TEST!) as {
  dir: string;
  capacityBytes: number;
  segmentBytes: number;
  payloadBytes: number;
  first: number;
  backend: 'auto' | 'threads';
  killAt?: { step: string; pass: number };
};
const { dir, capacityBytes, segmentBytes, payloadBytes, first, backend, killAt } = settings;
const space = namespaceNamed('writer');
let passes = 0;
const bench = new TestBench(16 << 20, `${dir}-arena`);
const tier = await DiskTier.open({
  ...{ dir, capacityBytes, segmentBytes, arena: bench.arena, slots: bench.tier, log: silentLog, io: { backend } },
  onStep: (step) => {
    if (step === killAt?.step && ++passes === killAt.pass) process.kill(process.pid, 'SIGKILL');
  },
});
writeSync(1, 'open\n');
let number = first;
const closeAfter = killAt?.step === 'disk.close.checkpoint' ? first + 60 : Number.POSITIVE_INFINITY;
while (number < closeAfter) {
  const numbers = Array.from({ length: 6 }, () => number++);
  const hashes = numbers.map((each) => hashNamed(each));
  const statuses = await bench.write(tier, space, hashes, payloadBytes);
  tier.touch(space, [hashNamed(first)]);
  // Written before anything else can happen: what the parent reads here was promised.
  for (const [i, status] of statuses.entries()) if (status === 'stored') writeSync(1, `${numbers[i]}\n`);
}
await tier.close();
