import { mkdtempSync, readdirSync, rmSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { cacheNodeSchema, coordinatorSchema, engineWorkerSchema } from '@kvtier/config';
import { afterEach, beforeEach, describe, expect, it } from 'vitest';
import { type MemberOptions, planMembers } from './members.ts';
import { parseUp, type UpOptions } from './options.ts';
import { planServices } from './services.ts';
import type { ServiceSpec } from './supervisor.ts';

const MiB = 2 ** 20;
const GiB = 2 ** 30;
const machine = { cores: 8, freeMemoryBytes: 64 * GiB };
let dataDir: string;
beforeEach(() => {
  dataDir = mkdtempSync(join(tmpdir(), 'kvtier-members-'));
});
afterEach(() => rmSync(dataDir, { recursive: true, force: true }));

const plan = (asked: Partial<MemberOptions>, its = machine) =>
  planMembers(
    {
      ...{
        engines: 1,
        prefillEngines: 0,
        nodes: 1,
        arenaBytes: 64 * MiB,
        diskBytes: 512 * MiB,
        kvBytes: null,
        threads: null,
      },
      ...{ gpuShare: undefined, dataDir },
      ...asked,
    },
    its,
  );

describe('members', () => {
  it('are one engine and one node without numbers, which take what they take alone', () => {
    expect(plan({})).toEqual({
      engines: [
        {
          ...{ name: 'engine-worker', role: 'both', node: 0 },
          ...{ kvBytes: undefined, threads: undefined, gpuShare: undefined },
        },
      ],
      nodes: [{ name: 'cache-node', dataDir, arenaBytes: 64 * MiB, diskBytes: 512 * MiB }],
      remarks: [],
    });
    expect(plan({ nodes: 0 })).toMatchObject({ engines: [{ node: undefined }], nodes: [] });
    expect(readdirSync(dataDir)).toEqual([]);
  });

  it('divide what the machine has', () => {
    const { engines, nodes } = plan({ engines: 3, nodes: 2, kvBytes: 300 * MiB, gpuShare: 0.6 });
    expect(nodes).toEqual([
      { name: 'cache-node-0', dataDir, arenaBytes: 32 * MiB, diskBytes: 256 * MiB },
      { name: 'cache-node-1', dataDir: join(dataDir, 'node-1'), arenaBytes: 32 * MiB, diskBytes: 256 * MiB },
    ]);
    expect(engines.map(({ name, node }) => [name, node])).toEqual([
      ['engine-worker-0', 0],
      ['engine-worker-1', 1],
      ['engine-worker-2', 0],
    ]);
    for (const engine of engines) {
      expect(engine).toMatchObject({ kvBytes: 100 * MiB, threads: 2 });
      expect(engine.gpuShare).toBeCloseTo(0.2);
    }
    expect(plan({ engines: 16 }).engines[15]).toMatchObject({ threads: 1, node: 0, gpuShare: 0.9 / 16 });
    expect(plan({ engines: 2, threads: 8 }).engines.map(({ threads }) => threads)).toEqual([8, 8]);
  });

  it('of prefill and decode apart have names by role, and nodes in one order', () => {
    const { engines } = plan({ engines: 5, prefillEngines: 2, nodes: 3 });
    expect(engines.map(({ name, role, node }) => [name, role, node])).toEqual([
      ['prefill-0', 'prefill', 0],
      ['prefill-1', 'prefill', 1],
      ['decode-0', 'decode', 2],
      ['decode-1', 'decode', 0],
      ['decode-2', 'decode', 1],
    ]);
  });

  it('have smaller KV blocks where memory is short', () => {
    expect(plan({ engines: 4 }).engines[0]!.kvBytes).toBeUndefined();
    const { engines, remarks } = plan({ engines: 4 }, { cores: 2, freeMemoryBytes: GiB });
    expect(engines.map(({ kvBytes }) => kvBytes)).toEqual(Array(4).fill(128 * MiB));
    expect(remarks).toEqual(['KV blocks of 128 MiB for each engine: only 1 GiB of memory free']);
  });

  it('have a smaller arena where memory is short, of which a running system has its own already', () => {
    const its = { cores: 2, freeMemoryBytes: 128 * MiB };
    const { nodes, remarks } = plan({ arenaBytes: null }, its);
    expect(nodes.map(({ arenaBytes }) => arenaBytes)).toEqual([64 * MiB]);
    expect(remarks).toEqual(['arena of 64 MiB: only 128 MiB of memory free']);
    const looking = { ownArenaBytes: 256 * MiB, freeDiskBytes: GiB };
    expect(plan({ arenaBytes: 256 * MiB, looking }, its).nodes[0]!.arenaBytes).toBe(256 * MiB);
  });

  it('are refused what is too little for all', () => {
    expect(() => plan({ engines: 8, nodes: 4, arenaBytes: 16 * MiB })).toThrow(
      '--arena-bytes: 16 MiB are too little for 4 nodes; give them 32 MiB',
    );
    expect(() => plan({ engines: 2, nodes: 2, diskBytes: 100 * MiB })).toThrow(
      '--disk-bytes: 100 MiB are too little for 2 nodes; give them 128 MiB',
    );
    expect(() => plan({ engines: 4, kvBytes: 2 * MiB })).toThrow(
      '--kv-bytes: 2 MiB are too little for 4 engines; give them 4 MiB',
    );
    expect(plan({ engines: 2, nodes: 2, diskBytes: 0 }).nodes.map(({ diskBytes }) => diskBytes)).toEqual([0, 0]);
  });
});

describe('services', () => {
  const runDir = '/run/k';
  const services = (flags: string[], node: UpOptions['node'] = {}): ServiceSpec[] => {
    const options = { ...parseUp([...flags, '--arena-bytes', '64MiB', '--disk-bytes', '512MiB'])!, node };
    const members = planMembers({ ...options, gpuShare: undefined, dataDir }, machine);
    const peerPorts = members.nodes.length > 1 ? members.nodes.map((_, i) => 7000 + i) : [];
    return planServices(options, { port: 8000, runDir, model: { name: 'm', dir: '/m' }, members, peerPorts });
  };
  const configOf = (all: ServiceSpec[], name: string): unknown =>
    JSON.parse(all.find((each) => each.name === name)!.env.KVTIER_CONFIG!);
  const engineOf = (all: ServiceSpec[], name: string) => engineWorkerSchema.parse(configOf(all, name));
  const nodeOf = (all: ServiceSpec[], name: string) => cacheNodeSchema.parse(configOf(all, name));

  it('of one engine are what they are without the option', () => {
    const one = services([]);
    expect(one.map(({ name, stage }) => [name, stage])).toEqual([
      ['coordinator', 0],
      ['engine-worker', 1],
      ['cache-node', 2],
    ]);
    expect(configOf(one, 'engine-worker')).toEqual({
      ...{ gpu: {}, modelDir: '/m', servedName: 'm', backend: 'auto', prefixCache: 'blocks', loads: 'planned' },
      ...{ dedupBlocks: false, maxPinnedBlocks: 0, logLevel: 'warn' },
      ...{ listen: 'unix:/run/k/engine.sock', cacheNodeSocket: '/run/k/node.sock' },
    });
    expect(configOf(one, 'cache-node')).toEqual({
      ...{ socketPath: '/run/k/node.sock', dataDir, logLevel: 'warn' },
      arena: { bytes: 64 * MiB, dir: '/dev/shm' },
      disk: { bytes: 512 * MiB, ioBackend: 'auto' },
    });
  });

  it('are configured by a variable, or by a file where that is longer than Linux takes one', () => {
    const quotas = Object.fromEntries(
      Array.from({ length: 3_000 }, (_, i) => [`a-tenant-of-some-name-${i}`, { arena: 1_000, disk: 5_000 }]),
    );
    const all = services([], { quotas });
    const variables = all.flatMap(({ env }) => Object.entries(env).map(([key, text]) => `${key}=${text}`));
    expect(Math.max(...variables.map((text) => Buffer.byteLength(text)))).toBeLessThan(128 << 10);
    const node = all.find(({ name }) => name === 'cache-node')!;
    expect(node.file!.path).toBe('/run/k/cache-node.json');
    expect(node.nodeArgs.slice(-2)).toEqual(['--config', '/run/k/cache-node.json']);
    expect(cacheNodeSchema.parse(JSON.parse(node.file!.text)).quotas).toEqual(quotas);
    expect(all.filter(({ file }) => file !== undefined)).toEqual([node]);
  });

  it('of which the API server alone listens where it is told to', () => {
    const many = services(['--engines', '2', '--nodes', '2', '--host', '10.0.0.1', '--trusted-network']);
    expect(configOf(many, 'coordinator')).toMatchObject({ host: '10.0.0.1', port: 8000, trustedNetwork: true });
    for (const { name, env } of many)
      if (name !== 'coordinator') expect(env.KVTIER_CONFIG, name).not.toContain('10.0.0.1');
    expect(nodeOf(many, 'cache-node-0').peers?.listen).toMatchObject({ host: '127.0.0.1' });
  });

  it('of many have sockets, events and peers of their own', () => {
    const many = services(['--engines', '3', '--nodes', '2']);
    expect(many.map(({ name }) => name)).toEqual([
      ...['coordinator', 'engine-worker-0', 'engine-worker-1', 'engine-worker-2', 'cache-node-0', 'cache-node-1'],
    ]);
    expect(engineOf(many, 'engine-worker-2')).toMatchObject({
      listen: 'unix:/run/k/engine-2.sock',
      cacheNodeSocket: '/run/k/node-0.sock',
      kvEvents: { endpoint: 'ipc:///run/k/engine-2.events', replayEndpoint: 'ipc:///run/k/engine-2.replay' },
    });
    expect(nodeOf(many, 'cache-node-1')).toMatchObject({
      socketPath: '/run/k/node-1.sock',
      kvEvents: { endpoint: 'ipc:///run/k/node-1.events' },
      peers: {
        listen: { host: '127.0.0.1', port: 7001 },
        peers: [{ host: '127.0.0.1', port: 7000 }],
        security: { encryption: 'none', secretFile: '/run/k/peer-secret' },
      },
    });
    expect(nodeOf(services(['--engines', '2']), 'cache-node-0').peers).toBeNull();
  });

  it('of prefill and decode apart are known to the coordinator by their roles', () => {
    const apart = services(['--prefill', '1', '--decode', '2']);
    expect(apart.map(({ name, program, stage }) => [name, program, stage])).toEqual([
      ['coordinator', 'coordinator', 0],
      ['prefill-0', 'engine-worker', 1],
      ['decode-0', 'engine-worker', 1],
      ['decode-1', 'engine-worker', 1],
      ['cache-node-0', 'cache-node', 2],
      ['cache-node-1', 'cache-node', 2],
      ['cache-node-2', 'cache-node', 2],
    ]);
    const { discovery } = coordinatorSchema.parse(configOf(apart, 'coordinator'));
    if (discovery?.kind !== 'static') throw new Error('not static');
    expect(discovery.workers.map(({ name, role, node }) => [name, role, node])).toEqual([
      ['prefill-0', 'prefill', 'cache-node-0'],
      ['decode-0', 'decode', 'cache-node-1'],
      ['decode-1', 'decode', 'cache-node-2'],
    ]);
    for (const [i, { name, address }] of discovery.workers.entries())
      expect(engineOf(apart, name)).toMatchObject({ listen: address, cacheNodeSocket: `/run/k/node-${i}.sock` });
    expect(nodeOf(apart, 'cache-node-2').peers?.peers).toEqual(
      [7000, 7001].map((port) => ({ host: '127.0.0.1', port })),
    );
  });

  it('of many refuse what they cannot all have', () => {
    expect(() => services(['--engines', '2'], { kvEvents: { endpoint: 'ipc:///x' } })).toThrow(
      '--node-config: with several engines kvtier up sets "kvEvents" itself; remove it',
    );
    expect(() => services([], { quotas: { a: { arena: 65 * MiB } } })).toThrow(
      `--node-config: quotas.a.arena: more than the ${64 * MiB} bytes of the arena`,
    );
    const membership = { redis: { servers: ['redis://127.0.0.1:6379'] }, name: 'n1' };
    for (const [key, node] of Object.entries({ membership: { membership }, operations: { operations: {} } }))
      expect(() => services(['--engines', '3', '--nodes', '2'], node)).toThrow(
        `--node-config: "${key}" is of one node, and there would be 2; remove it, or ask for --nodes 1`,
      );
    expect(nodeOf(services(['--engines', '2'], { membership }), 'cache-node-0').membership?.name).toBe('n1');
  });
});
