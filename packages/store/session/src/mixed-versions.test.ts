/** An engine of another version, by bytes: an older one, and a newer one that asks what this node does not know. */
import { afterEach, beforeEach, expect, it } from 'vitest';
import { packed, type RawClient } from './testing/raw-client.ts';
import { ServedBench } from './testing/served-bench.ts';

let rig: ServedBench;
beforeEach(() => {
  rig = new ServedBench();
});
afterEach(() => rig.close());

const frame = (hex: string): Buffer => {
  const message = Buffer.from(hex.replaceAll(' ', ''), 'hex');
  const length = Buffer.alloc(4);
  length.writeUInt32LE(message.length);
  return Buffer.concat([length, message]);
};
/** Attach of the first version: protocol 1, namespace, payload_bytes 1, block_tokens 16, hash_bytes 16, client "old". */
const olderAttach = `12 2f 0801 1220 ${'07'.repeat(32)} 1801 2010 2810 32036f6c64`;
const unknownBody = 'e203 02 6869';
const lookup = (client: RawClient) => client.call({ $case: 'lookup', value: { hashes: packed('x', 1) } }, 'lookup');

it('an older engine attaches by what it knows, and is served', async () => {
  await rig.start();
  const client = await rig.connect();
  client.socket.write(frame(`0863 ${olderAttach}`));
  expect(await client.answer(0x63n, 'attached')).toMatchObject({ arenaPath: '/dev/shm/none', arenaId: 99n });
  expect((await lookup(client)).held).toBe(0);
});

it('a newer engine asks what is not known: that is refused and counted, and its session stays', async () => {
  await rig.start();
  const client = await rig.attached();
  client.socket.write(frame(`0863 ${unknownBody}`));
  await expect(client.answer(0x63n, 'done')).rejects.toMatchObject({
    code: 'REQUEST',
    message: 'session link: an unknown or empty request; run a node that is as new as its engines for it',
  });
  expect(rig.bench.store.counters.get('session.failed.REQUEST')).toBe(1);
  expect((await lookup(client)).held).toBe(0);
});

it('fields that are not known are none, in Attach and in requests', async () => {
  await rig.start();
  const client = await rig.connect();
  client.socket.write(frame(`0863 12 34 ${olderAttach.slice(6)} ea03026869`));
  await client.answer(0x63n, 'attached');
  client.socket.write(frame('0864 5a 05 ea03026869')); // Stats, with a field more
  expect((await client.answer(0x64n, 'stats')).tiers.length).toBeGreaterThan(0);
});

it('nobody begins with a request that is not known', async () => {
  await rig.start();
  const client = await rig.connect();
  client.socket.write(frame(`0863 ${unknownBody}`));
  await expect(client.answer(0x63n, 'done')).rejects.toMatchObject({ code: 'PROTOCOL' });
  await client.ended;
});
