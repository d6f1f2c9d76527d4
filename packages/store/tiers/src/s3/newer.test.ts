/**
 * A newer program beside this one, on the same bucket: what it wrote and this one cannot read is a miss here, and its packs stay. Its
 * settings take the tier out of service, not the node.
 */
import { headerBytes } from '@kvtier/identity';
import { afterEach, beforeEach, describe, expect, it } from 'vitest';
import { until } from '../../../../../infra/redis/servers.ts';
import { newerHeaders, resealed } from '../kit/testing/newer.ts';
import { hashNamed, namespaceNamed, TestBench } from '../kit/testing/objects.ts';
import type { S3Tier } from './s3-tier.ts';
import { FakeBucket } from './testing/fake-bucket.ts';
import { openS3 } from './testing/s3.ts';

const payloadBytes = 2_000;
const objectBytes = headerBytes + payloadBytes;
const space = namespaceNamed('one');
const chain = Array.from({ length: 4 }, (_, i) => hashNamed(i));
const packsBelow = 'kvtier/v1/packs/';
const settingsKey = 'kvtier/v1/settings';

let bench: TestBench;
let bucket: FakeBucket;
const tiers: S3Tier[] = [];
beforeEach(async () => {
  bench = new TestBench();
  bucket = await FakeBucket.start();
});
afterEach(async () => {
  for (const tier of tiers.splice(0)) {
    tier.checkIntegrity();
    await tier.close();
  }
  await bucket.stop();
  bench.dispose();
});

async function open(): Promise<S3Tier> {
  const tier = await openS3(bench, { endpoint: bucket.endpoint, bucket: bucket.name });
  tiers.push(tier);
  return tier;
}

const packKeys = (): string[] => [...bucket.objects.keys()].filter((key) => key.startsWith(packsBelow));

/** Another node's blocks, in one pack; returns its key. */
async function written(): Promise<string> {
  const writer = await open();
  expect(await bench.write(writer, space, chain, payloadBytes)).toEqual(chain.map(() => 'stored'));
  const [key, ...others] = packKeys();
  expect(others).toEqual([]);
  return key!;
}

describe.each(newerHeaders)('a block with %s', (_, change) => {
  it('is a miss, counted apart, and its pack stays when nothing else of it is listed any more', async () => {
    const key = await written();
    const body = Buffer.from(bucket.objects.get(key)!.body);
    const at = body.length - objectBytes; // the last one
    resealed(body.subarray(at), change);
    bucket.put(key, body);
    const tier = await open();
    await until(() => tier.stats().blocks === 4, 'what the pack holds');
    const statuses = ['ready', 'ready', 'ready', 'missing'];
    expect(await bench.read(tier, space, chain, payloadBytes)).toEqual(statuses);
    expect(tier.stats()).toMatchObject({ inService: true, corrupt: 0, blocks: 3, detail: { foreign_blocks: 1 } });
    expect(tier.remove(space, chain, 'corrupt')).toBe(3);
    await tier.close(); // what it has begun has ended
    expect(packKeys()).toEqual([key]);
    expect(bucket.objects.get(key)!.body.equals(body)).toBe(true);
    expect(bucket.requests.filter((request) => request === `DELETE ${key}`)).toEqual([]);
  });
});

describe('settings', () => {
  it('of another version are no reason for a node not to start: the tier may be opened later', async () => {
    const key = await written();
    const ours = bucket.objects.get(settingsKey)!.body;
    bucket.put(settingsKey, Buffer.from('{"version":2,"packBytes":98304,"layout":"x"}'));
    await expect(open()).rejects.toMatchObject({
      ...{ code: 'CONFIG', retry: true },
      message: expect.stringMatching(
        /^s3: s3:\/\/b\/kvtier\/v1\/settings is of version 2, of another version of kvtier; .*prefix/,
      ),
    });
    expect(packKeys()).toEqual([key]);
    bucket.put(settingsKey, ours);
    const tier = await open();
    await until(() => tier.stats().blocks === 4, 'what the pack holds');
  });

  it.each([
    ['other numbers of this version', '{"version":1,"packBytes":1,"packCount":2}'],
    ['no settings', 'something else'],
    ['settings without a version', '{"packBytes":1}'],
    ['null', 'null'],
  ])('%s are a mistake, as ever', async (_, text) => {
    await written();
    bucket.put(settingsKey, Buffer.from(text));
    await expect(open()).rejects.toMatchObject({ code: 'CONFIG', retry: false });
  });
});
