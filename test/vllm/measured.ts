/** What figures are made of: medians of pairs that were measured one right after the other, and how sure they are. */
import type { Run } from './engine.ts';

export const sorted = (values: readonly number[]): number[] => values.toSorted((a, b) => a - b);

/** Of so many parts of the values, the end of the first: 0.5 is the median. */
export function quantile(values: readonly number[], part: number): number {
  if (values.length === 0) throw new Error('a quantile of nothing');
  return sorted(values)[Math.min(values.length - 1, Math.floor(part * values.length))]!;
}

export const median = (values: readonly number[]): number => quantile(values, 0.5);

/**
 * Between which two of the values the median of what they were drawn from lies, 19 times out of 20, whatever their
 * distribution: so many of them lie below it as coins show heads. Of fewer than six all of them are not enough, and said.
 */
export function medianWithin(values: readonly number[]): [number, number] {
  const count = values.length;
  const each = sorted(values);
  let tail = 0;
  let chance = 0.5 ** count; // of `out` heads
  let out = 0;
  for (; out < count / 2 && tail + chance <= 0.025; out++) {
    tail += chance;
    chance *= (count - out) / (out + 1);
  }
  const at = Math.max(0, out - 1);
  return [each[at]!, each[count - 1 - at]!];
}

/** Of pairs: the median of what the first is of the second, and between which two it lies 19 times out of 20. */
export function ratio(over: readonly number[], under: readonly number[]): string {
  const each = over.map((value, at) => value / under[at]!);
  const [from, to] = medianWithin(each);
  return `${median(each).toFixed(4)} (${from.toFixed(4)} to ${to.toFixed(4)})`;
}

/** To the first token of its only request. */
export const firstMs = (run: Run): number => run.first_s[0]! * 1_000;
export const wallMs = (run: Run): number => run.seconds * 1_000;
export const cpuMs = (run: Run): number => run.cpu_s * 1_000;
