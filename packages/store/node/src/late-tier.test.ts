import { KvError } from '@kvtier/errors';
import { namespaceFromDigest } from '@kvtier/identity';
import { ManualClock, ModelArena, SteppedTier, settled, silent } from '@kvtier/placement/testing';
import type { Tier, TierChange } from '@kvtier/tiers';
import { expect, it, vi } from 'vitest';
import { openOrLater } from './late-tier.ts';

const namespace = namespaceFromDigest(new Uint8Array(32));
const hashes = ['a', 'b'] as never[];
const supports = { persistent: true, shared: true, writable: true, evicts: true };
const common = { name: 'redis', supports, capacityBytes: 100, log: silent };

it('what waiting does not mend is refused at once', async () => {
  const open = () => Promise.reject(new KvError('CONFIG', 'redis: wrong password; correct it'));
  await expect(openOrLater({ ...common, open, clock: new ManualClock() })).rejects.toMatchObject({ code: 'CONFIG' });
});

it('a server that is not there is a tier out of service, until it is there; followers hear what it holds', async () => {
  const clock = new ManualClock();
  const inner = new SteppedTier('redis', new ModelArena(2));
  inner.put(namespace, hashes);
  const open = vi
    .fn()
    .mockRejectedValueOnce(new KvError('IO', 'redis: refused; start it', { retry: true }))
    .mockRejectedValueOnce(new KvError('IO', 'redis: loading; wait', { retry: true }))
    .mockResolvedValue(inner);
  const tier = await openOrLater({ ...common, open, clock });
  const heard: TierChange[] = [];
  const end = tier.follow((change) => heard.push(change));
  const pages: TierChange[] = [];
  let more = 0;
  const following = tier.followInPages!(
    (change) => pages.push(change),
    () => more++,
  );
  expect([following.next(), more]).toEqual([false, 0]);
  expect(tier.stats()).toMatchObject({ inService: false, outOfServiceReason: 'redis: refused; start it', blocks: 0 });
  expect(tier.lookup(namespace, hashes)).toBe(0);
  expect(await tier.write(namespace, [{ hash: hashes[0]!, slot: 1 }])).toEqual(['refused']);
  const statuses: string[] = [];
  await tier.read(namespace, [{ hash: hashes[0]!, slot: 1 }], (_, status) => statuses.push(status));
  expect(statuses).toEqual(['missing']);

  clock.advance(1_000);
  await settled();
  expect(tier.stats().outOfServiceReason).toBe('redis: loading; wait');
  clock.advance(1_999);
  expect(open).toHaveBeenCalledTimes(2);
  clock.advance(1);
  await settled();
  expect(heard.flatMap(({ kind, hashes: [hash] }) => [kind, hash])).toEqual(['stored', 'a', 'stored', 'b']);
  expect([tier.lookup(namespace, hashes), tier.stats().inService]).toEqual([2, true]);
  expect([more, following.next(), pages.length]).toEqual([1, false, 1]);
  inner.remove(namespace, hashes);
  expect([pages.at(-1)!.kind, pages.length]).toEqual(['removed', 2]);
  following.end();
  expect(heard.length).toBe(3);
  end();
  inner.put(namespace, hashes);
  expect(heard.length).toBe(3);
  await tier.close();
});

it('an opening that takes long is not waited for, and the tier is there when it has ended', async () => {
  const clock = new ManualClock();
  const inner = new SteppedTier('redis', new ModelArena(2));
  inner.put(namespace, hashes);
  let come: (tier: typeof inner) => void = () => {};
  const open = vi.fn().mockReturnValue(new Promise((resolve) => (come = resolve)));
  let tier: Tier | undefined;
  const opening = openOrLater({ ...common, open, clock }).then((opened) => (tier = opened));
  clock.advance(2_999);
  await settled();
  expect(tier).toBeUndefined();
  clock.advance(1);
  await opening;
  const heard: TierChange[] = [];
  tier!.follow((change) => heard.push(change));
  expect(tier!.stats()).toMatchObject({ inService: false, outOfServiceReason: expect.stringContaining('3 s') });
  clock.advance(3_600_000);
  expect([open.mock.calls.length, clock.pending]).toEqual([1, 0]); // nothing else was begun beside it
  come(inner);
  await settled();
  expect([tier!.lookup(namespace, hashes), tier!.stats().inService, heard.length]).toEqual([2, true, 2]);
  await tier!.close();
});

it('an opening that takes long and fails is tried again, whatever it failed of, and said once', async () => {
  const clock = new ManualClock();
  const error = vi.fn();
  const refused = new KvError('CONFIG', 'redis: wrong password; correct it');
  let fail: (error: unknown) => void = () => {};
  const open = vi
    .fn()
    .mockReturnValueOnce(new Promise((_, reject) => (fail = reject)))
    .mockRejectedValue(refused);
  const opening = openOrLater({ ...common, open, clock, log: { ...silent, error } });
  clock.advance(3_000);
  const tier = await opening;
  fail(refused);
  await settled();
  clock.advance(1_000);
  await settled();
  expect([open.mock.calls.length, error.mock.calls.length]).toEqual([2, 1]);
  expect(tier.stats().outOfServiceReason).toBe('redis: wrong password; correct it');
  await tier.close();
  expect(clock.pending).toBe(0);
});

it('its end ends the tries', async () => {
  const clock = new ManualClock();
  const open = vi.fn().mockRejectedValue(new KvError('IO', 'not there; start it', { retry: true }));
  const tier = await openOrLater({ ...common, open, clock });
  await tier.close();
  expect(clock.pending).toBe(0);
});

it('its end waits a second for an opening that is under way, and what comes after that is closed', async () => {
  const clock = new ManualClock();
  const inner = new SteppedTier('redis', new ModelArena(2));
  const close = vi.spyOn(inner, 'close');
  let come: (tier: typeof inner) => void = () => {};
  const open = vi
    .fn()
    .mockRejectedValueOnce(new KvError('IO', 'not there; start it', { retry: true }))
    .mockReturnValue(new Promise((resolve) => (come = resolve)));
  const tier = await openOrLater({ ...common, open, clock });
  clock.advance(1_000);
  expect(open).toHaveBeenCalledTimes(2);
  let isClosed = false;
  const closing = tier.close().then(() => (isClosed = true));
  clock.advance(999);
  await settled();
  expect(isClosed).toBe(false);
  clock.advance(1);
  await closing;
  expect([clock.pending, close.mock.calls.length]).toEqual([0, 0]);
  come(inner);
  await settled();
  expect([close.mock.calls.length, tier.stats().inService]).toEqual([1, false]);
});
