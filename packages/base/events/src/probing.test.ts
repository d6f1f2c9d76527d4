import { expect, it } from 'vitest';
import { maxUnansweredMs, Probing, probeMs } from './probing.ts';

/** When it is due, each probe taking `tookMs`. */
function dues(probing: Probing, fromMs: number, untilMs: number, tookMs: number, isAnswered: boolean): number[] {
  const dueMs: number[] = [];
  for (let ms = fromMs; ms < untilMs; ms += 250) {
    if (!probing.isDue(ms, true)) continue;
    dueMs.push(ms);
    ms += tookMs;
    if (isAnswered) probing.probed(ms, false);
    else probing.unanswered(ms);
  }
  return dueMs.slice(1).map((ms, i) => ms - dueMs[i]! - tookMs);
}

it('one that does not answer is asked ever more rarely, once a minute in the end; answered or connected, it begins again', () => {
  const probing = new Probing(0);
  const pauses = [1_000, 2_000, 4_000, 8_000, 16_000, 32_000, maxUnansweredMs, maxUnansweredMs];
  expect(dues(probing, 1_000, 250_000, 5_000, false).slice(0, pauses.length)).toEqual(pauses);
  probing.connected();
  expect(probing.isDue(1e6, true)).toBe(true);
  probing.unanswered(1e6);
  expect(dues(probing, 1e6 + 1_000, 1e6 + 4_000, 250, true)[0]).toBe(probeMs);
});
