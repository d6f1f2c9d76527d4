/** A fleet of many: what each of them costs, and the numbers that they are known by. */
import { createLogger } from '@kvtier/telemetry';
import { afterEach, beforeEach, describe, expect, it, onTestFinished, vi } from 'vitest';
import { Fleet } from './fleet.ts';
import { linesPerTurn } from './line-turns.ts';
import { Member } from './member.ts';
import { Pod } from './testing/pod.ts';
import { SpokenDiscovery } from './testing/rig.ts';

const maxWorkers = 64;
const patience = { timeout: 20_000, interval: 5 };
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

it('those that have not measured ask the others once for all of them', async () => {
  const count = 50;
  discovery.say(...Array.from({ length: count }, (_, i) => pod(`w${i}`)));
  await vi.waitUntil(() => (fleet.workers() as readonly Member[]).every(({ link }) => link !== undefined), patience);
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

describe('lines of a long list', () => {
  const list = Array.from({ length: maxWorkers }, (_, i) => pod(`w${i}`));
  const names = (members: readonly Member[]) => members.map(({ record }) => record.name);
  const turn = () => new Promise<void>((resolve) => void setImmediate(resolve));
  const spies = () => {
    const opened = vi.spyOn(Member.prototype, 'open').mock.contexts as Member[];
    const closed = vi.spyOn(Member.prototype, 'close').mock.contexts as Member[];
    return { opened, closed };
  };
  /** Until nothing more is done; the most that one turn did. */
  const mostATurn = async (done: readonly Member[]) => {
    let most = done.length;
    for (let before = -1; before < done.length; most = Math.max(most, done.length - before)) {
      before = done.length;
      await turn();
    }
    return most;
  };
  afterEach(() => void vi.restoreAllMocks());

  it('are opened and closed a few a turn, in its order', async () => {
    const { opened, closed } = spies();
    discovery.say(...list);
    expect(fleet.workers().map((one) => one!.state)).toEqual(Array(maxWorkers).fill('joining'));
    expect(await mostATurn(opened)).toBe(linesPerTurn);
    expect(names(opened)).toEqual(list.map(({ name }) => name));
    discovery.say();
    expect(fleet.workers().filter((one) => one !== undefined)).toEqual([]);
    expect(await mostATurn(closed)).toBe(linesPerTurn);
    expect(closed).toEqual(opened);
  });

  it('are not opened of those that have left meanwhile, and are once of those that came again', async () => {
    const { opened, closed } = spies();
    discovery.say(...list);
    discovery.say(pod('w1'), pod('w60'));
    discovery.say(pod('w1'), pod('w50'), pod('w60'));
    await mostATurn(opened);
    await mostATurn(closed);
    const first = list.slice(0, linesPerTurn).map(({ name }) => name);
    expect(names(opened)).toEqual([...first, 'w60', 'w50']);
    expect(names(closed)).toEqual(expect.arrayContaining(first.filter((name) => name !== 'w1')));
    expect(names(closed)).not.toEqual(expect.arrayContaining(['w1']));
  });

  it('have their names from the start: a second one of a name that waits is refused', async () => {
    discovery.say(...list.slice(1));
    discovery.say(...list.slice(1), { ...pod('w60'), address: 'http://127.0.0.1:2' });
    const [first, second] = fleet.workers().filter((one) => one!.record.name === 'w60');
    expect([first!.state, second!.state]).toEqual(['joining', 'refused']);
  });

  it('are not opened of one whose name came back to the worker that still had requests', async () => {
    const server = new Pod();
    await server.start();
    onTestFinished(() => server.stop());
    const [first, second] = [{ ...pod('w0'), address: server.address }, pod('w0')];
    discovery.say(first);
    await vi.waitFor(() => expect(fleet.workers()[0]!.state).toBe('ready'), patience);
    fleet.sent(0, { requestId: 'r', tokensAhead: 1, blocks: 1, loadS: 0 });
    const { opened } = spies();
    discovery.say(...list.slice(2), second);
    discovery.say(first, ...list.slice(2), second);
    await mostATurn(opened);
    expect(names(opened)).toEqual(list.slice(2).map(({ name }) => name));
    expect(fleet.workers().flatMap((one) => (one?.record.name === 'w0' ? [one.state] : []))).toEqual([
      'ready',
      'refused',
    ]);
    // It is when the other has ended what it had.
    discovery.say(...list.slice(2), second);
    await mostATurn(opened);
    expect(opened.at(-1)!.record).toMatchObject(second);
  });

  it('are all closed when the fleet is, and none is opened any more', async () => {
    const { opened, closed } = spies();
    discovery.say(...list);
    discovery.say(...list.slice(32));
    await turn();
    const before = opened.length;
    await fleet.close();
    await turn();
    expect(opened).toHaveLength(before);
    expect(new Set(closed).size).toBe(maxWorkers);
  });
});
