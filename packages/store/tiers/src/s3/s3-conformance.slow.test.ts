/** The one suite over a real server, Ceph RGW. Servers that stop and bodies that are torn: test/faults/s3-server.slow.test.ts. */
import { afterAll, beforeAll } from 'vitest';
import { S3Server } from '../../../../../infra/s3/servers.ts';
import { tierConformance } from '../kit/testing/conformance.ts';
import { Bucket, openS3 } from './testing/index.ts';

let server: S3Server;
let buckets = 0;
beforeAll(async () => {
  server = await S3Server.start();
}, 120_000);
afterAll(() => server?.stop());

tierConformance(
  's3, Ceph RGW',
  async (bench) => {
    const bucket = await Bucket.make(server.url, `conformance-${++buckets}`);
    bucket.close();
    return openS3(bench, { endpoint: server.url, bucket: bucket.name });
  },
  { persistent: true, runs: 2 },
);
