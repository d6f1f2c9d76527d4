/** What of discovery and membership the configuration alone can refuse. */
import { describe, expect, it } from 'vitest';
import { cacheNodeSchema, discoverySchema, engineWorkerSchema, parseConfig } from './index.ts';

const redis = { servers: ['redis://127.0.0.1:6379'] };

it('defaults of the three ways', () => {
  expect(parseConfig(discoverySchema, { kind: 'static' }, 'test')).toEqual({ kind: 'static', workers: [], nodes: [] });
  expect(parseConfig(discoverySchema, { kind: 'redis', redis }, 'test')).toEqual({
    kind: 'redis',
    redis: {
      ...{
        mode: 'single',
        database: 0,
        keyPrefix: 'kvtier:',
        timeLimitMs: 500,
        reloadMs: 10_000,
        trustedNetwork: false,
      },
      ...redis,
    },
    pollMs: 200,
  });
  expect(parseConfig(discoverySchema, { kind: 'kubernetes' }, 'test')).toEqual({
    ...{ kind: 'kubernetes', pods: 'llm-d.ai/inference-serving=true', endpointSlices: null, ports: [8000] },
    ...{ scheme: 'http', eventsPort: 5557, replayPort: null, eventsTopic: '', timeLimitMs: 5_000, watchSeconds: 30 },
  });
});

it('defaults of membership', () => {
  const worker = { modelDir: '/m', servedName: 'm', listen: 'unix:/e', cacheNodeSocket: null };
  const membership = { redis, name: 'a' };
  expect(parseConfig(engineWorkerSchema, { ...worker, membership }, 'test').membership).toMatchObject({
    ...{ name: 'a', leaseMs: 1_500, role: 'both', node: null, revision: '' },
  });
  const node = { socketPath: '/s', dataDir: '/d', arena: { bytes: 1 << 20 }, disk: null };
  expect(parseConfig(cacheNodeSchema, { ...node, membership }, 'test').membership).toMatchObject({
    ...{ name: 'a', leaseMs: 1_500 },
  });
});

describe('the list of members decides where prompts go', () => {
  const parse = (change: object): unknown =>
    parseConfig(discoverySchema, { kind: 'redis', redis: { ...redis, ...change } }, 'test');

  it.each([
    [['redis://10.0.0.1:6379'], {}],
    [['rediss://10.0.0.1:6379'], {}],
    [['redis://:word@10.0.0.1:6379'], {}],
    [['redis://10.0.0.1:6379'], { password: 'word' }],
  ])('%j %j is refused beyond loopback', (servers, change) => {
    expect(() => parse({ servers, ...change })).toThrow(
      'test: redis.servers.0: 10.0.0.1 is not loopback: use rediss: and a password, or say "trustedNetwork": true; correct it and start again',
    );
  });

  it.each([
    [['redis://localhost:1', 'redis://[::1]:2', 'redis://127.9.9.9'], { mode: 'cluster' }],
    [['unix:/run/redis.sock'], {}],
    [['rediss://:word@10.0.0.1'], {}],
    [['rediss://redis.example'], { passwordFile: '/secret' }],
    [['redis://10.0.0.1'], { trustedNetwork: true }],
  ])('%j %j is taken', (servers, change) => {
    expect(parse({ servers, ...change })).toMatchObject({ redis: { servers } });
  });

  it('says what the servers need, as the tier does', () => {
    expect(() => parse({ mode: 'sentinel' })).toThrow(/^test: redis\.masterName: mode sentinel needs/);
    expect(() => parse({ password: 'a', passwordFile: '/b' })).toThrow(/^test: redis\.passwordFile: give password or/);
  });
});

describe('a worker of the configuration has an address that can be asked', () => {
  const parse = (kind: string, address: string): unknown =>
    parseConfig(discoverySchema, { kind: 'static', workers: [{ name: 'a', kind, address }] }, 'test');
  const origin = 'http://HOST:PORT or https://HOST:PORT';
  const place = 'unix:/PATH or HOST:PORT';

  it.each([
    ['openai', '10.0.0.1:8000', origin],
    ['openai', 'vllm:8000', origin],
    ['openai', 'unix:/run/vllm.sock', origin],
    ['openai', 'http://10.0.0.1:8000/v1', origin],
    ['openai', 'http://10.0.0.1:8000?a', origin],
    ['kvtier', 'http://10.0.0.1:50051', place],
    ['kvtier', '10.0.0.1', place],
    ['kvtier', 'unix:', place],
  ])('%s at %s is refused', (kind, address, what) =>
    expect(() => parse(kind, address)).toThrow(`test: workers.0.address: write ${what}; correct it and start again`),
  );

  it.each([
    ['openai', 'http://10.0.0.1:8000'],
    ['openai', 'https://[fd00::1]:8000/'],
    ['kvtier', 'unix:/run/engine.sock'],
    ['kvtier', '[::1]:50051'],
    ['kvtier', 'engine-1:50051'],
  ])('%s at %s is taken', (kind, address) =>
    expect(parse(kind, address)).toMatchObject({ workers: [{ kind, address }] }),
  );
});
