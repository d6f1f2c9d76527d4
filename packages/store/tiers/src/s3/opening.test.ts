/** What an opening is refused for, and what is worth another try. */
import { once } from 'node:events';
import { createServer } from 'node:http';
import type { AddressInfo } from 'node:net';
import { afterEach, beforeEach, expect, it, vi } from 'vitest';
import { TestBench } from '../kit/testing/objects.ts';
import { FakeBucket } from './testing/fake-bucket.ts';
import { openS3 } from './testing/s3.ts';

let bench: TestBench;
let bucket: FakeBucket;
beforeEach(async () => {
  bench = new TestBench();
  bucket = await FakeBucket.start();
});
afterEach(async () => {
  await bucket.stop();
  bench.dispose();
  vi.unstubAllEnvs();
});

const open = (settings: object = {}) =>
  openS3(bench, { endpoint: bucket.endpoint, bucket: bucket.name, ...settings } as Parameters<typeof openS3>[1]);

it('the machine’s service for credentials that does not answer now: opened later, and no key is called wrong', async () => {
  let isThere = false;
  const keys = { Code: 'Success', AccessKeyId: 'AK', SecretAccessKey: 'SK', Token: 'T' };
  const service = createServer(({ url = '' }, response) => {
    if (!isThere) response.writeHead(503).end();
    else if (url.includes('api/token')) response.end('token');
    else if (url.endsWith('security-credentials/')) response.end('role');
    else response.end(JSON.stringify({ ...keys, Expiration: new Date(Date.now() + 3_600_000).toISOString() }));
  });
  await once(service.listen(0, '127.0.0.1'), 'listening');
  for (const name of Object.keys(process.env)) if (name.startsWith('AWS_')) vi.stubEnv(name, undefined);
  vi.stubEnv('AWS_CONFIG_FILE', '/none/config');
  vi.stubEnv('AWS_SHARED_CREDENTIALS_FILE', '/none/credentials');
  vi.stubEnv('AWS_EC2_METADATA_SERVICE_ENDPOINT', `http://127.0.0.1:${(service.address() as AddressInfo).port}`);
  const byService = { accessKeyId: undefined, secretAccessKey: undefined };
  try {
    await expect(open(byService)).rejects.toMatchObject({
      ...{ code: 'IO', retry: true },
      message: expect.stringMatching(
        /^s3: LIST .*: CredentialsProviderError .*; give a credentialsFile, .*, or a role of the machine$/,
      ),
    });
    isThere = true;
    const tier = await open(byService);
    expect(tier.stats().inService).toBe(true);
    await tier.close();
  } finally {
    service.closeAllConnections();
    service.close();
  }
});

it('credentials that the bucket’s server refuses are wrong', async () => {
  bucket.fault = () => 403;
  await expect(open()).rejects.toMatchObject({ code: 'CONFIG', message: expect.stringContaining('correct them') });
});

it('a server that says that it has no conditional writes is asked once, and refused', async () => {
  bucket.fault = ({ method }) => (method === 'PUT' ? 501 : undefined);
  await expect(open()).rejects.toMatchObject({
    code: 'CONFIG',
    message: `s3: ${bucket.endpoint} takes no If-None-Match (s3: PUT v1/settings: HTTP 501 Fault); use a server with conditional writes`,
  });
  expect(bucket.requests.filter((request) => request.startsWith('PUT'))).toHaveLength(1);
});
