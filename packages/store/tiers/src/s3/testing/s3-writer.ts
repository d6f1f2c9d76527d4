/**
 * A process that writes blocks to an S3 tier until it is killed. Says "open" and then the number of each stored block on stdout.
 * Environment: KVTIER_TEST = {url, bucket, bytes, payloadBytes, dir}.
 */
import { writeSync } from 'node:fs';
import { hashNamed, namespaceNamed, TestBench } from '../../kit/testing/objects.ts';
import { openS3 } from './s3.ts';

const { url, bucket, bytes, payloadBytes, dir } = JSON.parse(process.env.KVTIER_TEST!) as {
  url: string;
  bucket: string;
  bytes: number;
  payloadBytes: number;
  dir: string;
};
const space = namespaceNamed('writer');
const bench = new TestBench(32 << 20, dir);
const tier = await openS3(bench, { endpoint: url, bucket, bytes });
writeSync(1, 'open\n');
for (let number = 0; ; number += 4) {
  const hashes = Array.from({ length: 4 }, (_, i) => hashNamed(number + i));
  const statuses = await bench.write(tier, space, hashes, payloadBytes);
  for (const [i, status] of statuses.entries()) if (status === 'stored') writeSync(1, `${number + i}\n`);
}
