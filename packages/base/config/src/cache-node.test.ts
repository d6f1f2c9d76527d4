import { readFileSync } from 'node:fs';
import { expect, it } from 'vitest';
import { cacheNodeSchema, coordinatorSchema, engineWorkerSchema, parseConfig } from './index.ts';

const node = { socketPath: '/s', dataDir: '/d', arena: { bytes: 1 << 20 }, disk: { bytes: 8 << 20 } };
const redis = { servers: ['redis://127.0.0.1:6379'], bytes: 1 << 20 };

it('a tier that is placed is written through unless it says otherwise', () => {
  const config = parseConfig(cacheNodeSchema, { ...node, redis, placement: { redis: { codec: 'lz4' } } }, 'test');
  expect(config.placement).toEqual({
    redis: { write: 'through', admission: 'second-touch', promote: true, codec: 'lz4' },
  });
  expect(config.redis).toMatchObject({ mode: 'single', bytes: 1 << 20 });
});

it('quotas are per tenant and tier; "*" is everybody else', () => {
  const quotas = { a: { arena: 1000, disk: 5000 }, '*': { arena: 1 << 20 } };
  expect(parseConfig(cacheNodeSchema, { ...node, quotas }, 'test').quotas).toEqual(quotas);
});

it.each([
  [{ placement: { disk: { write: 'sideways' } } }, /^test: placement\.disk\.write: .*"through"/],
  [{ placement: { disk: { admission: 'never' } } }, /^test: placement\.disk\.admission: /],
  [{ placement: { disk: { codec: 'zip' } } }, /^test: placement\.disk\.codec: /],
  [{ placement: { disk: { ttlSeconds: 0 } } }, /^test: placement\.disk\.ttlSeconds: /],
  [{ placement: { tape: {} } }, /^test: placement: .*"tape"/],
  [{ placement: { redis: {} } }, /^test: placement\.redis: there is no redis tier; configure "redis" or remove this/],
  [{ arena: { bytes: 1 << 20, eviction: 'mru' } }, /^test: arena\.eviction: /],
  [{ redis: { ...redis, servers: ['http://x'] } }, /^test: redis\.servers\.0: write redis:/],
  [{ redis: { ...redis, bytes: 10 } }, /^test: redis\.bytes: /],
  [{ quotas: { a: { arena: 1 << 21 } } }, /^test: quotas\.a\.arena: more than the 1048576 bytes of the arena/],
  [{ quotas: { a: { tape: 1 } } }, /^test: quotas\.a: .*"tape"/],
  [{ disk: null, quotas: { a: { disk: 1 } } }, /^test: quotas\.a\.disk: there is no disk tier/],
])('%j is refused with one line that names the place', (change, message) => {
  const parse = (): unknown => parseConfig(cacheNodeSchema, { ...node, ...change }, 'test');
  expect(parse).toThrow(message);
  expect(parse).toThrow(/^[^\n]*$/);
});

const textOf = (file: string): string => readFileSync(new URL(`../../../../${file}`, import.meta.url), 'utf8');

it('the example of the docs is one, with every tier', () => {
  const config = parseConfig(cacheNodeSchema, JSON.parse(textOf('infra/config/cache-node.json')), 'example');
  expect([config.disk, config.peers, config.redis, config.s3, config.kvEvents]).not.toContain(null);
});

it('every key of the cache node stands in its reference', () => {
  const text = textOf('docs/cache-node.md');
  const missing = Object.keys(cacheNodeSchema.shape).filter((key) => !text.includes(`\`${key}\``));
  expect(missing).toEqual([]);
});

it('the configurations in docker-compose.yml are valid', () => {
  const texts = [...textOf('docker-compose.yml').matchAll(/KVTIER_CONFIG: >-\n((?: {8,}.*\n)+)/g)].map(
    ([, json]) => json!,
  );
  const [node, worker, coordinator] = texts.map((text) => JSON.parse(text));
  expect(parseConfig(cacheNodeSchema, node, 'node').redis).not.toBeNull();
  parseConfig(engineWorkerSchema, worker, 'worker');
  parseConfig(coordinatorSchema, coordinator, 'coordinator');
});
