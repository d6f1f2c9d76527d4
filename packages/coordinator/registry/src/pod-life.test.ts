/**
 * What proves that a pod lives: an answer to a scrape, or a part of any other answer. Pods and connections are real; the clock goes by the
 * test's looks, some ms each, so that a machine that stands still is nobody's silence.
 */
import { setTimeout as sleep } from 'node:timers/promises';
import { createLogger } from '@kvtier/telemetry';
import { afterEach, beforeEach, expect, it, vi } from 'vitest';
import { Fleet } from './fleet.ts';
import { livingTimeout } from './living-timeout.ts';
import { Pod } from './testing/pod.ts';
import { SpokenDiscovery } from './testing/rig.ts';
import type { Worker } from './worker.ts';

/** Each look takes the clock on by so much. */
const patience = { timeout: 20_000, interval: 5 };
const never = new AbortController().signal;
const silentMs = 250;

let fleet: Fleet;
let pod: Pod;
const ends: (() => unknown)[] = [];
beforeEach(async () => {
  vi.useFakeTimers({ toFake: ['performance', 'setTimeout', 'clearTimeout', 'setInterval', 'clearInterval'] });
  pod = new Pod();
  await pod.start();
  ends.push(() => pod.stop());
});
afterEach(async () => {
  vi.useRealTimers();
  for (const end of ends.splice(0).reverse()) await end();
});
/** On the clock; what is on its way has the time to come. */
async function passed(ms: number): Promise<void> {
  for (const endMs = performance.now() + ms; performance.now() < endMs; await sleep(5)) vi.advanceTimersByTime(5);
}

async function join(podBlindMs: number, podSilentMs = silentMs): Promise<void> {
  const logger = createLogger('pod-life-test', 'silent');
  fleet = new Fleet({ logger, times: { scrapeMs: 20, podSilentMs, podBlindMs } });
  ends.push(() => fleet.close());
  const discovery = new SpokenDiscovery();
  await fleet.start(discovery);
  discovery.say({ name: 'a', kind: 'openai', address: pod.address });
  await until('ready');
}
const worker = (): Worker => fleet.workers()[0]!;
const until = (state: string): Promise<void> => vi.waitFor(() => expect(worker().state).toBe(state), patience);

/** An answer in parts, one every 20 ms until `stop`; how many have come, and whether it has ended. */
async function streaming() {
  let timer: NodeJS.Timeout;
  pod.answer = ({ response }) => {
    response.write('token');
    timer = setInterval(() => response.write('token'), 20);
  };
  const { body } = await fleet.forward(0, '/v1/completions', {}, '{}', never);
  const came = { parts: 0, ended: false };
  const read = (async () => {
    for await (const _ of body) came.parts++;
  })().catch(() => undefined);
  void read.then(() => {
    came.ended = true;
  });
  const stop = (): void => clearInterval(timer);
  ends.push(stop);
  const more = async (parts: number): Promise<void> => {
    const enough = came.parts + parts;
    await vi.waitFor(() => expect(came.parts).toBeGreaterThanOrEqual(enough), patience);
  };
  return { came, more, stop };
}

it('late metrics of one whose answers come change nothing; when these stop, too, it is silent as soon as ever', async () => {
  await join(60_000);
  const { came, more, stop } = await streaming();
  pod.metricsHang = true;
  const { scrapes } = pod;
  await more((4 * silentMs) / 20);
  expect([worker().state, fleet.counts.lost, came.ended]).toEqual(['ready', 0, false]);
  expect(pod.scrapes - scrapes).toBeLessThanOrEqual(1); // the one that is late is waited for
  pod.metricsHang = false;
  pod.hangs = true;
  stop();
  const sinceMs = performance.now();
  await until('silent');
  // From the last sign of life on.
  expect(performance.now() - sinceMs).toBeLessThan(2 * silentMs);
  expect(worker().why).toMatch(/\/metrics: no answer within \d+ ms/);
  pod.hangs = false;
  await until('ready');
}, 60_000);

it('answers that come another way, as through a gateway, count too', async () => {
  await join(60_000);
  pod.metricsHang = true;
  const telling = setInterval(() => fleet.heard(0), 20);
  ends.push(() => clearInterval(telling));
  await passed(4 * silentMs);
  expect([worker().state, fleet.counts.lost]).toEqual(['ready', 0]);
  clearInterval(telling);
  await until('silent');
}, 60_000);

it('metrics that stay away: nothing new goes there, what it has goes on, and it is back with them', async () => {
  await join(600);
  const { came, more } = await streaming();
  pod.metricsHang = true;
  await until('silent');
  await more(20);
  expect([worker().state, came.ended]).toEqual(['silent', false]);
  pod.metricsHang = false;
  await until('ready');
  await more(5);
  expect(fleet.counts).toMatchObject({ lost: 1, ready: 2 });
}, 60_000);

it('one that may be silent for longer than its metrics may be late is so at no other moment', async () => {
  await join(silentMs / 2, 4 * silentMs);
  pod.hangs = true;
  await passed(2 * silentMs);
  expect(worker().state).toBe('ready');
  await until('silent');
}, 60_000);

it('parts that had waited for a slow reader prove nothing', async () => {
  await join(60_000);
  const bytes = 8 << 20;
  pod.answer = ({ response }) => void response.write(Buffer.alloc(bytes));
  const { body } = await fleet.forward(0, '/v1/completions', {}, '{}', never);
  const parts = body[Symbol.asyncIterator]();
  let read = 0;
  const reading = setInterval(() => void parts.next().then(({ value }) => (read += value?.length ?? 0)), 50);
  ends.push(() => {
    clearInterval(reading);
    return parts.return?.();
  });
  await vi.waitFor(() => expect(read).toBeGreaterThan(0), patience);
  pod.hangs = true;
  await until('silent');
  expect(read).toBeLessThan(bytes);
}, 60_000);

it('a limit that is counted anew from each sign of life, and its own bound', async () => {
  const patient = (mostMs: number, heardAtMs: () => number) => livingTimeout({ silentMs: 40, mostMs, heardAtMs });
  const mostMs = 1_000;
  const beganMs = performance.now();
  const ended = async ({ signal }: AbortSignalOf): Promise<number> => {
    await vi.waitFor(() => expect(signal.aborted).toBe(true), patience);
    return performance.now() - beganMs;
  };
  const [never, living] = [patient(mostMs, () => Number.NEGATIVE_INFINITY), patient(mostMs, () => performance.now())];
  expect(await ended(never)).toBeLessThan(mostMs);
  expect(living.signal.aborted).toBe(false);
  expect(await ended(living)).toBeGreaterThanOrEqual(mostMs);
  expect(living.signal.reason).toMatchObject({ name: 'TimeoutError' });
  const over = patient(50, () => performance.now());
  over.end();
  await passed(150);
  expect(over.signal.aborted).toBe(false);
});
type AbortSignalOf = ReturnType<typeof livingTimeout>;
