/** A pin that is kept for another session: who was handed its ticket ends it, and nobody else does. */
import { afterEach, beforeEach, expect, it } from 'vitest';
import { packed, type RawClient } from './testing/raw-client.ts';
import { put, ServedBench } from './testing/served-bench.ts';

let rig: ServedBench;
beforeEach(() => {
  rig = new ServedBench();
});
afterEach(() => rig.close());

const ticket = Buffer.alloc(16, 9);
const pin = (client: RawClient, count: number, said: Buffer | undefined = ticket, ttlMs = 1_000) =>
  client.call({ $case: 'pin', value: { hashes: packed('x', count), ttlMs, ticket: said } }, 'done');
const endPin = (client: RawClient, said = ticket, hash = packed('x', 1)) =>
  client.call({ $case: 'endPin', value: { ticket: said, hash } }, 'done');
const pinned = () => rig.bench.arena.busySlots;

async function pair(): Promise<readonly [RawClient, RawClient]> {
  await rig.start({}, 64, { plans: { disk: { write: 'none' } } });
  const clients = [await rig.attached(), await rig.attached()] as const;
  await put(clients[0], 'x', 4);
  return clients;
}

it('the session that loads ends the pin of the one that computed, once', async () => {
  const [prefill, decode] = await pair();
  expect(await pin(prefill, 4)).toEqual({ count: 4 });
  expect(pinned()).toBe(4);
  expect(await endPin(decode)).toEqual({ count: 4 });
  expect(pinned()).toBe(0);
  expect(await endPin(decode)).toEqual({ count: 0 });
  expect(await endPin(prefill)).toEqual({ count: 0 });
  expect(rig.bench.clock.pending).toBe(0);
});

it('a ticket of nobody, of another namespace, or of a pin whose time is over ends nothing', async () => {
  const [prefill, decode] = await pair();
  const stranger = await rig.connect();
  await stranger.attach({ namespace: Buffer.alloc(32, 8) });
  await pin(prefill, 4);
  expect(await endPin(decode, Buffer.alloc(16, 1))).toEqual({ count: 0 });
  expect(await endPin(stranger)).toEqual({ count: 0 });
  expect(pinned()).toBe(4);
  rig.bench.clock.advance(1_000);
  expect(pinned()).toBe(0);
  expect(await endPin(decode)).toEqual({ count: 0 });
});

it('what a session pinned without a ticket nobody else ends', async () => {
  const [prefill, decode] = await pair();
  await pin(prefill, 4, Buffer.alloc(0));
  expect(await endPin(decode)).toEqual({ count: 0 });
  expect(pinned()).toBe(4);
});

it('a ticket that is in use is refused, and the session goes on', async () => {
  const [prefill, decode] = await pair();
  await pin(prefill, 2);
  await expect(pin(decode, 2)).rejects.toMatchObject({
    code: 'REQUEST',
    message: expect.stringContaining('another session'),
  });
  expect(await pin(decode, 2, Buffer.alloc(16, 2))).toEqual({ count: 2 });
});

it.each([0, 15, 17, 32])('a ticket of %i bytes ends the session that shows it', async (bytes) => {
  const [prefill, decode] = await pair();
  await pin(prefill, 4);
  await expect(endPin(decode, Buffer.alloc(bytes, 9))).rejects.toMatchObject({
    code: 'PROTOCOL',
    message: expect.stringContaining('a ticket of'),
  });
  await decode.ended;
  expect(pinned()).toBe(4);
});

it('a pin with such a ticket, or one shown with half a hash, ends the session, too', async () => {
  const [prefill, decode] = await pair();
  await expect(pin(prefill, 4, Buffer.alloc(15))).rejects.toMatchObject({
    code: 'PROTOCOL',
    message: expect.stringContaining('a ticket of'),
  });
  await expect(endPin(decode, ticket, Buffer.alloc(7))).rejects.toMatchObject({ code: 'PROTOCOL' });
});
