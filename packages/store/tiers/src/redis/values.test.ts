/** Values' connections: they follow the servers, and what has begun has ended when a move has. */
import { createServer, type Server, type Socket } from 'node:net';
import { native } from '@kvtier/data-plane';
import { afterEach, beforeEach, expect, it, vi } from 'vitest';
import { ArenaMemory } from '../arena/arena-memory.ts';
import { hashNamed, namespaceNamed, silentLog, TestBench } from '../kit/testing/objects.ts';
import { rowsPerTurn } from '../kit/turn-share.ts';
import type { RedisCommands } from './redis-commands.ts';
import { defaultSettings } from './settings.ts';
import { testArenaBytes } from './testing/redis.ts';
import { Values } from './values.ts';

const partition = { index: 0, base: 'kvtier:{p0}:', keys: [], slot: 0 };
let bench: TestBench;
const servers: { server: Server; sockets: Set<Socket>; port: number }[] = [];

/** A server that has nothing: every command is answered so, after a while. */
async function emptyServer(afterMs = 0): Promise<(typeof servers)[number]> {
  const sockets = new Set<Socket>();
  const server = createServer((socket) => {
    sockets.add(socket);
    socket.on('error', () => {}).on('close', () => sockets.delete(socket));
    socket.on('data', (text) => {
      const commands = text.toString('latin1').split(/GETRANGE|\r\nXX\r\n/).length - 1;
      setTimeout(() => socket.write('$-1\r\n'.repeat(commands)), afterMs);
    });
  });
  await new Promise<void>((resolve) => server.listen(0, '127.0.0.1', resolve));
  const made = { server, sockets, port: (server.address() as { port: number }).port };
  servers.push(made);
  return made;
}
const valuesTo = (addressOf: () => number, transport: 'native' | 'node'): Values => {
  const address = () => ({ host: '127.0.0.1', port: addressOf(), name: `127.0.0.1:${addressOf()}` });
  const commands = { address, login: { connectTimeoutMs: 1_000 } } as unknown as RedisCommands;
  const settings = { ...defaultSettings, servers: [], bytes: 1 << 20 };
  const memory = new ArenaMemory(bench.arena, testArenaBytes);
  return new Values(
    commands,
    { settings, arena: bench.arena, memory, slots: bench.tier, log: silentLog, transport },
    () => {},
  );
};

beforeEach(() => {
  bench = new TestBench();
});
afterEach(async () => {
  vi.restoreAllMocks();
  for (const { server, sockets } of servers.splice(0)) {
    for (const socket of sockets) socket.destroy();
    await new Promise((resolve) => server.close(resolve));
  }
  bench.dispose();
});

it.each(['native', 'node'] as const)(
  'connections to servers that left go, those in use stay (%s)',
  async (transport) => {
    const [first, second] = [await emptyServer(), await emptyServer()];
    let port = first.port;
    const values = valuesTo(() => port, transport);
    expect(await values.probe(partition)).toBe('ok');
    port = second.port;
    expect(await values.probe(partition)).toBe('ok');
    const count = () => [first.sockets.size, second.sockets.size];
    values.leaveFormer([partition], performance.now() + 29_000);
    await new Promise((resolve) => setTimeout(resolve, 100));
    expect(count().map((sockets) => sockets > 0)).toEqual([true, true]);
    values.leaveFormer([partition], performance.now() + 31_000);
    await vi.waitUntil(() => first.sockets.size === 0, { timeout: 20_000 });
    expect(second.sockets.size).toBeGreaterThan(0);
    expect(await values.probe(partition)).toBe('ok');
    values.close();
  },
);

it('a move that fails has ended: no value that it began is told of afterwards', async () => {
  const { port } = await emptyServer(200);
  const values = valuesTo(() => port, 'native');
  const move = native.valuesMove;
  let calls = 0;
  vi.spyOn(native, 'valuesMove').mockImplementation((...args) => {
    if (++calls === 2) throw new RangeError('partBytes');
    move(...args);
  });
  const space = namespaceNamed('one');
  const wanted = Array.from({ length: 3 }, (_, i) => ({
    ...{ bytes: 600_000, partBytes: 600_000, id: `a.${i}`, hash: hashNamed(i), slot: (i + 1) * 602_112 },
  }));
  const told: string[] = [];
  const failed = values.move('get', partition, space, wanted, (index, result) => told.push(`${index} ${result}`));
  await expect(failed).rejects.toThrow('partBytes');
  expect(told.sort()).toEqual(['0 none', '2 none']);
  await new Promise((resolve) => setTimeout(resolve, 400));
  expect(told.length).toBe(2);
  values.close();
});

it('of many reads that end together each turn tells its share', async () => {
  const silent = await emptyServer(60_000);
  const slot = bench.emptySlot(8_000); // nothing comes into it
  const values = valuesTo(() => silent.port, 'native');
  const turns = [0];
  let isOver = false;
  const begin = (): void => {
    turns.push(0);
    if (!isOver) setImmediate(begin);
  };
  setImmediate(begin);
  const many = Array.from({ length: 2_000 }, (_, i) => ({
    bytes: 8_000,
    partBytes: 8_000,
    id: `${i}`,
    slot,
    hash: hashNamed(i),
  }));
  const told = new Set<string>();
  const moved = values.move('get', partition, namespaceNamed('one'), many, (_, result) => {
    told.add(result);
    turns[turns.length - 1]!++;
  });
  values.disconnect('out of service');
  await moved;
  isOver = true;
  expect([...told]).toEqual(['lost']);
  expect(turns.reduce((a, b) => a + b)).toBe(2_000);
  expect(Math.max(...turns)).toBeLessThan(2 * rowsPerTurn);
  values.close();
});
