/** Goodput of servers that can do so much, and no more, however they look while requests come. */
import { KvError } from '@kvtier/errors';
import { expect, it } from 'vitest';
import { type Ended, type Served, saturation, served } from './goodput.ts';
import { arrivals, isInTime } from './pd-load.ts';

const [answerTokens, tokensPerS, ms] = [100, 1_000, 20_000];
/** The first token of an answer takes no time. */
const mostPerS = tokensPerS / (answerTokens - 1);

/** Gives each first token at once; all others, one answer after another, at a fixed rate. */
function eager(perS: number): Ended[] {
  let freeMs = 0;
  return arrivals({ prompt: perS, stream: 0 }, ms, 11).map(({ atMs }) => {
    const gapsMs = Array.from({ length: answerTokens - 1 }, () => 1_000 / tokensPerS);
    const waitedMs = Math.max(freeMs - atMs, 0);
    gapsMs[0]! += waitedMs;
    freeMs = atMs + waitedMs + (answerTokens - 1) * (1_000 / tokensPerS);
    return { endMs: freeMs, answer: { ttftMs: 0, gapsMs } };
  });
}
const patient = { ttftMs: 1, itlMs: Number.POSITIVE_INFINITY };
const targets = { ttftMs: 1, itlMs: 200 };

it.each([0.5, 1, 2, 10])(
  'a server yields no more answers a second than its rate allows: asked %d times as many',
  (times) => {
    const { goodPerS, asked, inTime } = served(eager(times * mostPerS), patient, ms);
    expect(inTime).toBe(asked);
    expect(goodPerS).toBeLessThanOrEqual(mostPerS);
    if (times > 1) expect(goodPerS).toBeGreaterThan(0.99 * mostPerS);
  },
);

it('an answer is in time by its first token and by each pause behind it', () => {
  const of = (ttftMs: number, ...gapsMs: number[]): Ended => ({ endMs: 100, answer: { ttftMs, gapsMs } });
  const all = [of(1), of(1, 200, 200), of(1, 5, 201), of(2, 5, 201), { endMs: 9e9, answer: undefined }];
  expect(served(all, targets, 1_000)).toEqual({ asked: 5, inTime: 2, late: 1, paused: 1, refused: 1, goodPerS: 2 });
  expect(all.map(({ answer }) => answer !== undefined && isInTime(answer, targets))).toEqual([
    ...[true, true, false, false, false],
  ]);
});

it('saturation is the first load beyond of which more than a seventh is not in time', async () => {
  const of = (perS: number): Served => served(eager(perS), targets, ms);
  const asked: number[] = [];
  const perS = await saturation(0.5 * mostPerS, async (perS) => {
    asked.push(perS);
    return of(perS);
  });
  const shares = asked.map(of).map(({ inTime, asked }) => inTime / asked);
  expect(asked.at(-1)).toBe(perS);
  expect(shares.pop()).toBeLessThan(0.855);
  expect(shares.length).toBeGreaterThan(1);
  expect(Math.min(...shares)).toBeGreaterThanOrEqual(0.855);
});

it('saturation is no less than what is answered at most, whatever misses its targets', async () => {
  const none = { asked: 10, inTime: 1, late: 0, paused: 9, refused: 0, goodPerS: 0.1 };
  expect(await saturation(3, async () => none)).toBe(3);
});

it('where everything is in time there is no saturation: it says what was served', async () => {
  const all = { asked: 10, inTime: 10, late: 0, paused: 0, refused: 0, goodPerS: 1 };
  const found = saturation(1, async () => all);
  await expect(found).rejects.toThrow(KvError);
  await expect(found).rejects.toThrow(
    /^bench overload: 8\.92 requests a second are not too much: 10 asked, 10 in time/,
  );
});
