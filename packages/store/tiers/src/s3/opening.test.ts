/** What an opening is refused for, what is worth another try, and what is opened to be read. */
import { once } from 'node:events';
import { createServer } from 'node:http';
import type { AddressInfo } from 'node:net';
import { KvError } from '@kvtier/errors';
import { afterEach, beforeEach, describe, expect, it, vi } from 'vitest';
import { until } from '../../../../../infra/redis/servers.ts';
import { hashNamed, namespaceNamed, silentLog, TestBench } from '../kit/testing/objects.ts';
import { checkWrites } from './opening.ts';
import { planS3 } from './options.ts';
import type { S3Api } from './s3-api.ts';
import type { S3Tier } from './s3-tier.ts';
import { FakeBucket } from './testing/fake-bucket.ts';
import { openS3 } from './testing/s3.ts';

let bench: TestBench;
let bucket: FakeBucket;
const tiers: S3Tier[] = [];
beforeEach(async () => {
  bench = new TestBench();
  bucket = await FakeBucket.start();
});
afterEach(async () => {
  bucket.fault = () => undefined;
  for (const tier of tiers.splice(0)) {
    tier.checkIntegrity();
    await tier.close();
  }
  await bucket.stop();
  bench.dispose();
  vi.unstubAllEnvs();
  vi.restoreAllMocks();
});

async function open(settings: object = {}, options: object = {}): Promise<S3Tier> {
  const at = { endpoint: bucket.endpoint, bucket: bucket.name };
  const tier = await openS3(bench, { ...at, ...settings } as Parameters<typeof openS3>[1], options);
  tiers.push(tier);
  return tier;
}

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

const settingsKey = 'kvtier/v1/settings';
const packsBelow = 'kvtier/v1/packs/';
const space = namespaceNamed('one');
const payloadBytes = 2_000;
const write = (tier: S3Tier, name: string) => bench.write(tier, space, [hashNamed(name)], payloadBytes);
const read = (tier: S3Tier, name: string) => bench.read(tier, space, [hashNamed(name)], payloadBytes);
const packs = (): string[] => [...bucket.objects.keys()].filter((key) => key.startsWith(packsBelow)).sort();
const count = (request: string): number => bucket.requests.filter((each) => each === request).length;

/** What another node has left there, a pack for each block. */
async function written(names: readonly string[] = ['held'], settings: object = {}): Promise<void> {
  const writer = await open(settings);
  for (const name of names) expect(await write(writer, name)).toEqual(['stored']);
  await writer.close();
}

