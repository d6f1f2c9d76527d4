import { mkdtempSync, rmSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { afterAll, describe, expect, it } from 'vitest';
import { cacheNodeSchema, coordinatorSchema, engineWorkerSchema, parseConfig, readServiceConfig } from './index.ts';

const folder = mkdtempSync(join(tmpdir(), 'kvtier-config-'));
afterAll(() => rmSync(folder, { recursive: true, force: true }));

const node = { socketPath: '/s', dataDir: '/d', arena: { bytes: 1 << 20 }, disk: { bytes: 8 << 20 } };
const worker = { modelDir: '/m', servedName: 'm', listen: 'unix:/e', cacheNodeSocket: null, kvBytes: 1 << 20 };

describe('defaults', () => {
  it('of the cache node', () => {
    expect(parseConfig(cacheNodeSchema, node, 'test')).toEqual({
      ...node,
      group: null,
      arena: { bytes: 1 << 20, dir: '/dev/shm', eviction: 'lru' },
      disk: { bytes: 8 << 20, eviction: 'lru', ioBackend: 'auto' },
      redis: null,
      s3: null,
      peers: null,
      placement: {},
      quotas: {},
      kvEvents: null,
      membership: null,
      logLevel: 'info',
    });
    expect(parseConfig(cacheNodeSchema, { ...node, disk: null }, 'test').disk).toBeNull();
  });

  it('of the engine worker', () => {
    const parsed = parseConfig(engineWorkerSchema, worker, 'test');
    expect(parsed.maxStepTokens).toBeUndefined();
    expect(parsed).toMatchObject({
      blockTokens: 16,
      hashAlgorithm: 'sha256_cbor',
      hashSeed: 'vllm-none-hash',
      loadDeadlineMs: 5000,
      tenant: '',
      kvEvents: null,
      membership: null,
    });
    const kvEvents = { endpoint: 'tcp://127.0.0.1:5557' };
    expect(parseConfig(engineWorkerSchema, { ...worker, kvEvents }, 'test').kvEvents).toEqual({
      ...kvEvents,
      replayEndpoint: null,
      topic: '',
      bufferSteps: 10_000,
      bufferBytes: 64 * 2 ** 20,
      hwm: 10_000,
      maxQueueSize: 10_000,
      gatherMs: 5,
      intBlockHashes: true,
      encoding: 'map',
      curve: null,
    });
  });

  it('of the coordinator: on loopback, without a login', () => {
    expect(parseConfig(coordinatorSchema, { port: 0, engine: 'unix:/e' }, 'test')).toMatchObject({
      host: '127.0.0.1',
      ...{ tls: null, apiKeysFile: null, adminKeysFile: null, trustedNetwork: false, operations: null },
      drainMs: 2_000,
    });
  });

  it('of the coordinator: its answers end before its process has to', () => {
    const of = (drainMs: number) => parseConfig(coordinatorSchema, { port: 0, engine: 'unix:/e', drainMs }, 'test');
    expect([0, 6_000].map((drainMs) => of(drainMs).drainMs)).toEqual([0, 6_000]);
    for (const drainMs of [-1, 0.5, 6_001]) expect(() => of(drainMs)).toThrow(/^test: drainMs: /);
  });
});

describe('one line for the first problem, with its path', () => {
  it.each([
    [{ ...node, arena: { bytes: 5 } }, /^test: arena\.bytes: .*; correct it and start again$/],
    [{ ...node, arena: { bytes: '1' } }, /^test: arena\.bytes: /],
    [{ ...node, colour: 1 }, /^test: top level: .*colour/],
    [{ ...node, disk: { bytes: 1 } }, /^test: disk\.bytes: /],
    [{ ...node, logLevel: 'loud' }, /^test: logLevel: /],
    [null, /^test: top level: /],
  ])('%j', (value, message) => {
    expect(() => parseConfig(cacheNodeSchema, value, 'test')).toThrow(message);
    expect(() => parseConfig(cacheNodeSchema, value, 'test')).toThrow(expect.objectContaining({ code: 'CONFIG' }));
  });
});

describe('where a service finds its configuration', () => {
  const argv = (...rest: string[]): string[] => ['node', 'main.ts', ...rest];

  it('a file on the command line goes before the environment', () => {
    const file = join(folder, 'node.json');
    writeFileSync(file, JSON.stringify({ ...node, dataDir: '/from-file' }));
    const env = { KVTIER_CONFIG: JSON.stringify({ ...node, dataDir: '/from-env' }) };
    expect(readServiceConfig(cacheNodeSchema, argv('--config', file), env).dataDir).toBe('/from-file');
    expect(readServiceConfig(cacheNodeSchema, argv(), env).dataDir).toBe('/from-env');
  });

  it('says what is wrong with either', () => {
    const broken = join(folder, 'broken.json');
    writeFileSync(broken, '{');
    const read =
      (args: string[], env: NodeJS.ProcessEnv = {}) =>
      () =>
        readServiceConfig(cacheNodeSchema, args, env);
    expect(read(argv())).toThrow('command line: no configuration; give --config FILE (JSON)');
    expect(read(argv('--config'))).toThrow('command line: --config needs a file name');
    expect(read(argv('--config', join(folder, 'none')))).toThrow(/none: cannot be read \(ENOENT/);
    expect(read(argv('--config', broken))).toThrow(/broken\.json: not valid JSON/);
    expect(read(argv(), { KVTIER_CONFIG: 'x' })).toThrow(/^KVTIER_CONFIG: not valid JSON/);
    expect(read(argv(), { KVTIER_CONFIG: '{"a": 1' })).toThrow(/^KVTIER_CONFIG: not valid JSON/);
    // V8 quotes what it reads.
    for (const text of [
      '{"redis":{"password":hunter2hunter2}}',
      '{"secretAccessKey":"hunter2" "hunter2"}',
      '{\n "a": "hunter2\n"}',
    ])
      expect(read(argv(), { KVTIER_CONFIG: text })).toThrow(
        /^KVTIER_CONFIG: not valid JSON( \(line \d, column \d+\))?; correct it$/,
      );
  });
});
