/**
 * How far the prefill rate that a worker has measured is believed. It may be far too low for a reason that has gone: something was compiled,
 * the process stood still. Who counts as so slow gets nothing while there are others, and so never shows that it is not. Therefore a rate
 * below the usual one of its model drifts towards that while the worker measures nothing new: it is tried again, and what it
 * measures then counts at once. One that is faster than usual keeps its rate: it starves nobody.
 */

/** For so long it is believed as it is: a worker that has work measures many times in it. */
export const heldMs = 5_000;
/** After each of these what is left of the difference, as a factor, is its square root. */
const halfMs = 10_000;

/** `measured`: 0: nothing yet. `usual` is asked only where it counts; above 0. `oldMs`: since it measured last. */
export function believedRate(measured: number, usual: () => number, oldMs: number): number {
  if (!(measured > 0)) return usual();
  if (!(oldMs > heldMs)) return measured;
  const rate = usual();
  if (measured >= rate) return measured;
  return rate * (measured / rate) ** (0.5 ** ((oldMs - heldMs) / halfMs));
}
