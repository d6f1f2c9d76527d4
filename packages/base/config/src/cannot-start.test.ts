/** Configurations that no start could go on with, though each key by itself is well written: refused as text, so that none is tried again. */
import { mkdtempSync, rmSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { afterAll, expect, it } from 'vitest';
import type * as z from 'zod';
import { cacheNodeSchema, configProblem, engineWorkerSchema, readServiceConfig } from './index.ts';

const dir = mkdtempSync(join(tmpdir(), 'kvtier-cannot-start-'));
afterAll(() => rmSync(dir, { recursive: true }));
const file = join(dir, 'config.json');

const worker = { modelDir: '/m', servedName: 'm', listen: 'unix:/e', cacheNodeSocket: null };
const node = { socketPath: '/s', dataDir: '/d', arena: { bytes: 2 ** 20 }, disk: { bytes: 2 ** 30 } };
const tls = { certFile: '/c', keyFile: '/k', clientCaFile: '/a' };
const curve = { secretKeyFile: '/k', allowedClientKeys: ['rq:rM>}U?@Lns47E1%kR.o@n%FcmmsL/@{H8]yf7'] };
const member = { redis: { servers: ['unix:/r'] }, name: 'a' };
const security = { encryption: 'none', secretFile: '/s', trustedNetwork: true };
const peers = { listen: { host: '0.0.0.0', port: 7400 }, security };
const open = { endpoint: 'tcp://*:5557' };
const redis = { servers: ['redis://h:1'], bytes: 2 ** 26 };

const hashed = 'is of hashed blocks, and prefixCache is "radix"; set prefixCache to "blocks", or leave it out';
const nowhere = (place: string): string => `${place} is no address to connect to; give one that others reach`;
const bare = 'open to the network; bind to 127.0.0.1, configure "curve", or say "trustedNetwork": true';
const trusted = { endpoint: 'tcp://*:5657', trustedNetwork: true };

/** What is refused, and the nearest to it that is taken. */
type Row = [refused: object, taken: object, where: string, what: string];

const workers: Row[] = [
  [
    { listen: '0.0.0.0:50051' },
    { listen: '0.0.0.0:50051', tls },
    'listen',
    '0.0.0.0:50051 is beyond loopback; configure "tls", or listen on 127.0.0.1',
  ],
  [
    { listen: '[fd00::1]:1' },
    { listen: '[::1]:1' },
    'listen',
    '[fd00::1]:1 is beyond loopback; configure "tls", or listen on 127.0.0.1',
  ],
  [{ prefixCache: 'radix', evictionPolicy: 'lru' }, { evictionPolicy: 'lru' }, 'evictionPolicy', hashed],
  [{ prefixCache: 'radix', dedupBlocks: true }, { prefixCache: 'radix', dedupBlocks: false }, 'dedupBlocks', hashed],
  [
    { prefixCache: 'radix', maxPinnedBlocks: 1 },
    { prefixCache: 'radix', maxPinnedBlocks: 0 },
    'maxPinnedBlocks',
    hashed,
  ],
  [
    { prefixCache: 'radix', writeDown: 'ahead' },
    { prefixCache: 'radix', writeDown: 'through' },
    'writeDown',
    'the radix tree cannot write down ahead of eviction; use "through"',
  ],
  [{ kvEvents: open }, { kvEvents: { ...open, curve } }, 'kvEvents.endpoint', bare],
  [{ kvEvents: { ...trusted, trustedNetwork: false } }, { kvEvents: trusted }, 'kvEvents.endpoint', bare],
  [{ maxSequences: 65_537 }, { maxSequences: 65_536 }, 'maxSequences', 'write 65536 or less'],
  [{ maxStepTokens: 2 ** 20 + 1 }, { maxStepTokens: 2 ** 20 }, 'maxStepTokens', 'write 1048576 or less'],
  [{ threads: 1025 }, { threads: 1024 }, 'threads', 'write 1024 or less'],
  [
    { listen: '0.0.0.0:7000', tls, membership: member },
    { listen: '0.0.0.0:7000', tls, membership: { ...member, address: '10.0.0.1:7000' } },
    'membership.address',
    nowhere('0.0.0.0:7000'),
  ],
  [
    { membership: { ...member, address: '[::]:7000' } },
    { membership: { ...member, address: 'unix:/e' } },
    'membership.address',
    nowhere('[::]:7000'),
  ],
  [
    { membership: member, kvEvents: { ...open, curve } },
    { membership: { ...member, events: null }, kvEvents: { ...open, curve } },
    'membership.events',
    nowhere('tcp://*:5557'),
  ],
];

const ipc = `ipc:///${'e'.repeat(106)}`;
const [a, b] = ['/a', '/b'].map((folder) => ({ dir: folder, bytes: 2 ** 29 }));
const nodes: Row[] = [
  [
    { disk: { bytes: 2 ** 30, dirs: [a, { ...b, bytes: 2 ** 29 + 1 }] } },
    { disk: { bytes: 2 ** 30, dirs: [a, b] } },
    'disk.dirs',
    'their bytes are 1073741825, more than the 1073741824 of disk.bytes; lower them or raise that',
  ],
  [
    { disk: { bytes: 2 ** 30, dirs: ['/b', '/a', a] } },
    { disk: { bytes: 2 ** 30, dirs: ['/b', a] } },
    'disk.dirs.2',
    'is named twice; name folders that are different',
  ],
  [{ kvEvents: open }, { kvEvents: { endpoint: 'tcp://127.0.0.1:*' } }, 'kvEvents.endpoint', bare],
  [
    { kvEvents: { endpoint: 'ipc:///e', replayEndpoint: 'tcp://10.0.0.1:1' } },
    { kvEvents: { endpoint: 'ipc:///e', replayEndpoint: 'tcp://[::1]:1' } },
    'kvEvents.replayEndpoint',
    bare,
  ],
  [
    { kvEvents: { endpoint: 'tcp://127.0.0.1' } },
    { kvEvents: { endpoint: 'tcp://localhost:1' } },
    'kvEvents.endpoint',
    'not an endpoint; write ipc:///PATH or tcp://127.0.0.1:PORT',
  ],
  [
    { kvEvents: { endpoint: `${ipc}e` } },
    { kvEvents: { endpoint: ipc } },
    'kvEvents.endpoint',
    'its path is longer than 107 bytes; choose a shorter one',
  ],
  [
    { kvEvents: { endpoint: 'ipc:///e', tokenIdBytes: 2 ** 31 + 1 } },
    { kvEvents: { endpoint: 'ipc:///e', tokenIdBytes: 2 ** 31 } },
    'kvEvents.tokenIdBytes',
    'write 2147483648 or less',
  ],
  [
    { peers, membership: member },
    { peers, membership: { ...member, peer: { host: '10.0.0.1', port: 7400 } } },
    'membership.peer',
    nowhere('0.0.0.0:7400'),
  ],
  [
    { peers, membership: member },
    { peers, membership: { ...member, peer: null } }, // it only fetches
    'membership.peer',
    nowhere('0.0.0.0:7400'),
  ],
  [
    { membership: { ...member, peer: { host: '::', port: 1 } } },
    { membership: { ...member, peer: { host: '::1', port: 1 } } },
    'membership.peer',
    nowhere('[::]:1'),
  ],
  [
    { redis: { ...redis, servers: ['redis://h:1', 'redis://h:2'] } },
    { redis: { ...redis, servers: ['redis://h:1', 'redis://h:2'], mode: 'cluster' } },
    'redis.mode',
    'single, and there are several servers; write cluster or sentinel, or name one server',
  ],
  [
    { redis: { ...redis, mode: 'cluster', database: 1 } },
    { redis: { ...redis, database: 1 } },
    'redis.database',
    'a cluster has 0 only; leave it out',
  ],
  [
    { redis: { ...redis, mode: 'cluster', servers: ['redis://h:1', 'rediss://h:2'] } },
    { redis: { ...redis, mode: 'cluster', servers: ['rediss://h:1', 'rediss://h:2'] } },
    'redis.servers',
    'some with TLS and some without; write rediss: for all of them',
  ],
  [
    { redis: { ...redis, mode: 'cluster', servers: ['unix:/r'] } },
    { redis: { ...redis, servers: ['unix:/r'] } },
    'redis.servers',
    'names a Unix socket, which Sentinels and a cluster have not; write redis://host:port or rediss://host:port',
  ],
  [
    { redis: { ...redis, tls: { caFile: '/c' } } },
    { redis: { ...redis, servers: ['rediss://h:1'], tls: { caFile: '/c' } } },
    'redis.tls',
    'no server speaks it; write rediss: for the servers, or leave it out',
  ],
  [
    { redis: { ...redis, servers: ['redis://:100%@h:1'] } },
    { redis: { ...redis, servers: ['redis://:100%25@h:1'] } },
    'redis.servers.0',
    'has a % in its user or password that must be written %25',
  ],
  [
    { redis: { ...redis, servers: ['redis://h:65536'] } },
    { redis: { ...redis, servers: ['redis://h:65535'] } },
    'redis.servers.0',
    'is no URL; write redis://host:port, rediss://host:port or unix:/path',
  ],
];

it.each<[z.ZodType, object, ...Row]>([
  ...workers.map((row): [z.ZodType, object, ...Row] => [engineWorkerSchema, worker, ...row]),
  ...nodes.map((row): [z.ZodType, object, ...Row] => [cacheNodeSchema, node, ...row]),
])('what is refused ends a start for good, and --check alike (%#)', (schema, least, refused, taken, where, what) => {
  const problem = configProblem(schema, { ...least, ...refused });
  expect([problem?.path.join('.'), problem?.what]).toEqual([where, what]);
  expect(configProblem(schema, { ...least, ...taken })).toBeUndefined();
  // Both read it so; `isFinal` is exit code 78.
  writeFileSync(file, JSON.stringify({ ...least, ...refused }));
  expect(() => readServiceConfig(schema, file)).toThrow(
    expect.objectContaining({
      ...{ code: 'CONFIG', isFinal: true },
      message: `${file}: ${where}: ${what}; correct it and start again`,
    }),
  );
});
