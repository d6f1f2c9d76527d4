/** A fleet of many: what each of them costs, and the numbers that they are known by. */
import { createLogger } from '@kvtier/telemetry';
import { afterEach, beforeEach, expect, it, vi } from 'vitest';
import { Fleet } from './fleet.ts';
import { Member } from './member.ts';
import { SpokenDiscovery } from './testing/rig.ts';

const maxWorkers = 64;
let fleet: Fleet;
let discovery: SpokenDiscovery;
beforeEach(async () => {
  fleet = new Fleet({ logger: createLogger('fleet-test', 'silent'), maxWorkers });
  discovery = new SpokenDiscovery();
  await fleet.start(discovery);
});
afterEach(async () => {
  vi.useRealTimers();
  await fleet.close();
});

/** Nobody is there. */
const pod = (name: string) => ({ name, kind: 'openai' as const, address: 'http://127.0.0.1:1' });

it('those that have not measured ask the others once for all of them', () => {
  const count = 50;
  discovery.say(...Array.from({ length: count }, (_, i) => pod(`w${i}`)));
  const looks = vi.spyOn(Member.prototype, 'measuredPrefillTokensPerS', 'get');
  const rates = fleet.workers().map((worker) => worker!.load.prefillTokensPerS);
  expect(new Set(rates)).toEqual(new Set([2_000]));
  expect(looks.mock.calls.length).toBeLessThanOrEqual(count);
  looks.mockRestore();
});

const numbers = () =>
  Object.fromEntries(fleet.workers().flatMap((one) => (one ? [[one.record.name, one.number]] : [])));

it('a number stays with who had it while a request may still mean him', async () => {
  vi.useFakeTimers({ toFake: ['performance'] });
  discovery.say(pod('a'), pod('b'));
  expect(numbers()).toEqual({ a: 0, b: 1 });
  discovery.say(pod('b'));
  discovery.say(pod('b'), pod('c'));
  expect(numbers()).toEqual({ b: 1, c: 2 });
  // A request that was given to the first one finds nobody there.
  const forwarded = async () => fleet.forward(0, '/v1/completions', {}, '{}', new AbortController().signal);
  await expect(forwarded()).rejects.toMatchObject({ code: 'DISCONNECTED', retry: true });
  // Not even he himself, for he may have been started as something else.
  discovery.say(pod('a'), pod('b'), pod('c'));
  expect(numbers()).toEqual({ a: 3, b: 1, c: 2 });
  vi.advanceTimersByTime(600_001);
  discovery.say(pod('a'), pod('b'), pod('c'), pod('d'));
  expect(numbers()).toEqual({ a: 3, b: 1, c: 2, d: 0 });
});

it('numbers are bounded, however fast workers come and go: then the one that has been free for longest is given', () => {
  for (let i = 0; i < 20; i++) discovery.say(...Array.from({ length: maxWorkers }, (_, at) => pod(`w${i}-${at}`)));
  expect(fleet.workers()).toHaveLength(4 * maxWorkers);
  expect(Object.values(numbers()).toSorted((a, b) => a - b)).toEqual(
    Array.from({ length: maxWorkers }, (_, at) => 3 * maxWorkers + at),
  );
});
