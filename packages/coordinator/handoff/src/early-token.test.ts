/** The first token of a hand-off: given once, in order, whichever side is first, however slowly it is taken. */
import type { OnEvent } from '@kvtier/registry';
import { event } from '@kvtier/registry/testing';
import { expect, it, vi } from 'vitest';
import { EarlyToken } from './early-token.ts';

function early(onTold: OnEvent = () => undefined) {
  const told: number[][] = [];
  const token = new EarlyToken('r', (said) => {
    told.push([...said.tokenIds]);
    return onTold(said);
  });
  return { token, told };
}
const drawn = (...tokenIds: number[]) => event({ tokenIds });

it('is not given twice, by either side', () => {
  const { token, told } = early();
  token.give(drawn(5));
  token.give(drawn(5));
  token.pass(event({ tokenIds: [5, 6] }));
  token.pass(drawn(5));
  expect(told).toEqual([[5], [6], [5]]);
  expect([token.isGiven, token.isOver, token.signal.aborted]).toEqual([true, false, false]);
});

it('says how long it was until the next token came, and not until the decode side drew the same one', () => {
  vi.useFakeTimers({ toFake: ['performance'] });
  try {
    const { token } = early();
    token.give(drawn(5));
    vi.advanceTimersByTime(300);
    token.pass(drawn(5));
    expect(token.pauseS).toBe(undefined);
    vi.advanceTimersByTime(20);
    token.pass(drawn(6));
    vi.advanceTimersByTime(20);
    token.pass(drawn(7));
    expect(token.pauseS).toBeCloseTo(0.32, 9);
  } finally {
    vi.useRealTimers();
  }
});

it('passes what the decode side says as it is, where it was first', () => {
  const { token, told } = early();
  token.pass(drawn(5));
  token.pass(drawn(6));
  expect([told, token.isGiven]).toEqual([[[5], [6]], false]);
});

it('what follows waits until it is taken', async () => {
  let take = (): void => {};
  const { token, told } = early(
    () =>
      new Promise<void>((resolve) => {
        take = () => resolve();
      }),
  );
  const given = token.give(drawn(5));
  const passed = token.pass(event({ tokenIds: [5], finishReason: 'length' }));
  await new Promise(setImmediate);
  expect(told).toEqual([[5]]);
  take();
  await given;
  await new Promise(setImmediate);
  take();
  await passed;
  expect(told).toEqual([[5], []]);
});

it('ends the decode side where it was the only one, or nothing more is wanted', async () => {
  const last = early();
  last.token.give(event({ tokenIds: [5], finishReason: 'stop' }));
  const enough = early(() => false);
  enough.token.give(drawn(5));
  const late = early(() => Promise.resolve(false as const));
  await late.token.give(drawn(5));
  for (const { token } of [last, enough, late]) expect([token.isOver, token.signal.aborted]).toEqual([true, true]);
});

it('whoever has enough with it hears nothing of what the decode side said meanwhile', async () => {
  let take = (_: boolean): void => {};
  const taken = new Promise<boolean>((resolve) => {
    take = resolve;
  });
  const { token, told } = early(() => taken);
  token.give(drawn(5));
  const passed = token.pass(drawn(5, 6));
  take(false);
  expect([await passed, token.isOver, told]).toEqual([false, true, [[5]]]);
});

it('nothing that waits is told once the hand-off has ended, and nothing is given', async () => {
  let take = (): void => {};
  const taken = new Promise<void>((resolve) => {
    take = resolve;
  });
  const { token, told } = early(() => taken);
  token.give(drawn(5));
  const passed = token.pass(drawn(5, 6));
  token.leave();
  take();
  expect([await passed, token.isOver, told]).toEqual([false, false, [[5]]]);
  const none = early();
  none.token.leave();
  none.token.give(drawn(5));
  expect([none.token.isGiven, none.told]).toEqual([false, []]);
});

it.each<[string, OnEvent]>([
  [
    'at once',
    () => {
      throw new Error('gone');
    },
  ],
  ['later', () => Promise.reject(new Error('gone'))],
])('whoever cannot take it is told so by the decode side: %s', async (_, onTold) => {
  const { token } = early(onTold);
  await token.give(drawn(5));
  expect([token.isOver, (token.signal.reason as Error).message]).toEqual([false, 'gone']);
});

it('another token of the decode side fails its stream, to go on from what was given', () => {
  const { token, told } = early();
  token.give(drawn(5));
  const problem = 'request r: the prefill worker drew token 5 first, the decode worker 7';
  const pass = (): unknown => token.pass(drawn(7));
  expect(pass).toThrow(expect.objectContaining({ code: 'DISCONNECTED', retry: true, message: problem }));
  expect(told).toEqual([[5]]);
});
