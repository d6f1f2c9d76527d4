/** Goodput of servers that can do so much, and no more, however they look while requests come. */
import { KvError } from '@kvtier/errors';
import { expect, it } from 'vitest';
import { type Ended, saturation, served } from './goodput.ts';
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

it.each([0.1, 0.9, 1.5, 5])(
  'saturation is where not all is served in time, wherever it is looked for first: %d',
  async (from) => {
    const inTimeOf = (perS: number): number => {
      const { inTime, asked } = served(eager(perS), targets, ms);
      return inTime / asked;
    };
    const perS = await saturation(from * mostPerS, async (perS) => served(eager(perS), targets, ms));
    expect(inTimeOf(perS)).toBeLessThan(0.855);
    expect(inTimeOf(perS / 1.2)).toBeGreaterThanOrEqual(0.855);
  },
);

it.each([
  ['everything', 1],
  ['nothing', 0],
])('there is no saturation where %s is in time: it says what was served', async (_what, share) => {
  const all = { asked: 10, inTime: 10 * share, late: 10 - 10 * share, paused: 0, refused: 0, goodPerS: 1 };
  const found = saturation(1, async () => all);
  await expect(found).rejects.toThrow(KvError);
  await expect(found).rejects.toThrow(/^bench overload: from 1\.00 requests a second on, .*: 10 asked, /);
});
