import fc from 'fast-check';
import { describe, expect, it } from 'vitest';
import { nameOf, never, request, rig } from './testing/dispatcher-rig.ts';

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

  it('moves on when a request ends', async () => {
    const { dispatcher, workers } = rig();
    workers.add('a');
    workers.add('b', {}, busy);
    const first = await dispatcher.choose(request({ tokens: 20_000, keys: new Int32Array(0) }), never);
    const second = dispatcher.choose(request(), never);
    expect(dispatcher.stats()).toMatchObject({ waiting: 1, given: 1 });
    first.ended();
    (await second).ended();
    expect([dispatcher.stats(), workers.open]).toEqual([
      { policy: 'predicted', waiting: 0, given: 0, chosen: 2, saturated: 0, policyBytes: 0 },
      [0, 0],
    ]);
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
      message: 'model demo: 1 requests wait already; try again later',
    });
    await expect(held).rejects.toMatchObject({
      code: 'BUSY',
      retryAfterS: 3,
      message: 'model demo: no worker had room within 0.02 s; try again later',
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

  it('is empty after the end', async () => {
    const { workers, dispatcher } = rig();
    for (const name of ['a', 'b']) workers.add(name, {}, busy);
    const choice = dispatcher.choose(request(), never);
    dispatcher.close();
    await expect(choice).rejects.toMatchObject({ code: 'DISCONNECTED' });
    await expect(dispatcher.choose(request(), never)).rejects.toMatchObject({ code: 'DISCONNECTED' });
  });
});
