/** A peer that proved itself and then answers with garbage, or with the half of an answer: no block, no read that hangs. */
import { createHmac, randomBytes } from 'node:crypto';
import { once } from 'node:events';
import { type AddressInfo, createServer, type Server, type Socket } from 'node:net';
import { afterEach, beforeEach, expect, it } from 'vitest';
import { Slices } from '../kit/slices.ts';
import { hashNamed, namespaceNamed, TestBench } from '../kit/testing/objects.ts';
import { type Control, greet } from './control.ts';
import { encode } from './frames.ts';
import { fetchingTier, loopsOf, sharedSecret, until } from './testing/peer-pair.ts';

const space = namespaceNamed('one');
const hashes = Array.from({ length: 4 }, (_, i) => hashNamed(i));
const session = randomBytes(16);
let bench: TestBench;
let servers: Server[];
let sockets: Set<Socket>;
beforeEach(() => {
  bench = new TestBench();
  servers = [];
  sockets = new Set();
});
afterEach(async () => {
  for (const socket of sockets) socket.destroy();
  for (const server of servers) await new Promise((resolve) => server.close(resolve));
  bench.dispose();
});

async function listen(onSocket: (socket: Socket) => void): Promise<number> {
  const server = createServer((socket) => {
    sockets.add(socket);
    socket.on('error', () => {});
    onSocket(socket);
  });
  servers.push(server);
  server.listen(0, '127.0.0.1');
  await once(server, 'listening');
  return (server.address() as AddressInfo).port;
}

/** A server that proves itself; `answer` makes what follows a frame of requests. */
async function liar(answer: (tag: Buffer) => Buffer): Promise<number> {
  let dataKey: Buffer = Buffer.alloc(0);
  const dataPort = await listen((socket) => {
    let asked = Buffer.alloc(0);
    let proven = false;
    socket.on('data', (bytes: Buffer) => {
      asked = Buffer.concat([asked, bytes]);
      if (!proven && asked.length >= 64) {
        const nonce = randomBytes(32);
        const proof = createHmac('sha256', dataKey).update('server').update(session);
        proof.update(asked.subarray(32, 64)).update(nonce);
        const head = Buffer.from(asked.subarray(0, 16));
        socket.write(Buffer.concat([head, nonce, proof.digest()]));
        asked = asked.subarray(64);
        proven = true;
      }
      if (!proven || asked.length < 32 + 8 + 80) return;
      socket.end(answer(asked.subarray(40, 48)));
    });
  });
  return listen((socket) => {
    void greet(socket, sharedSecret(), 7n, new Slices(), () => {}).then(
      ({ control, dataKey: key }: { control: Control; dataKey: Buffer }) => {
        dataKey = key;
        control.listen(() => {});
        control.send({ kind: 'welcome', session, dataPort, heartbeatMs: 60_000 });
        control.send({ kind: 'change', sequence: 1, tier: 0, change: 'stored', namespace: space, hashes });
      },
      () => {},
    );
  });
}

const reply = (status: number, tag: Buffer, objectBytes: number): Buffer => {
  const head = Buffer.alloc(24);
  head.write('PTRP', 0, 'latin1');
  head.writeUInt32LE(status, 4);
  tag.copy(head, 8);
  head.writeUInt32LE(objectBytes, 16);
  return head;
};

it.each([
  ['noise', () => randomBytes(5000)],
  ['half a head', (tag: Buffer) => reply(0, tag, 4000).subarray(0, 11)],
  ['half an object', (tag: Buffer) => Buffer.concat([reply(0, tag, 4000), randomBytes(2000)])],
  ['an object of noise', (tag: Buffer) => Buffer.concat([reply(0, tag, 4000), randomBytes(4000)])],
  ['more than the slot', (tag: Buffer) => Buffer.concat([reply(0, tag, 1 << 30), randomBytes(50_000)])],
  ['less than a header', (tag: Buffer) => Buffer.concat([reply(0, tag, 10), randomBytes(10)])],
  ['an unknown status', (tag: Buffer) => reply(9, tag, 0)],
  ['a tag that nobody asked for', () => reply(0, randomBytes(8), 4000)],
])('%s', async (_, answer) => {
  const port = await liar(answer);
  const loops = loopsOf(bench, sharedSecret());
  const tier = fetchingTier(bench, loops, [port], { readLimitMs: 2000, streams: 1 });
  await until('it is there', () => tier.lookup(space, hashes) === 4 && tier.stats().detail!.usable_peers === 1);
  for (const status of await bench.read(tier, space, hashes, 8000)) expect(status).not.toBe('ready');
  await tier.close();
  await loops.close();
});

it('what came behind a message that ends the connection, while all of them waited, is not heard', async () => {
  const honest = await liar(() => Buffer.alloc(0));
  let dialled = 0;
  const stored = (sequence: number, tier: 0 | 1, hash: number) =>
    ({ kind: 'change', sequence, tier, change: 'stored', namespace: space, hashes: [hashNamed(hash)] }) as const;
  const port = await listen((socket) => {
    void greet(socket, sharedSecret(), 8n, new Slices(), () => {}).then(
      ({ control }: { control: Control }) => {
        control.listen(() => {});
        dialled++;
        if (dialled > 1) return control.send({ kind: 'welcome', session, dataPort: 1, heartbeatMs: 60_000 });
        const cleared = {
          kind: 'change',
          sequence: 3,
          tier: 0,
          change: 'cleared',
          namespace: null,
          hashes: [],
        } as const;
        control.send(
          ...[{ kind: 'welcome', session, dataPort: 1, heartbeatMs: 60_000 } as const, stored(1, 0, 10)],
          ...[stored(2, 1, 11), cleared, { kind: 'welcome', session, dataPort: 1, heartbeatMs: 1 } as const],
          stored(4, 0, 12),
        );
      },
      () => {},
    );
  });
  const loops = loopsOf(bench, sharedSecret());
  const tier = fetchingTier(bench, loops, [honest], { streams: 1 });
  await until('the honest one is there', () => tier.lookup(space, hashes) === 4);
  tier.setPeers([
    { host: '127.0.0.1', port: honest },
    { host: '127.0.0.1', port },
  ]);
  await until('it is dialled again', () => dialled >= 2);
  expect(tier.lookup(space, [hashNamed(12)])).toBe(0);
  expect(tier.lookup(space, hashes)).toBe(4);
  tier.checkIntegrity();
  await tier.close();
  await loops.close();
});

it('one whose connection ends right behind its welcome is dialled again', async () => {
  let dialled = 0;
  const port = await listen((socket) => {
    dialled++;
    void greet(socket, sharedSecret(), 7n, new Slices(), () => {}).then(
      () => {
        const welcome = encode({ kind: 'welcome', session, dataPort: 1, heartbeatMs: 60_000 });
        socket.write(Buffer.concat([welcome, Buffer.alloc(8, 0xff)])); // and a message that is longer than any
      },
      () => {},
    );
  });
  const loops = loopsOf(bench, sharedSecret());
  const tier = fetchingTier(bench, loops, [port]);
  await until('it is dialled twice more', () => dialled >= 3);
  expect(tier.stats().outOfServiceReason).toContain('a message longer than any');
  await tier.close();
  await loops.close();
});
