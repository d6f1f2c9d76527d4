import { readFileSync } from 'node:fs';
import { describe, expect, it } from 'vitest';
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
  [{ placement: { disk: { write: 'sideways' } } }, /^test: placement\.disk\.write: write one of through, /],
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

it('KV events for llm-d are published where its router reaches them, and beside those of vLLM', () => {
  const page = textOf('docs/routing.md');
  const example = page.slice(page.indexOf('## In front of llm-d')).match(/```json\n([^`]+)```/)![1]!;
  const { kvEvents } = parseConfig(cacheNodeSchema, { ...node, ...JSON.parse(example) }, 'routing.md');
  const { endpoint, replayEndpoint, topic } = kvEvents!;
  const [, host] = /^kv@([^:@]+):\d+@[^@]+$/.exec(topic)!;
  const pod = textOf('infra/kubernetes/sidecar.yaml');
  const engine = /--kv-events-config=[^}]*"replay_endpoint"[^}]*}/.exec(pod)![0];
  for (const place of [endpoint, replayEndpoint!]) {
    const [, bound, port] = /^tcp:\/\/(.+):(\d+)$/.exec(place)!;
    expect(['*', '0.0.0.0', host]).toContain(bound);
    expect(engine).not.toContain(`tcp://*:${port}`);
    expect(pod).toContain(`tcp://*:${port}`); // the same as in the manifest
  }
});

it('every key of the cache node stands in its reference', () => {
  const text = textOf('docs/cache-node.md');
  const missing = Object.keys(cacheNodeSchema.shape).filter((key) => !text.includes(`\`${key}\``));
  expect(missing).toEqual([]);
});

describe('docker-compose.yml', () => {
  const schemas = {
    'cache-node': cacheNodeSchema,
    'engine-worker': engineWorkerSchema,
    coordinator: coordinatorSchema,
  };
  /** Each service's own lines, by its name. */
  const services = new Map(
    [...textOf('docker-compose.yml').matchAll(/^ {2}([\w-]+):\n((?: {4}.*\n)+)/gm)].map(([, name, text]) => [
      name!,
      text!,
    ]),
  );
  const configOf = (name: string): unknown =>
    JSON.parse(/KVTIER_CONFIG: >-\n((?: {8,}.*\n)+)/.exec(services.get(name)!)![1]!);

  it('has valid configurations', () => {
    const programs = {
      'cache-node': ['cache-node', 'prefill-node', 'decode-node'],
      'engine-worker': ['engine-worker', 'prefill', 'decode'],
      coordinator: ['coordinator', 'pd-coordinator'],
    } as const;
    const configured = [...services].filter(([, text]) => text.includes('KVTIER_CONFIG')).map(([name]) => name);
    expect(configured.toSorted()).toEqual(Object.values(programs).flat().toSorted());
    for (const [program, names] of Object.entries(programs))
      for (const name of names) parseConfig<unknown>(schemas[program as keyof typeof programs], configOf(name), name);
    expect(parseConfig(cacheNodeSchema, configOf('cache-node'), 'node').redis).not.toBeNull();
  });

  it('has prefill and decode apart: what the coordinator is told is where each one listens', () => {
    const { discovery } = parseConfig(coordinatorSchema, configOf('pd-coordinator'), 'coordinator');
    if (discovery?.kind !== 'static') throw new Error('not static');
    expect(discovery.workers.map(({ role }) => role)).toEqual(['prefill', 'decode']);
    for (const { role, address, events, node } of discovery.workers) {
      const worker = parseConfig(engineWorkerSchema, configOf(role), role);
      const its = parseConfig(cacheNodeSchema, configOf(node!), node!);
      expect(worker).toMatchObject({ listen: address, kvEvents: { endpoint: events!.endpoint } });
      expect(worker.cacheNodeSocket).toBe(its.socketPath);
      const record = discovery.nodes.find(({ name }) => name === node)!;
      expect(its.kvEvents).toMatchObject({ endpoint: record.events!.endpoint });
      expect(record.peer).toEqual({ host: node, port: its.peers!.listen!.port });
      expect(its.peers!.peers).toEqual(discovery.nodes.filter((other) => other !== record).map(({ peer }) => peer));
    }
  });
});