describe('a bucket that can be read, and refuses writes', () => {
  beforeEach(() => {
    vi.spyOn(Math, 'random').mockReturnValue(0); // no wait is longer than it must be
  });

  const full = 'has no room left for bucket b';
  const refuses = 'refuses writes to bucket b';
  it.each([
    ['its quota is used up', 'PUT', 403, 'QuotaExceeded', full],
    ['its quota, by MinIO, is used up', 'PUT', 400, 'XMinioAdminBucketQuotaExceeded', full],
    ['its disks are full', 'PUT', 507, 'XMinioStorageFull', full],
    ['these credentials may only read', 'PUT and DELETE', 403, 'AccessDenied', refuses],
    ['these credentials may not delete', 'DELETE', 403, 'AccessDenied', refuses],
    ['its gateway allows reads alone', 'PUT and DELETE', 405, 'MethodNotAllowed', refuses],
    ['its gateway knows reads alone', 'PUT and DELETE', 501, 'NotImplemented', ''],
  ])('opens though %s, and stores when it may', async (_, methods, status, word, because) => {
    await written();
    const refused = methods.startsWith('PUT') ? 'PUT v1/settings' : 'DELETE v1/packs/none';
    const requests = (): number => count(refused.replace('v1', 'kvtier/v1'));
    const before = requests();
    bucket.fault = ({ method }) => (methods.includes(method) ? { status, word } : undefined);
    const lines: object[] = [];
    const log = { ...silentLog, warn: (fields: object, message: string) => void lines.push({ ...fields, message }) };
    const tier = await open({}, { log });
    const answer = `s3: ${refused}: HTTP ${status} ${word}`;
    const remedy =
      because === full ? 'raise its quota, or make room' : 'allow PutObject and DeleteObject below s3://b/kvtier/';
    const reason = because === '' ? answer : `s3: ${bucket.endpoint} ${because} (${answer}); ${remedy}`;
    const message = 'the s3 tier refuses writes until its server takes one; what it holds is read';
    expect(lines).toEqual([{ tier: 's3', reason, message }]);
    expect(tier.stats()).toMatchObject({ inService: true, outOfServiceReason: `writes are refused: ${reason}` });
    expect(tier.stats().detail).toMatchObject({ writes_refused: 1 });
    expect(requests()).toBe(before + 1); // what says no is not asked again
    await until(() => tier.stats().blocks === 1, 'what the pack holds');
    expect(await read(tier, 'held')).toEqual(['ready']);
    expect(await write(tier, 'new')).toEqual(['refused']);
    await until(() => write(tier, 'new').then(() => requests() > before + 1), 'another try');
    expect(tier.stats()).toMatchObject({ inService: true, outOfServiceReason: `writes are refused: ${reason}` });
    expect([packs().length, await read(tier, 'held')]).toEqual([1, ['ready']]);
    bucket.fault = () => undefined;
    await until(async () => (await write(tier, 'new'))[0] === 'stored', 'a write');
    expect(tier.stats()).toMatchObject({ inService: true, outOfServiceReason: '' });
    expect([tier.stats().detail!.writes_refused, packs().length]).toEqual([0, 2]);
  });

  it.each([
    ['answers writes with 500', 500],
    ['does not answer writes', new Promise(() => {})],
  ])('opens though it %s', async (_, fault) => {
    await written();
    bucket.fault = ({ method }) => (method === 'PUT' ? fault : undefined);
    const tier = await open({ timeLimitMs: 3_000, idleLimitMs: 1_000, refreshMs: 50 });
    expect(tier.stats().detail).toMatchObject({ writes_refused: 1 });
    await until(() => tier.stats().blocks === 1, 'what the pack holds');
    expect(await read(tier, 'held')).toEqual(['ready']);
  });

  it.each([
    ['are full', { status: 507, word: 'XMinioStorageFull' }, 2],
    ['fail for a while', 500, 12], // tried six times each
  ])('gives up none of its packs where its disks %s, and then replaces them', async (_, fault, requests) => {
    const bytes = 2 * (96 << 10) + 4096;
    await written(['a', 'b'], { bytes });
    // As servers do that look at conditions before they look for room.
    bucket.fault = ({ replaces }) => (replaces ? fault : undefined);
    const tier = await open({ bytes });
    await until(() => tier.stats().blocks === 2, 'what the packs hold');
    const [before, deletes] = [packs(), count(`DELETE ${packsBelow}00000000`)];
    expect(tier.stats().detail).toMatchObject({ writes_refused: 1 });
    const asked = count(`PUT ${settingsKey}`);
    await until(() => write(tier, 'new').then(() => count(`PUT ${settingsKey}`) > asked + requests), 'more tries');
    expect([packs(), tier.stats().evictions, tier.stats().detail!.writes_refused]).toEqual([before, 0, 1]);
    expect([await read(tier, 'a'), await read(tier, 'b')]).toEqual([['ready'], ['ready']]);
    bucket.fault = () => undefined;
    await until(async () => (await write(tier, 'new'))[0] === 'stored', 'a write');
    expect([packs(), tier.stats().evictions]).toEqual([before, 1]);
    expect(count(`DELETE ${packsBelow}00000000`)).toBe(deletes); // in one request
  });

  it('is found to be full by its first packs where it takes no If-Match, and says that before it looks for room', async () => {
    const bytes = 2 * (96 << 10) + 4096;
    await written(['a', 'b'], { bytes });
    bucket.fault = ({ method, key, replaces }) => {
      if (replaces) return 501;
      return method === 'PUT' && key.startsWith(packsBelow) ? { status: 507, word: 'XMinioStorageFull' } : undefined;
    };
    const tier = await open({ bytes });
    await until(() => tier.stats().blocks === 2, 'what the packs hold');
    expect(tier.stats().detail).toMatchObject({ writes_refused: 0 });
    for (let i = 0; i < 5; i++) {
      expect(tier.stats().detail).toMatchObject({ writes_refused: 0 });
      expect(await write(tier, `new ${i}`)).toEqual(['refused']);
    }
    expect(tier.stats().detail).toMatchObject({ writes_refused: 1 });
    expect([packs().length, tier.stats().evictions]).toEqual([1, 1]);
  });

  it.each([
    [
      'ignores conditions',
      () => {
        bucket.keepsConditions = false;
      },
      /ignores If-None-Match/,
    ],
    [
      'was divided otherwise meanwhile',
      () => bucket.put(settingsKey, Buffer.from('{"version":1,"packBytes":1,"packCount":2}')),
      /share a budget of .*"packCount":2}, this one has /,
    ],
  ])('stores nothing where the server, when it takes writes again, %s', async (_, change, reason) => {
    await written();
    const fault = { status: 403, word: 'QuotaExceeded' };
    bucket.fault = ({ method }) => (method === 'PUT' ? fault : undefined);
    const errors: object[] = [];
    const log = { ...silentLog, error: (fields: object, message: string) => void errors.push({ ...fields, message }) };
    const tier = await open({}, { log });
    await until(() => tier.stats().blocks === 1, 'what the pack holds');
    change();
    bucket.fault = () => undefined;
    const isSaid = (): boolean => reason.test(tier.stats().outOfServiceReason);
    await until(
      () =>
        write(tier, 'new')
          .then((statuses) => expect(statuses).toEqual(['refused']))
          .then(isSaid),
      'why',
    );
    // Nobody but who reads the log would mend it: said, and once for all tries.
    const requests = bucket.requests.length;
    await until(() => write(tier, 'new').then(() => bucket.requests.length > requests), 'another try');
    const message = 'the s3 tier takes no writes until this is mended; what it holds is read';
    expect(errors).toEqual([{ tier: 's3', reason: expect.stringMatching(reason), message }]);
    expect(tier.stats().detail).toMatchObject({ writes_refused: 1 });
    expect([packs().length, await read(tier, 'held')]).toEqual([1, ['ready']]);
  });

  it.each([
    ['whose server takes writes', undefined],
    ['whose server refuses writes', 403],
    ['whose server fails when it is to write', 500],
    ['whose server has not heard of conditions', undefined],
  ])('is asked for nothing but reads by a node that writes nothing: one %s', async (what, fault) => {
    await written();
    bucket.keepsConditions = !what.endsWith('conditions');
    bucket.fault = ({ method }) => (method === 'GET' ? undefined : fault);
    const asked = bucket.requests.length;
    const lines: string[] = [];
    const told = (_: object, message: string): void => void lines.push(message);
    const tier = await open({}, { isReadOnly: true, log: { ...silentLog, warn: told, error: told } });
    expect(tier.supports.writable).toBe(false);
    await until(() => tier.stats().blocks === 1, 'what the pack holds');
    expect([await read(tier, 'held'), await write(tier, 'held'), await write(tier, 'new')]).toEqual([
      ['ready'],
      ['held'],
      ['refused'],
    ]);
    expect(tier.stats()).toMatchObject({ inService: true, outOfServiceReason: '', detail: { writes_refused: 0 } });
    await tier.close(); // whatever was gathered would go out
    expect(bucket.requests.slice(asked).filter((request) => !request.startsWith('GET '))).toEqual([]);
    expect([lines, packs().length]).toEqual([[], 1]);
  });
});

