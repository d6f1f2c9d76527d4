/** Who comes without proof, or in numbers, keeps no peer out; want of descriptors costs a node no processor. */
import { type ChildProcess, spawn } from 'node:child_process';
import { once } from 'node:events';
import { syncBuiltinESMExports } from 'node:module';
import net, { connect, type Server, type Socket } from 'node:net';
import { join } from 'node:path';
import { createInterface } from 'node:readline';
import { setTimeout as sleep } from 'node:timers/promises';
import { afterEach, beforeEach, expect, it } from 'vitest';
import { bundled } from '../../../../../scripts/lib/test-programs.mjs';
import { makeCertificates } from '../kit/testing/certificates.ts';
import { hashNamed, namespaceNamed } from '../kit/testing/objects.ts';
import { sharedSecret, until } from './testing/peer-pair.ts';
import { PeerRig } from './testing/peer-rig.ts';

const space = namespaceNamed('one');
const chain = Array.from({ length: 8 }, (_, i) => hashNamed(i));
const [program] = await bundled(new URL('../kit/testing/peer-files.ts', import.meta.url));

let rig: PeerRig;
beforeEach(() => {
  rig = new PeerRig();
});
afterEach(() => rig.end());

/** Connections that say nothing, made again as soon as they are closed. Returns how many were closed so far. */
function crowd(port: number, count: number): () => number {
  const sockets = new Set<Socket>();
  let closed = 0;
  let isOver = false;
  const add = (): void => {
    const socket = connect({ host: '127.0.0.1', port });
    sockets.add(socket);
    socket.on('error', () => {});
    socket.on('close', () => {
      closed++;
      sockets.delete(socket);
      if (!isOver) setTimeout(add, 20);
    });
    socket.resume();
  };
  for (let i = 0; i < count; i++) add();
  rig.onEnd(() => {
    isOver = true;
    for (const socket of sockets) socket.destroy();
  });
  return () => closed;
}

it.each(['none', 'tls'] as const)(
  '300 that say nothing, again and again, at both ports (%s): a peer comes and reads',
  async (kind) => {
    const security = kind === 'tls' ? makeCertificates(rig.bench.dir, '127.0.0.1') : sharedSecret();
    const node = await rig.give({ security });
    await node.bench.write(node.bench.tier, space, chain, 20_000);
    const closed = [node.server.port, node.server.dataPort].map((port) => crowd(port, 300));
    await until('they are turned away', () => closed.every((count) => count() > 300));
    const { tier } = rig.fetchFrom([node.server.port], { security });
    await until('the peer is there', () => tier.lookup(space, chain) === 8 && tier.stats().detail!.usable_peers === 1);
    expect(await rig.bench.read(tier, space, chain, 20_000)).toEqual(chain.map(() => 'ready'));
  },
);

it('one that sends a byte now and then is closed in time, at both ports', async () => {
  const node = await rig.give();
  const hello = Buffer.from('KVTPDATA\x01\0\0\0');
  for (const port of [node.server.port, node.server.dataPort]) {
    const socket = connect({ host: '127.0.0.1', port });
    socket.on('error', () => {});
    const startMs = performance.now();
    let at = 0;
    const drip = setInterval(() => socket.write(hello.subarray(at % 12, (at++ % 12) + 1)), 200);
    socket.resume();
    await once(socket, 'close');
    clearInterval(drip);
    expect(performance.now() - startMs).toBeLessThan(5000);
  }
});

it('more peers than it serves: those beyond are turned away, those that are there stay', async () => {
  const node = await rig.give({ maxPeers: 2 });
  const { tier } = rig.fetchFrom([node.server.port, node.server.port, node.server.port]);
  await until('two are there, one was refused', () => node.server.refusedCount > 1 && node.server.counts.peers === 2);
  expect(tier.stats().detail!.connected_peers).toBeGreaterThanOrEqual(2);
});

it('a listening socket that fails is told in the log, and is no end of the process', async () => {
  const made: Server[] = [];
  const { createServer } = net;
  net.createServer = ((...args: Parameters<typeof createServer>) => {
    made.push(createServer(...args));
    return made.at(-1)!;
  }) as typeof createServer;
  syncBuiltinESMExports();
  const node = await rig.give();
  net.createServer = createServer;
  syncBuiltinESMExports();
  made[0]!.emit('error', new Error('accept ENFILE'));
  made[0]!.emit('error', new Error('accept ENOMEM'));
  expect(node.server.refusedCount).toBe(2);
});

it('without a descriptor left, connections wait and the processor rests; with some again, they are served', async () => {
  const command = `ulimit -n 96; exec "$0" "$1" "$2"`;
  const child: ChildProcess = spawn('sh', ['-c', command, process.execPath, program, join(rig.bench.dir, 'node')], {
    stdio: ['pipe', 'pipe', 'inherit'],
  });
  rig.onEnd(async () => {
    child.kill('SIGKILL');
    if (child.exitCode === null && child.signalCode === null) await once(child, 'exit');
  });
  const lines = createInterface({ input: child.stdout! })[Symbol.asyncIterator]();
  const next = async (): Promise<string> => (await lines.next()).value as string;
  const ask = (what: string): Promise<number> => {
    child.stdin!.write(`${what}\n`);
    return next().then(Number);
  };
  const [, dataPort] = (await next()).split(' ').map(Number);
  await ask('fill');
  const used = async (): Promise<number> => {
    const before = await ask('cpu');
    await sleep(1500);
    return (await ask('cpu')) - before;
  };
  const idleMs = await used();
  const sockets = Array.from({ length: 4 }, () => connect({ host: '127.0.0.1', port: dataPort! }));
  rig.onEnd(() => {
    for (const socket of sockets) socket.destroy();
  });
  const closes = sockets.map((socket) => {
    socket.on('error', () => {});
    socket.resume();
    socket.write('no node says that to another one, whatever it is and whoever it may be');
    return once(socket, 'close');
  });
  const waitingMs = await used();
  expect(waitingMs).toBeLessThan(3 * idleMs + 40);
  await ask('free');
  await Promise.all(closes);
});
