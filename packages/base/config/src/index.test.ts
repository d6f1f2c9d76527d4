import { mkdtempSync, rmSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { afterAll, describe, expect, it } from 'vitest';
import {
  cacheNodeSchema,
  checkSocketFolder,
  coordinatorSchema,
  coordinatorServiceSchema,
  engineWorkerSchema,
  parseConfig,
  readServiceConfig,
} from './index.ts';

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
      operations: null,
      logLevel: 'info',
    });
    expect(parseConfig(cacheNodeSchema, { ...node, disk: null }, 'test').disk).toBeNull();
  });

  it('of the engine worker', () => {
    const parsed = parseConfig(engineWorkerSchema, worker, 'test');
    expect(parsed.maxStepTokens).toBeUndefined();
    expect(parsed).toMatchObject({
      backend: 'auto',
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
      trustedNetwork: false,
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

  it('of the engine worker: loads end after a minute at most, whatever more is asked for', () => {
    const of = (loadDeadlineMs: number) => parseConfig(engineWorkerSchema, { ...worker, loadDeadlineMs }, 'test');
    const asked = [1, 60_000, 60_001, 600_000];
    expect(asked.map((ms) => of(ms).loadDeadlineMs)).toEqual([1, 60_000, 60_000, 60_000]);
    for (const ms of [0, 600_001]) expect(() => of(ms)).toThrow('loadDeadlineMs');
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

describe('bodies of the coordinator', () => {
  const of = (limits: object) => parseConfig(coordinatorSchema, { port: 0, engine: 'unix:/e', limits }, 'test').limits;

  it('have bounds, which have bounds', () => {
    expect(of({})).toMatchObject({ bodyBytes: 16_777_216, largeBodyMs: 20_000 });
    const most = { bodyBytes: 134_217_728, largeBodyMs: 600_000 };
    for (const limits of [{ bodyBytes: 65_536, largeBodyMs: 1_000 }, most]) expect(of(limits)).toMatchObject(limits);
    for (const bodyBytes of [65_535, 134_217_729]) expect(() => of({ bodyBytes })).toThrow('limits.bodyBytes');
    for (const largeBodyMs of [999, 600_001]) expect(() => of({ largeBodyMs })).toThrow('limits.largeBodyMs');
  });

  it('can be held', () => {
    expect(of({ bodyBytes: 33_554_432, heldBytes: 33_554_432 })).toMatchObject({ heldBytes: 33_554_432 });
    expect(() => of({ bodyBytes: 33_554_432, heldBytes: 33_554_431 })).toThrow(
      'test: limits.heldBytes: is less than bodyBytes, so that the largest bodies would always be refused; correct it and start again',
    );
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

describe('addresses', () => {
  const tls = { certFile: '/c', keyFile: '/k', clientCaFile: '/a' };
  const listens = (listen: string) => () => parseConfig(engineWorkerSchema, { ...worker, listen, tls }, 'test');

  it.each(['unix:/run/e.sock', '127.0.0.1:0', 'host-3.example:8452', '[::1]:8452'])('%s is one', (listen) =>
    expect(listens(listen)().listen).toBe(listen),
  );

  it.each(['8452', 'unix:', 'host', 'host:', '::1:8452', 'http://host:1', '/run/e.sock'])('%j is none', (listen) => {
    expect(listens(listen)).toThrow('test: listen: write unix:/PATH or HOST:PORT; correct it and start again');
    expect(() => parseConfig(coordinatorSchema, { port: 0, engine: listen }, 'test')).toThrow(
      /^test: engine: write unix:/,
    );
  });

  it('a socket in a folder that is not there is told by what was written', () => {
    const address = `unix:${folder}/nope/e.sock`;
    expect(() => checkSocketFolder('listen', address)).toThrow(
      `listen: ${address}: folder ${folder}/nope does not exist; make it, or name another`,
    );
    for (const there of [`unix:${folder}/e.sock`, 'nope/x:1'])
      expect(() => checkSocketFolder('listen', there)).not.toThrow();
  });
});

it('a coordinator that starts has workers, in one way', () => {
  const of = (more: object) => () => parseConfig(coordinatorServiceSchema, { port: 0, ...more }, 'test');
  expect(of({})).toThrow(
    'test: engine: is missing, and so is "discovery": name one engine worker, or how workers are found; correct',
  );
  expect(of({ engine: 'unix:/e', discovery: { kind: 'static' } })).toThrow('test: discovery: there is "engine", too');
  expect(of({ discovery: { kind: 'static' } })().discovery).toMatchObject({ kind: 'static' });
});

it('a coordinator that starts has a key for publishers that have one, as far as its configuration names them', () => {
  const keyed = { endpoint: 'tcp://10.0.0.1:1', serverKey: 'a'.repeat(40) };
  const discovery = {
    kind: 'static',
    workers: [{ name: 'w', address: 'unix:/w' }],
    nodes: [{ name: 'n', events: keyed }],
  };
  const of = (kvEvents: object) => () =>
    parseConfig(coordinatorServiceSchema, { port: 0, discovery, kvEvents }, 'test').kvEvents;
  expect(of({ trustedNetwork: true })).toThrow('test: kvEvents: n publishes with a CURVE key, and "curve" names none');
  expect(of({ curve: { secretKeyFile: '/k' } })()).toMatchObject({ curve: { secretKeyFile: '/k' } });
});

describe('where a service finds its configuration', () => {
  it('a file on the command line goes before the environment', () => {
    const file = join(folder, 'node.json');
    writeFileSync(file, JSON.stringify({ ...node, dataDir: '/from-file' }));
    const env = { KVTIER_CONFIG: JSON.stringify({ ...node, dataDir: '/from-env' }) };
    expect(readServiceConfig(cacheNodeSchema, file, env).dataDir).toBe('/from-file');
    expect(readServiceConfig(cacheNodeSchema, undefined, env).dataDir).toBe('/from-env');
  });

  it('says what is wrong with either', () => {
    const broken = join(folder, 'broken.json');
    writeFileSync(broken, '{');
    const read =
      (file: string | undefined, env: NodeJS.ProcessEnv = {}) =>
      () =>
        readServiceConfig(cacheNodeSchema, file, env);
    expect(read(undefined)).toThrow('command line: no configuration; give --config FILE (JSON)');
    expect(read(join(folder, 'none'))).toThrow(/none: cannot be read \(ENOENT/);
    expect(read(broken)).toThrow(/broken\.json: not valid JSON/);
    expect(read(undefined, { KVTIER_CONFIG: 'x' })).toThrow(/^KVTIER_CONFIG: not valid JSON/);
    expect(read(undefined, { KVTIER_CONFIG: '{"a": 1' })).toThrow(/^KVTIER_CONFIG: not valid JSON/);
    // V8 quotes what it reads.
    for (const text of [
      '{"redis":{"password":hunter2hunter2}}',
      '{"secretAccessKey":"hunter2" "hunter2"}',
      '{\n "a": "hunter2\n"}',
    ])
      expect(read(undefined, { KVTIER_CONFIG: text })).toThrow(
        /^KVTIER_CONFIG: not valid JSON( \(line \d, column \d+\))?; correct it$/,
      );
  });
});
