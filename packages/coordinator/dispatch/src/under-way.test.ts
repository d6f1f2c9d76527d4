/** What the dispatcher expects of prompts that are being computed. */
import { expect, it } from 'vitest';
import { nameOf, never, request, rig } from './testing/dispatcher-rig.ts';

/** A second of work. */
const busy = { tokensAhead: 10_000, waiting: 1 };

it('counts of a request only what it will compute once what is computed before it is there', async () => {
  const { workers, dispatcher } = rig();
  workers.add('a');
  workers.add('b', {}, busy);
  await dispatcher.choose(request(), never);
  expect(nameOf(await dispatcher.choose(request(), never))).toBe('a');
  expect(workers.shares.map(({ tokensAhead }) => tokensAhead)).toEqual([160, 1]);
});

it('expects nothing of what a worker was computing that is away, or another one', async () => {
  for (const change of ['away', 'other'] as const) {
    const { workers, dispatcher } = rig();
    const first = workers.add('a');
    workers.add('b', {}, busy);
    await dispatcher.choose(request(), never);
    if (change === 'away') {
      first.state = 'joining';
      workers.changed();
      await expect(dispatcher.choose(request({ among: new Set(['a']) }), never)).rejects.toThrow('no');
      first.state = 'ready';
    } else workers.all[0] = { ...first, record: { ...first.record, name: 'c' } };
    workers.changed();
    await dispatcher.choose(request(), never);
    expect([change, ...workers.shares.map(({ tokensAhead }) => tokensAhead)]).toEqual([change, 160, 160]);
  }
});

it('expects nothing of a prompt that ended before it was computed, and all of one that has its first token', async () => {
  for (const isComputed of [false, true]) {
    const { workers, dispatcher } = rig();
    const first = workers.add('a');
    workers.add('b');
    const choice = await dispatcher.choose(request({ among: new Set(['a']) }), never);
    if (isComputed) choice.firstToken();
    choice.ended();
    Object.assign(first.load, { tokensAhead: 50, waiting: 1 });
    const next = await dispatcher.choose(request(), never);
    expect([nameOf(next), workers.shares[1]!.tokensAhead]).toEqual(isComputed ? ['a', 1] : ['b', 160]);
  }
});
