import { LateBinding } from '@kvtier/routing';
import fc from 'fast-check';
import { afterEach, describe, expect, it, vi } from 'vitest';
import { nameOf, never, request, rig } from './testing/dispatcher-rig.ts';

afterEach(() => {
  vi.useRealTimers();
  vi.restoreAllMocks();
});

/** Held by nobody, and computed by nobody else. */
const alone = { keys: new Int32Array(0) };

describe('the queue', () => {
  /** All workers have a second of work. */
  const busy = { tokensAhead: 10_000, waiting: 1 };

  it('holds a request until a worker is about to have nothing to do', async () => {
    const { workers, dispatcher } = rig();
    workers.add('a', {}, busy);
    const b = workers.add('b', {}, busy);
    const choice = dispatcher.choose(request(), never);
    expect(dispatcher.stats().waiting).toBe(1);
    workers.changed();
    await new Promise(setImmediate);
    expect(dispatcher.stats().waiting).toBe(1);
    b.load.tokensAhead = 0;
    workers.changed();
    expect(nameOf(await choice)).toBe('b');
    expect([dispatcher.stats().waiting, workers.open]).toEqual([0, [0, 1]]);
  });

  it.each(['a word of its load', 'a change', 'a first token', 'an end'] as const)('moves on at %s', async (news) => {
    const { dispatcher, workers } = rig();
    workers.add('a');
    const b = workers.add('b', {}, busy);
    const first = await dispatcher.choose(request({ tokens: 20_000, ...alone }), never);
    const second = dispatcher.choose(request(alone), never);
    // Looked at once, in vain; from then on only news brings another look.
    await new Promise(setImmediate);
    expect(dispatcher.stats()).toMatchObject({ waiting: 1, given: 1 });
    if (news === 'a word of its load' || news === 'a change') b.load.tokensAhead = 0;
    if (news === 'a word of its load') workers.told();
    else if (news === 'a change') workers.changed();
    else if (news === 'a first token') first.firstToken();
    else first.ended();
    (await second).ended();
    first.ended();
    expect([dispatcher.stats(), workers.open]).toEqual([
      { policy: 'predicted', waiting: 0, given: 0, chosen: 2, saturated: 0, policyBytes: 0 },
      [0, 0],
    ]);
  });

  it('gives all that it can in one look, each where the one before it leaves room', async () => {
    const { dispatcher, workers } = rig();
    const both = ['a', 'b'].map((name) => workers.add(name, {}, busy));
    const long = { tokens: 10_000, ...alone };
    const choices = [dispatcher.choose(request(long), never), dispatcher.choose(request(long), never)];
    expect(dispatcher.stats().waiting).toBe(2);
    for (const { load } of both) load.tokensAhead = 0;
    workers.told();
    expect((await Promise.all(choices)).map(nameOf).sort()).toEqual(['a', 'b']);
  });

  it('gives over several turns what would hold up everything else in one, and to each model something', async () => {
    vi.useFakeTimers({ toFake: ['performance'] });
    const { dispatcher, workers } = rig();
    const names = Array.from({ length: 8 }, (_, i) => `w${i}`);
    const all = [
      ...names.map((name) => workers.add(name, {}, busy)),
      ...['x', 'y'].map((name) => workers.add(name, { model: 'other' }, busy)),
    ];
    const long = { tokens: 10_000, ...alone };
    const choices = names.map(() => dispatcher.choose(request(long), never));
    choices.push(dispatcher.choose(request({ ...long, model: 'other' }), never));
    await new Promise(setImmediate);
    const sent = workers.sent.bind(workers);
    workers.sent = (...given) => {
      vi.advanceTimersByTime(3); // it takes so long
      return sent(...given);
    };
    for (const { load } of all) load.tokensAhead = 0;
    vi.advanceTimersByTime(10);
    workers.told();
    await new Promise(setImmediate);
    expect([dispatcher.stats().given, workers.open.at(8)! + workers.open.at(9)!]).toEqual([3, 1]);
    expect(new Set((await Promise.all(choices)).map(nameOf)).size).toBe(9);
  });

  it('does not wait until a worker has nothing to do: a step ahead keeps it busy', async () => {
    const { dispatcher, workers } = rig();
    workers.add('a', {}, busy);
    const b = workers.add('b', {}, busy);
    const choice = dispatcher.choose(request(), never);
    b.load.tokensAhead = 1_500; // of 2,048 that a step computes
    workers.told();
    expect(nameOf(await choice)).toBe('b');
  });

  it('is looked at for who comes while others wait for workers that it need not wait for', async () => {
    const { dispatcher, workers } = rig();
    workers.add('a', {}, busy);
    workers.add('b', {}, busy);
    const c = workers.add('c', {}, busy);
    const picky = dispatcher.choose(request({ among: new Set(['a', 'b']), ...alone }), never);
    expect(dispatcher.stats().waiting).toBe(1);
    c.load.tokensAhead = 0; // nobody has told it
    expect(nameOf(await dispatcher.choose(request(alone), never))).toBe('c');
    dispatcher.close();
    await expect(picky).rejects.toMatchObject({ code: 'DISCONNECTED' });
  });

  it('expects of who waits that all workers share it', async () => {
    const { dispatcher, workers } = rig();
    for (const name of ['a', 'b']) workers.add(name, {}, busy);
    // A second ahead everywhere, and 4 s of prompts for two workers: 3 s.
    const waits = dispatcher.choose(request({ tokens: 40_000, ...alone }), never);
    const by = (ms: number) => dispatcher.choose(request({ ...alone, firstTokenByMs: performance.now() + ms }), never);
    await expect(by(2_500)).rejects.toMatchObject({ code: 'BUSY', retryAfterS: 3 });
    const patient = by(3_500);
    expect(dispatcher.stats()).toMatchObject({ waiting: 2, saturated: 1 });
    const closed = [waits, patient].map((one) => expect(one).rejects.toMatchObject({ code: 'DISCONNECTED' }));
    dispatcher.close();
    await Promise.all(closed);
  });

  it('forgets of those that wait what those needed that were given', async () => {
    const { dispatcher, workers } = rig();
    const [a] = ['a', 'b'].map((name) => workers.add(name, { totalBlocks: 10_000 }, busy));
    const long = dispatcher.choose(request({ tokens: 40_000, ...alone }), never);
    const waits = dispatcher.choose(request({ among: new Set(['b']), ...alone }), never);
    a!.load.tokensAhead = 0;
    workers.told();
    const choice = await long;
    expect(nameOf(choice)).toBe('a');
    a!.load.tokensAhead = 10_000;
    // A second ahead, and 16 ms of the other one.
    const third = dispatcher.choose(request({ ...alone, firstTokenByMs: performance.now() + 1_200 }), never);
    const closed = [waits, third].map((one) => expect(one).rejects.toMatchObject({ code: 'DISCONNECTED' }));
    expect(dispatcher.stats()).toMatchObject({ waiting: 2, saturated: 0 });
    dispatcher.close();
    await Promise.all(closed);
    choice.ended();
  });

  it('lets in whom a worker can take now, whatever is expected of the others', async () => {
    const { dispatcher, workers } = rig();
    // 150 ms ahead: more than its target, and little enough that more is given.
    for (const name of ['a', 'b']) workers.add(name, {}, { tokensAhead: 1_500, waiting: 1 });
    const choice = await dispatcher.choose(request({ ...alone, firstTokenByMs: performance.now() + 50 }), never);
    expect([choice.why, dispatcher.stats().saturated]).toEqual([
      'ahead 150 ms, 1 waiting, 0 running, computes 160 of 160 tokens',
      0,
    ]);
  });

  it('expects what is loaded, too, and says with a refusal how it is then', async () => {
    const { dispatcher, workers } = rig({ maxWaitMs: 20 });
    for (const name of ['a', 'b']) workers.add(name, {}, { waiting: 1, tokensAhead: 20_000, loadAheadS: 3.5 });
    const by = request({ ...alone, firstTokenByMs: performance.now() + 2_000 });
    await expect(dispatcher.choose(by, never)).rejects.toMatchObject({ code: 'BUSY', retryAfterS: 4 });
    const waits = dispatcher.choose(request(), never);
    for (const worker of workers.all) worker!.load.loadAheadS = 6.5; // nobody has told it
    await expect(waits).rejects.toMatchObject({ code: 'BUSY', retryAfterS: 7 });
  });

  it('weighs room by how long answers have been, whatever clients allow', async () => {
    const { dispatcher, workers } = rig({ maxWaitMs: 20 });
    const allowed = { ...alone, maxTokens: 100_000 };
    for (const name of ['a', 'b'])
      workers.add(name, { totalBlocks: 1_000 }, { running: 1, usedBlocks: 960, freedBlocksPerS: 1 });
    // 1,024 tokens have no room in 40 blocks of 16.
    await expect(dispatcher.choose(request(allowed), never)).rejects.toMatchObject({ code: 'BUSY' });
    workers.all.forEach((worker) => {
      worker!.load.usedBlocks = 0;
    });
    for (let i = 0; i < 16; i++) (await dispatcher.choose(request(allowed), never)).ended(i === 3 ? 320 : 160);
    workers.all.forEach((worker) => {
      worker!.load.usedBlocks = 960;
    });
    // Who was cut off says nothing.
    (await dispatcher.choose(request(allowed), never)).ended();
    await dispatcher.choose(request(allowed), never);
  });

  it('tells the queue which of those that it gave have ended: their prompts are in use no more', async () => {
    const ended = vi.spyOn(LateBinding.prototype, 'ended');
    const { dispatcher, workers } = rig();
    for (const name of ['a', 'b']) workers.add(name);
    const [one, other] = [await dispatcher.choose(request(), never), await dispatcher.choose(request(), never)];
    other.ended();
    other.ended();
    expect(ended).toHaveBeenCalledTimes(1);
    one.ended(3);
    expect(new Set(ended.mock.calls.map(([item]) => item)).size).toBe(2);
  });

  it('looks up anew what workers hold of a prompt that waits: after a while, and at once when others are there', async () => {
    vi.useFakeTimers({ toFake: ['performance'] });
    const { dispatcher, workers, holdings } = rig();
    const both = ['a', 'b'].map((name) => workers.add(name, {}, busy));
    const late = dispatcher.choose(request(), never);
    holdings.blocks[1] = 8;
    vi.advanceTimersByTime(300);
    for (const { load } of both) load.tokensAhead = 0;
    workers.told();
    expect(nameOf(await late)).toBe('b');
    for (const { load } of both) Object.assign(load, { tokensAhead: 100_000 });
    const third = dispatcher.choose(request(), never);
    workers.add('c');
    holdings.blocks[2] = 9;
    workers.changed();
    expect([nameOf(await third), (await third).match.blocks]).toEqual(['c', 9]);
  });

  it('is not for a model with one worker: that has a queue of its own', async () => {
    const { dispatcher, workers } = rig();
    workers.add('a', {}, busy);
    workers.add('other', { model: 'other' });
    const choices = [await dispatcher.choose(request(), never), await dispatcher.choose(request(), never)];
    expect([choices.map(nameOf), workers.open]).toEqual([
      ['a', 'a'],
      [2, 0],
    ]);
  });

  it('is left by who leaves, for its reason', async () => {
    const { workers, dispatcher } = rig();
    for (const name of ['a', 'b']) workers.add(name, {}, busy);
    const abort = new AbortController();
    const choice = dispatcher.choose(request(), abort.signal);
    abort.abort(new Error('gone'));
    await expect(choice).rejects.toThrow('gone');
    expect(dispatcher.stats().waiting).toBe(0);
    await expect(dispatcher.choose(request(), abort.signal)).rejects.toThrow('gone');
  });

  it('ends with when to come again, at its bound and at its deadline', async () => {
    const { workers, dispatcher } = rig({
      maxWaitMs: 20,
      late: { openS: 0.2, maxHeld: 1, maxLooked: 8, knownMs: 250 },
    });
    for (const name of ['a', 'b']) workers.add(name, {}, { ...busy, tokensAhead: 25_000 });
    const held = dispatcher.choose(request(), never);
    await expect(dispatcher.choose(request(), never)).rejects.toMatchObject({
      code: 'BUSY',
      retryAfterS: 3,
      message: 'model demo: all its workers are saturated: 1 requests wait already; try again later',
    });
    await expect(held).rejects.toMatchObject({
      code: 'BUSY',
      retryAfterS: 3,
      message: 'model demo: all its workers are saturated: no worker had room within 0.02 s; try again later',
    });
    expect(dispatcher.stats()).toMatchObject({ waiting: 0, saturated: 2 });
  });

  it('ends at once when the last worker that may serve it goes', async () => {
    const { workers, dispatcher } = rig();
    workers.add('a', {}, busy);
    const b = workers.add('b', {}, busy);
    const choice = dispatcher.choose(request({ except: new Set(['a']) }), never);
    b.state = 'silent';
    workers.changed();
    await expect(choice).rejects.toMatchObject({ code: 'DISCONNECTED' });
    expect(dispatcher.stats().waiting).toBe(0);
  });

  it.each([1, 2])('ends by its deadline, too, when %i of its two workers left and nobody has looked yet', (left) => {
    vi.useFakeTimers({ toFake: ['setTimeout', 'clearTimeout'] });
    const { workers, dispatcher } = rig({ maxWaitMs: 20 });
    for (const name of ['a', 'b']) workers.add(name, {}, busy);
    const code = left === 1 ? 'BUSY' : 'DISCONNECTED';
    const choice = expect(dispatcher.choose(request(), never)).rejects.toMatchObject({ code });
    for (let number = 0; number < left; number++) workers.all[number] = undefined;
    workers.changed();
    vi.advanceTimersByTime(20);
    expect(dispatcher.stats()).toMatchObject({ waiting: 0, saturated: 2 - left });
    return choice;
  });

  it('gives a request that no pool can hold to a worker without requests', async () => {
    const { workers, dispatcher } = rig();
    for (const name of ['a', 'b']) workers.add(name, { totalBlocks: 4 }, { freedBlocksPerS: 1 });
    (await dispatcher.choose(request(), never)).ended();
    expect(workers.open).toEqual([0, 0]);
  });

  it('serves everyone, whoever leaves and whatever comes and goes', async () => {
    await fc.assert(
      fc.asyncProperty(
        fc.array(fc.record({ tokens: fc.integer({ min: 1, max: 9_000 }), leaves: fc.boolean() }), { maxLength: 30 }),
        async (requests) => {
          const { workers, dispatcher } = rig();
          workers.add('a');
          workers.add('b');
          const abort = new AbortController();
          const outcomes = requests.map(({ tokens, leaves }) =>
            dispatcher
              .choose(request({ tokens, keys: new Int32Array(0) }), leaves ? abort.signal : never)
              .then((choice) => {
                setImmediate(() => {
                  choice.firstToken();
                  choice.ended();
                });
                return 'served';
              })
              .catch(() => 'left'),
          );
          abort.abort(new Error('gone'));
          const told = await Promise.all(outcomes);
          for (const [i, { leaves }] of requests.entries()) if (!leaves) expect(told[i]).toBe('served');
          await new Promise(setImmediate);
          expect(workers.open).toEqual([0, 0]);
          expect(dispatcher.stats()).toMatchObject({ waiting: 0, given: 0 });
        },
      ),
      { numRuns: 30 },
    );
  });

  it('ends while a look is to come, and takes nothing else of the process with it', async () => {
    const { workers, dispatcher } = rig();
    for (const name of ['a', 'b']) workers.add(name, {}, busy);
    const choice = dispatcher.choose(request(), never);
    const closed = expect(choice).rejects.toMatchObject({ code: 'DISCONNECTED' });
    workers.told();
    await new Promise(setImmediate);
    workers.told(); // so soon after a look the next one waits for a timer
    dispatcher.close();
    await closed;
    await new Promise(setImmediate);
  });

  it('is empty after the end', async () => {
    const { workers, dispatcher } = rig();
    for (const name of ['a', 'b']) workers.add(name, {}, busy);
    const choice = dispatcher.choose(request(), never);
    dispatcher.close();
    await expect(choice).rejects.toMatchObject({ code: 'DISCONNECTED' });
    await expect(dispatcher.choose(request(), never)).rejects.toMatchObject({ code: 'DISCONNECTED' });
  });
});
