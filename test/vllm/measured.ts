/** What figures are made of: medians of pairs that were measured one right after the other. */
import type { Run } from './engine.ts';

export const sorted = (values: readonly number[]): number[] => values.toSorted((a, b) => a - b);

/** Of so many parts of the values, the end of the first: 0.5 is the median. */
export function quantile(values: readonly number[], part: number): number {
  if (values.length === 0) throw new Error('a quantile of nothing');
  return sorted(values)[Math.min(values.length - 1, Math.floor(part * values.length))]!;
}

export const median = (values: readonly number[]): number => quantile(values, 0.5);

/** Of pairs: the median of what the first is of the second, and between which two the middle half lies. */
export function ratio(over: readonly number[], under: readonly number[]): string {
  const each = over.map((value, at) => value / under[at]!);
  const at = (part: number): string => quantile(each, part).toFixed(3);
  return `${at(0.5)} (${at(0.25)} to ${at(0.75)})`;
}

/** To the first token of its only request. */
export const firstMs = (run: Run): number => run.first_s[0]! * 1_000;
export const wallMs = (run: Run): number => run.seconds * 1_000;
export const cpuMs = (run: Run): number => run.cpu_s * 1_000;
