/** What is said of a configuration that cannot work: where, and how to mend it. */
import { expect, it } from 'vitest';
import {
  cacheNodeSchema,
  configProblem,
  coordinatorSchema,
  engineWorkerSchema,
  keyPaths,
  parseConfig,
} from './index.ts';

const node = { socketPath: '/s', dataDir: '/d', arena: { bytes: 1 << 20 }, disk: null };
const said = (schema: typeof cacheNodeSchema | typeof coordinatorSchema, value: unknown): string => {
  try {
    parseConfig<unknown>(schema, value, 'FILE');
  } catch (error) {
    return (error as Error).message;
  }
  return 'nothing';
};

it.each<[string, object, string]>([
  ['the nearest key', { ...node, placment: {} }, 'FILE: top level: unknown key "placment"; did you mean "placement"?'],
  [
    'an unknown key before what is missing',
    { redis: { server: 'x' } },
    'FILE: redis: unknown key "server"; did you mean "servers"?',
  ],
  [
    'where a key belongs',
    { ...node, ioBackend: 'auto' },
    'FILE: top level: unknown key "ioBackend"; did you mean "disk.ioBackend"?',
  ],
  [
    'the keys of a place that has few',
    { ...node, arena: { bytes: 1 << 20, colour: 1 } },
    'FILE: arena: unknown key "colour"; its keys are bytes, dir, eviction; correct it and start again',
  ],
  [
    'of one of several kinds',
    { ...node, peers: { security: { encryption: 'none', secretfile: 'x' } } },
    'FILE: peers.security: unknown key "secretfile"; did you mean "secretFile"?',
  ],
  [
    'in one of a list',
    { ...node, disk: { bytes: 8 << 20, dirs: [{ dir: 'x', byte: 3 }] } },
    'FILE: disk.dirs.0: unknown key "byte"; did you mean "bytes"?',
  ],
  ['what is missing', { socketPath: '/s' }, 'FILE: dataDir: is required; correct it and start again'],
  [
    'what kind is missing',
    { ...node, peers: { security: {} } },
    'FILE: peers.security.encryption: is required; correct it and start again',
  ],
  [
    'another type',
    { ...node, dataDir: 3 },
    'FILE: dataDir: expected string, received number; correct it and start again',
  ],
  ['a name', { ...node, logLevel: 'wran' }, 'FILE: logLevel: did you mean "warn"?'],
  [
    'the names',
    { ...node, logLevel: 'loud' },
    'FILE: logLevel: write one of trace, debug, info, warn, error, silent; correct it and start again',
  ],
  [
    'bytes with a unit',
    { ...node, arena: { bytes: '16GiB' } },
    'FILE: arena.bytes: write a number of bytes, without a unit; correct it and start again',
  ],
  [
    'too little',
    { ...node, arena: { bytes: 5 } },
    'FILE: arena.bytes: write 1048576 or more; correct it and start again',
  ],
  [
    'a key of a record',
    { ...node, redis: { servers: ['redis://x'], bytes: 1 << 20, policies: { x: {} } } },
    'FILE: redis.policies.x: name a policy "default" or by 4 to 64 hex digits; correct it and start again',
  ],
])('tells %s', (_, value, line) => expect(said(cacheNodeSchema, value)).toBe(line));

it('tells of the coordinator what is missing, and the kinds of discovery', () => {
  expect(said(coordinatorSchema, { engine: 'unix:/e' })).toBe('FILE: port: is required; correct it and start again');
  expect(said(coordinatorSchema, { port: 70_000 })).toBe('FILE: port: write 65535 or less; correct it and start again');
  expect(said(coordinatorSchema, { port: 0, discovery: { kind: 'statc' } })).toBe(
    'FILE: discovery.kind: did you mean "static"?',
  );
  expect(said(coordinatorSchema, { port: 0, discovery: { kind: 'dns' } })).toBe(
    'FILE: discovery.kind: write one of static, redis, kubernetes; correct it and start again',
  );
});

it('tells nothing of what was written but names of keys', () => {
  const secret = 'hunter2';
  const redis = { servers: ['redis://x'], bytes: 1 << 20, password: secret };
  for (const value of [
    { ...node, redis: { ...redis, passwordFile: secret } },
    { ...node, redis: { ...redis, mode: secret } },
    { ...node, redis: { ...redis, servers: [`http://:${secret}@x`] } },
    { ...node, redis: { ...redis, password: [secret] } },
  ])
    expect(said(cacheNodeSchema, value)).toMatch(/^(?!.*hunter2)FILE: redis\./);
});

it('a problem is told apart from its place', () => {
  expect(configProblem(cacheNodeSchema, node)).toBeUndefined();
  expect(configProblem(cacheNodeSchema, { ...node, s3: {} })).toEqual({ path: ['s3', 'bucket'], what: 'is required' });
});

it('knows the way to every key', () => {
  expect(keyPaths(cacheNodeSchema)).toEqual(
    expect.arrayContaining(['socketPath', 'disk', 'disk.dirs.bytes', 'redis.tls.caFile', 'redis.policies.*.maxShare']),
  );
  expect(keyPaths(cacheNodeSchema)).toEqual(
    expect.arrayContaining([
      'peers.security.certFile',
      'peers.security.secretFile',
      'quotas.*.arena',
      'kvEvents.curve.secretKeyFile',
    ]),
  );
  expect(keyPaths(engineWorkerSchema)).toEqual(expect.arrayContaining(['gpu.device', 'membership.redis.servers']));
});
