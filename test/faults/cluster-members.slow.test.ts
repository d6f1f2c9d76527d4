/** The processes of a host in the list of a cluster's members: they join, drain and leave by themselves, and who is killed is gone in 2 s. */
import { mkdtempSync, rmSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { fileURLToPath } from 'node:url';
import { removeStaleArenas } from '@kvtier/data-plane/places';
import { MemberReader } from '@kvtier/membership';
import { Lines, memberServers } from '@kvtier/membership/testing';
import { afterEach, beforeEach, expect, it } from 'vitest';
import { RedisServer, until } from '../../infra/redis/servers.ts';
import { Service } from './engine-rig.ts';

const modelDir = fileURLToPath(new URL('../numerics/golden/llama', import.meta.url));

let folder: string;
let server: RedisServer;
const started: Service[] = [];
const told: Parameters<ConstructorParameters<typeof MemberReader>[0]['changed']>[0][] = [];
let reader: MemberReader;

beforeEach(async () => {
  folder = mkdtempSync(join(tmpdir(), 'kvtier-members-'));
  server = await RedisServer.start();
  told.length = 0;
  reader = new MemberReader({
    ...{ redis: memberServers([server.url]), pollMs: 20, log: new Lines() },
    changed: (members) => told.push(members),
    problem: () => {},
  });
});
afterEach(async () => {
  await reader.close();
  for (const service of started.splice(0)) await service.signal('SIGTERM');
  await server.stop();
  removeStaleArenas(join(folder, 'data'), '/dev/shm'); // of a node that was killed
  rmSync(folder, { recursive: true, force: true });
});

async function start(name: 'engine-worker' | 'cache-node'): Promise<Service> {
  const membership = { redis: { servers: [server.url] }, name: name === 'cache-node' ? 'host-1' : 'engine-1' };
  const kvEvents = { endpoint: `ipc://${folder}/${name}-events`, topic: 'kv@host-1' };
  const config =
    name === 'cache-node'
      ? { socketPath: join(folder, 'n/s'), dataDir: join(folder, 'data'), arena: { bytes: 16 << 20 }, disk: null }
      : {
          ...{ modelDir, servedName: 'tiny', listen: `unix:${folder}/engine`, kvBytes: 1 << 20, maxStepTokens: 64 },
          ...{ threads: 1, cacheNodeSocket: join(folder, 'n/s') },
        };
  const change = name === 'cache-node' ? {} : { node: 'host-1', role: 'prefill', revision: 'r1' };
  const service = new Service(name, {
    ...config,
    kvEvents,
    membership: { ...membership, ...change },
    logLevel: 'warn',
  });
  started.push(service);
  await service.start();
  return service;
}

const engine = (draining: boolean): object => ({
  ...{ name: 'engine-1', kind: 'kvtier', address: `unix:${folder}/engine`, role: 'prefill', draining, node: 'host-1' },
  events: { endpoint: `ipc://${folder}/engine-worker-events`, replayEndpoint: null, topic: 'kv@host-1' },
  revision: 'r1',
});
const node = (): object => ({
  // It has no peers, and says so.
  ...{ name: 'host-1', peer: null, peers: [] },
  events: { endpoint: `ipc://${folder}/cache-node-events`, replayEndpoint: null, topic: 'kv@host-1' },
});
const last = async (workers: number, nodes: number): Promise<void> =>
  await until(
    () => told.at(-1)?.workers.length === workers && told.at(-1)?.nodes.length === nodes,
    `${workers}, ${nodes}`,
  );

it('a host joins, drains and leaves; killed it is gone within 2 s', { timeout: 120_000 }, async () => {
  const cacheNode = await start('cache-node');
  const first = await start('engine-worker');
  await last(1, 1);
  expect(told.at(-1)).toEqual({ workers: [engine(false)], nodes: [node()] });
  const before = told.length;
  await first.signal('SIGTERM');
  await last(0, 1);
  const gone = { workers: [], nodes: [node()] };
  // It stands in the list as long as it drains, which is a quarter of a second: who is kept waiting for that long sees its end alone.
  expect([[{ workers: [engine(true)], nodes: [node()] }, gone], [gone]]).toContainEqual(told.slice(before));
  const second = await start('engine-worker');
  await last(1, 1);
  await Promise.all([second.signal('SIGKILL'), cacheNode.signal('SIGKILL')]);
  // By the server's clock: how late a busy machine's readers see it is theirs.
  const [seconds, us] = (await server.cli('time')).split('\n').map(Number);
  for (const member of ['worker:engine-1', 'node:host-1']) {
    const endMs = Number(await server.cli('zscore', 'kvtier:{members}:leases', member));
    expect(endMs - (seconds! * 1_000 + us! / 1_000), member).toBeLessThan(2_000);
  }
  await last(0, 0);
});
