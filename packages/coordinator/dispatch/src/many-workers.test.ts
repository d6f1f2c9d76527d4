/** What looks at the queue cost where there are many workers, or many that wait: counted, and not timed. */
import { afterEach, beforeEach, describe, expect, it, vi } from 'vitest';
import { Pending } from './pending.ts';
import { nameOf, never, request, rig } from './testing/dispatcher-rig.ts';

beforeEach(() => {
  vi.useFakeTimers({ toFake: ['performance'] });
});
afterEach(() => {
  vi.useRealTimers();
  vi.restoreAllMocks();
});

/** A second of work. */
const busy = { tokensAhead: 10_000, waiting: 1 };
/** Nothing to compute, and room for ten blocks. */
const almostFull = { running: 40, usedBlocks: 990, freedBlocksPerS: 1 };
/** Two blocks. */
const small = { tokens: 16 };

/** So many words of loads, each of them so much later that a look is due. */
async function told(times: number, workers: { told(): void }, each = (): void => {}): Promise<void> {
  for (let i = 0; i < times; i++) {
    vi.advanceTimersByTime(30);
    workers.told();
    await new Promise((resolve) => setTimeout(resolve, 3));
    each();
  }
}

describe('a look at the queue', () => {
  it('is at nobody while no worker has both time and room, whatever is told', async () => {
    const { workers, dispatcher } = rig();
    workers.add('a', {}, almostFull);
    const b = workers.add('b', {}, busy);
    const choices = [1, 2, 3].map(() => dispatcher.choose(request({ keys: new Int32Array(0) }), never));
    await new Promise(setImmediate);
    const viewed = vi.spyOn(Pending.prototype, 'isMatched');
    await told(10, workers);
    expect([viewed.mock.calls.length, dispatcher.stats().waiting]).toEqual([0, 3]);
    b.load.tokensAhead = 0;
    await told(1, workers);
    for (const choice of await Promise.all(choices)) expect(nameOf(choice)).toBe('b');
  });

  it('that nobody can be given in takes a part of a turn, and goes on in a later one from where it stopped', async () => {
    const { workers, holdings, dispatcher } = rig();
    for (const name of ['a', 'b']) workers.add(name, {}, busy);
    workers.add('c', {}, almostFull);
    // Who fits there may not have it: those who may do not fit, and are looked at.
    const waits = [dispatcher.choose(request({ ...small, among: new Set(['a']) }), never)];
    for (let i = 0; i < 30; i++) waits.push(dispatcher.choose(request({ keys: new Int32Array(20).fill(i) }), never));
    for (const one of waits) one.catch(() => {});
    await told(2, workers);
    const match = holdings.match.bind(holdings);
    const asked: number[] = [];
    holdings.match = (model, keys, numbers) => {
      vi.advanceTimersByTime(1); // it takes so long
      asked.push(keys[0]!);
      return match(model, keys, numbers);
    };
    vi.advanceTimersByTime(300); // what is known of them is too old
    const inTurns: number[] = [];
    await told(8, workers, () => inTurns.push(asked.length));
    const most = Math.max(...inTurns.map((count, i) => count - (inTurns[i - 1] ?? 0)));
    expect(most).toBeLessThanOrEqual(7);
    expect(new Set(asked).size).toBe(30);
    expect(dispatcher.stats().waiting).toBe(31);
  });

  it('is at those that some open worker may serve, however many wait for others', async () => {
    const { workers, dispatcher } = rig();
    workers.add('a', {}, { ...busy, tokensAhead: 1e6 });
    const b = workers.add('b', {}, busy);
    const picky = Array.from({ length: 70 }, () => dispatcher.choose(request({ among: new Set(['a']) }), never));
    for (const one of picky) one.catch(() => {});
    vi.advanceTimersByTime(300);
    const late = dispatcher.choose(request(), never);
    b.load.tokensAhead = 0;
    await told(5, workers);
    expect(dispatcher.stats()).toMatchObject({ waiting: 70, given: 1 });
    expect(nameOf(await late)).toBe('b');
  });
});

describe('a change of workers', () => {
  it('is checked against those that wait for the workers that changed, and for no others', async () => {
    const { workers, dispatcher } = rig();
    const all = Array.from({ length: 100 }, (_, i) => workers.add(`w${i}`, {}, { ...busy, tokensAhead: 1e6 }));
    const among = new Set(['w98', 'w99']);
    const waits = Array.from({ length: 50 }, () => dispatcher.choose(request({ among }), never));
    await told(1, workers);
    const asked = vi.spyOn(Pending.prototype, 'allows');
    all[3]!.state = 'silent';
    all[98]!.state = 'silent';
    workers.changed();
    await told(3, workers);
    expect([dispatcher.stats().waiting, asked.mock.calls.length < 500]).toEqual([50, true]);
    const lost = waits.map((one) => expect(one).rejects.toMatchObject({ code: 'DISCONNECTED' }));
    all[99]!.state = 'silent';
    workers.changed();
    await told(3, workers);
    await Promise.all(lost);
    expect(dispatcher.stats().waiting).toBe(0);
  });
});
