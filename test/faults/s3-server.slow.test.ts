import { afterAll, beforeAll, describe } from 'vitest';
import { S3Server } from '../../infra/s3/servers.ts';
import { tierConformance } from '../../packages/tiers/src/conformance.ts';
import { Bucket, openS3 } from '../../packages/tiers/src/testing/s3.ts';

let server: S3Server;
let buckets = 0;
beforeAll(async () => {
  server = await S3Server.start();
}, 120_000);
afterAll(() => server?.stop());

describe('contract', () => {
  tierConformance(
    's3, Ceph RGW',
    async (bench) => {
      const bucket = await Bucket.make(server.url, `conformance-${++buckets}`);
      bucket.close();
      return openS3(bench, { endpoint: server.url, bucket: bucket.name });
    },
    { persistent: true, runs: 2 },
  );
});