it('a write that was not tried, for a server that refuses reads, is no word of permissions to write', async () => {
  const plan = planS3({ bucket: 'b', bytes: 1 << 20, packBytes: 4096, endpoint: 'http://127.0.0.1:1' });
  const message = 's3: PUT v1/settings: not tried: s3: LIST kvtier/v1/packs/: HTTP 403 AccessDenied';
  const { packBytes, packCount } = plan;
  const api = {
    quotedEtags: false,
    list: async () => [{ key: settingsKey.replace('kvtier/', ''), etag: 'e' }],
    getSmall: async () => Buffer.from(JSON.stringify({ version: 1, packBytes, packCount })),
    put: async () => {
      throw new KvError('IO', message, { retry: true });
    },
  } as unknown as S3Api;
  await expect(checkWrites(api, plan, performance.now() + 1_000)).rejects.toMatchObject({ code: 'IO', message });
  plan.secrets.close();
});

it.each(['', 'GET'])('a bucket whose settings are there is refused where it cannot be read: %s', async (method) => {
  await written();
  // A listing has no key.
  bucket.fault = (request) => (request.method === 'GET' && (request.key === '') === (method === '') ? 403 : undefined);
  const what = method === '' ? 'LIST kvtier/v1/settings' : 'GET v1/settings';
  await expect(open()).rejects.toMatchObject({
    code: 'CONFIG',
    message: `s3: ${bucket.endpoint} refuses the credentials for bucket b (s3: ${what}: HTTP 403 Fault); correct them`,
  });
});

it('nobody who may not write is the first: it waits for one who has made the settings', async () => {
  bucket.fault = ({ method }) => (method === 'GET' ? undefined : { status: 403, word: 'AccessDenied' });
  await expect(open()).rejects.toMatchObject({
    ...{ code: 'IO', retry: true },
    message: `s3: ${bucket.endpoint} refuses writes to bucket b (s3: PUT v1/settings: HTTP 403 AccessDenied); allow PutObject and DeleteObject below s3://b/kvtier/, or start a node first that may write`,
  });
  expect(bucket.objects.size).toBe(0);
  bucket.fault = () => undefined;
  await written();
  bucket.fault = ({ method }) => (method === 'GET' ? undefined : { status: 403, word: 'AccessDenied' });
  const tier = await open();
  await until(() => tier.stats().blocks === 1, 'what the pack holds');
  expect(await read(tier, 'held')).toEqual(['ready']);
});

it('of first nodes with other numbers at one time one opens', async () => {
  const sizes = [1, 2, 3, 4].map((megabytes) => megabytes << 20);
  const ends = await Promise.allSettled(sizes.map((bytes) => open({ bytes })));
  expect(ends.map(({ status }) => status).sort()).toEqual(['fulfilled', 'rejected', 'rejected', 'rejected']);
  const message = expect.stringContaining('share a budget of');
  for (const end of ends) if (end.status === 'rejected') expect(end.reason).toMatchObject({ code: 'CONFIG', message });
});

it('a server that ignores conditions is refused, by the first node and by each later one', async () => {
  bucket.keepsConditions = false;
  const ignores = { code: 'CONFIG', message: expect.stringContaining('ignores If-None-Match') };
  await expect(open()).rejects.toMatchObject(ignores);
  await expect(open()).rejects.toMatchObject(ignores);
});
