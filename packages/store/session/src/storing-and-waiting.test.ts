/** Requests of engines that compute for each other: loads that wait, and token ids beside hashes. */
import { ClientFrame } from '@kvtier/wire';
import { afterEach, beforeEach, expect, it, vi } from 'vitest';
import type { TokenSink } from './options.ts';
import { packed } from './testing/raw-client.ts';
import { put, ServedBench } from './testing/served-bench.ts';

/** Of conditions that hold at once, on a machine that does many other things. */
const patience = { timeout: 20_000 };

let rig: ServedBench;
beforeEach(() => {
  rig = new ServedBench();
});
afterEach(() => rig.close());

it('a load waits for blocks that another session commits, and ends early when it is told to', async () => {
  await rig.start();
  const [prefill, decode] = [await rig.attached(), await rig.attached()];
  const request = { hashes: packed('x', 4), deadlineMs: 20_000, awaitMs: 10_000 };
  const load = decode.send({ $case: 'load', value: request });
  await put(prefill, 'x', 2);
  const ready = await decode.answer(load, 'ready');
  expect(ready).toMatchObject({ first: 0, tier: 'arena', checksums: [1n << 60n, (1n << 60n) + 1n] });
  const { counters } = await prefill.call({ $case: 'stats', value: {} }, 'stats');
  expect(counters['await.blocks']).toBe(2n);
  const end = () => decode.call({ $case: 'endLoad', value: { loadId: load } }, 'done');
  expect(await end()).toEqual({ count: 1 });
  expect(await decode.answer(load, 'loadDone')).toEqual({ loaded: 2, reason: 'cancelled' });
  expect(await end()).toEqual({ count: 0 });
  const release = { loadId: load, corrupt: [] };
  expect(await decode.call({ $case: 'release', value: release }, 'done')).toEqual({ count: 1 });
  const alone = decode.send({ $case: 'load', value: { ...request, awaitMs: 20 } });
  await decode.answer(alone, 'ready');
  rig.bench.clock.advance(20);
  expect(await decode.answer(alone, 'loadDone')).toEqual({ loaded: 2, reason: 'awaited' });
});

it('what another node would have to give is not waited for where nothing comes from there', async () => {
  const there = 5n;
  const asked: bigint[] = [];
  rig.more = {
    mayCome: (epoch) => {
      asked.push(epoch);
      return epoch === there;
    },
  };
  await rig.start();
  const [prefill, decode] = [await rig.attached(), await rig.attached()];
  await put(prefill, 'x', 2);
  const request = { hashes: packed('x', 4), deadlineMs: 20_000, awaitMs: 10_000 };
  const load = async (awaitFrom?: bigint) => {
    const id = decode.send({ $case: 'load', value: { ...request, ...(awaitFrom !== undefined && { awaitFrom }) } });
    await decode.answer(id, 'ready');
    return id;
  };
  // With what is here, and no clock has moved.
  expect(await decode.answer(await load(6n), 'loadDone')).toEqual({ loaded: 2, reason: 'missing' });
  const counters = async () => (await prefill.call({ $case: 'stats', value: {} }, 'stats')).counters;
  expect((await counters())['await.refused.no_link']).toBe(1n);
  for (const from of [there, undefined]) {
    const id = await load(from);
    expect((await counters())['await.blocks']).toBe(2n);
    await decode.call({ $case: 'endLoad', value: { loadId: id } }, 'done');
    expect(await decode.answer(id, 'loadDone')).toEqual({ loaded: 2, reason: 'cancelled' });
  }
  expect([asked, (await counters())['await.refused.no_link']]).toEqual([[6n, there], 1n]);
});

it('a node that wants token ids says so, and keeps those of blocks that it takes or has', async () => {
  const learnt: unknown[] = [];
  const tokens: TokenSink = {
    learn: (namespace, hash, parent, said) =>
      learnt.push([namespace.digest[0], hash.slice(0, 3), parent?.slice(0, 3) ?? null, said.toString('hex')]),
  };
  await rig.start({}, 2, {}, tokens);
  const client = await rig.connect();
  const { wantsTokenIds } = await client.attach({ blockTokens: 2 });
  expect(wantsTokenIds).toBe(true);
  const reserve = (first: number, count: number, bytes?: Buffer) => {
    const parent = first === 0 ? Buffer.alloc(0) : packed('x', 1, first - 1);
    const said = bytes === undefined ? {} : { tokenIds: bytes };
    return client.call({ $case: 'reserve', value: { parent, hashes: packed('x', count, first), ...said } }, 'reserved');
  };
  const words = (...ids: number[]): Buffer => Buffer.from(Uint32Array.from(ids).buffer);
  await reserve(0, 1, words(1, 2));
  await reserve(0, 3, words(1, 2, 3, 2 ** 32 - 1, 5, 6)); // busy, reserved, and one without room
  await reserve(1, 1); // not said
  await reserve(1, 1, Buffer.alloc(0));
  expect(learnt).toEqual([
    [7, 'x:0', null, '0100000002000000'],
    [7, 'x:0', null, '0100000002000000'],
    [7, 'x:1', 'x:0', '03000000ffffffff'],
  ]);
  await expect(reserve(1, 1, words(3))).rejects.toMatchObject({ code: 'PROTOCOL' });
  await client.ended;
  // As it travels: pinned.
  const value = { parent: Buffer.alloc(0), hashes: Buffer.alloc(4, 0xaa), tokenIds: words(1, 300) };
  const frame = ClientFrame.encode({ id: 1n, body: { $case: 'reserve', value } }).finish();
  expect(Buffer.from(frame).toString('hex')).toBe('08012a101204aaaaaaaa1a08010000002c010000');
});

it('a node that wants no token ids does not ask for them, and takes them from nobody', async () => {
  await rig.start();
  const client = await rig.connect();
  expect((await client.attach({ blockTokens: 2 })).wantsTokenIds).toBeUndefined();
  const value = { parent: Buffer.alloc(0), hashes: packed('x', 1), tokenIds: Buffer.alloc(8) };
  expect((await client.call({ $case: 'reserve', value }, 'reserved')).status).toHaveLength(1);
});

it('an engine that goes while it waits leaves nothing', async () => {
  await rig.start();
  const [prefill, decode] = [await rig.attached(), await rig.attached()];
  decode.send({ $case: 'load', value: { hashes: packed('x', 4), deadlineMs: 20_000, awaitMs: 10_000 } });
  const awaitedBlocks = () => rig.bench.store.stats().counters['await.blocks'];
  await vi.waitUntil(() => awaitedBlocks() === 4, patience);
  await decode.end();
  await vi.waitUntil(() => awaitedBlocks() === 0, patience);
  await put(prefill, 'x', 4);
  rig.bench.store.checkIntegrity();
});
