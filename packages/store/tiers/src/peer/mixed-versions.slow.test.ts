/** Peers of mixed versions: an older one by its golden bytes, both ways; a newer one that says what nobody here knows. */
import { randomBytes } from 'node:crypto';
import { once } from 'node:events';
import { type AddressInfo, connect, createServer, type Socket } from 'node:net';
import { namespaceFromDigest } from '@kvtier/identity';
import { afterEach, beforeEach, expect, it } from 'vitest';
import { Slices } from '../kit/slices.ts';
import { hashNamed, namespaceNamed } from '../kit/testing/objects.ts';
import { type Control, dial, greet } from './control.ts';
import { OlderPeer } from './testing/older-peer.ts';
import { type GivingNode, sharedSecret, until } from './testing/peer-pair.ts';
import { PeerRig } from './testing/peer-rig.ts';

const space = namespaceNamed('one');
const chain = Array.from({ length: 4 }, (_, i) => hashNamed(i));
const secret = (sharedSecret() as { secrets: readonly Buffer[] }).secrets[0]!;
let rig: PeerRig;
beforeEach(() => {
  rig = new PeerRig();
});
afterEach(() => rig.end());

async function give(): Promise<GivingNode> {
  const node = await rig.give({ heartbeatMs: 50 });
  await node.bench.write(node.bench.tier, space, chain, 8_000);
  return node;
}

/** Where connections come; the first of them. */
async function listen(): Promise<{ readonly port: number; readonly came: Promise<Socket> }> {
  const server = createServer();
  server.listen(0, '127.0.0.1');
  await once(server, 'listening');
  const came = once(server, 'connection').then(([socket]) => {
    rig.onEnd(() => (socket as Socket).destroy());
    return socket as Socket;
  });
  rig.onEnd(() => server.close());
  return { port: (server.address() as AddressInfo).port, came };
}

/** Namespace, bytes of a hash, count, hashes. */
const names = (hashes: readonly string[]): Buffer => {
  const head = Buffer.alloc(35);
  head.set(space.digest, 0);
  head[32] = hashes[0]!.length;
  head.writeUInt16LE(hashes.length, 33);
  return Buffer.concat([head, ...hashes.map((hash) => Buffer.from(hash, 'latin1'))]);
};
const change = (sequence: number, hashes: readonly string[]): Buffer => {
  const head = Buffer.alloc(10);
  head.writeUIntLE(sequence, 0, 6);
  return Buffer.concat([head, names(hashes)]);
};

it('an older node fetches from this one: one proof, no message that it does not know, and what it says is heard', async () => {
  const node = await give();
  const socket = connect({ host: '127.0.0.1', port: node.server.port });
  rig.onEnd(() => socket.destroy());
  const older = new OlderPeer(socket, secret);
  await older.prove();
  const changes = (): Buffer[] => older.told.filter(({ kind }) => kind === 5).map(({ body }) => body);
  await until('all that is held is told', () => older.told.some(({ kind }) => kind === 9));
  expect(changes()).toEqual([change(1, chain)]);
  older.send(8, Buffer.concat([Buffer.of(0), names(chain)]));
  older.send(7);
  const pings = (): number => older.told.filter(({ kind }) => kind === 6).length;
  const before = pings();
  await until('it is pinged twice more', () => pings() >= before + 2);
  expect([older.refused, older.ended, node.server.counts.peers, node.server.counts.unknown]).toEqual([
    ...[undefined, false, 1, 0],
  ]);
});

it('this node fetches from an older one: it is never told of the end of a pin, and goes on being told the rest', async () => {
  const { port, came } = await listen();
  const data = await listen();
  const { tier } = rig.fetchFrom([port]);
  const older = new OlderPeer(await came, secret);
  await older.welcome(data.port);
  older.send(5, change(1, chain));
  older.send(9);
  await until('its blocks are known', () => tier.lookup(space, chain) === 4);
  tier.endPin(space, Buffer.alloc(16, 9), chain[0]!);
  tier.touch(space, chain.slice(0, 1));
  await until('it is hinted at', () => older.told.length > 0);
  expect(older.told).toEqual([{ kind: 8, body: Buffer.concat([Buffer.of(0), names(chain.slice(0, 1))]) }]);
  expect([older.refused, older.ended, tier.lookup(space, chain)]).toEqual([undefined, false, 4]);
});

/** A message of a node that is newer than this one. */
const tell = ({ socket }: Control, kind: number): unknown => socket.write(Buffer.of(5, 0, 0, 0, kind, 1, 2, 3, 4));

it('a newer node says what this one does not know: it is skipped and counted, by who gives', async () => {
  const node = await give();
  const { control } = await dial('127.0.0.1', node.server.port, sharedSecret(), 9n, new Slices(), () => {});
  rig.onEnd(() => control.socket.destroy());
  control.listen(() => {});
  for (const kind of [0, 11, 255]) tell(control, kind);
  await until('they are counted', () => node.server.counts.unknown === 3);
  node.bench.flip(node.bench.tier.get(space, chain[0]!)!.slot + 5_000);
  control.send({ kind: 'hint', what: 'corrupt', namespace: space, hashes: chain });
  await until('what follows is heard', () => node.server.counts.corrupt === 1);
  expect([node.server.counts.peers, node.server.counts.unknown, control.ended]).toEqual([1, 3, false]);
});

it('the same by who fetches; and a newer one is told of the end of a pin', async () => {
  const { port, came } = await listen();
  const data = await listen();
  const { tier } = rig.fetchFrom([port]);
  const heard: unknown[] = [];
  const { control } = await greet(await came, sharedSecret(), 7n, new Slices(), () => {});
  control.listen((message) => heard.push(message));
  control.send({ kind: 'welcome', session: randomBytes(16), dataPort: data.port, heartbeatMs: 60_000 });
  for (const kind of [0, 11, 255]) tell(control, kind);
  control.send({ kind: 'change', sequence: 1, tier: 0, change: 'stored', namespace: space, hashes: chain });
  await until('what follows is heard', () => tier.lookup(space, chain) === 4);
  expect(tier.stats().detail!.unknown_messages).toBe(3);
  const ticket = Buffer.alloc(16, 9);
  tier.endPin(space, ticket, chain[0]!);
  await until('the ticket is there', () => heard.length > 0);
  expect(heard).toEqual([{ kind: 'endPin', namespace: namespaceFromDigest(Buffer.from(space.digest)), ticket }]);
  expect(control.ended).toBe(false);
});

it('before it has proved itself nobody is heard, whatever it says', async () => {
  const node = await give();
  const socket = connect({ host: '127.0.0.1', port: node.server.port });
  rig.onEnd(() => socket.destroy());
  socket.on('error', () => {});
  socket.resume();
  socket.write(Buffer.of(5, 0, 0, 0, 200, 1, 2, 3, 4));
  await once(socket, 'close');
  expect([node.server.counts.unknown, node.server.counts.refused]).toEqual([0, 1]);
});
