/**
 * Whether a stretch of a run is a stretch of a prompt, told by its two ends. Each step from one block to the next is a number, and a fold is
 * the sum of all steps so far, in 32 bits: where two stretches begin with the same block and their folds grow by the same, they are the same
 * blocks in the same order, but for one chance in 2^32. Hashes are given to publishers and not chosen by them, so that one who lies about the
 * order of blocks cannot choose his chance.
 */
import type { Keys } from './keys.ts';

/** From one block to the next. */
export const stepOf = (low: number, high: number, nextLow: number, nextHigh: number): number =>
  Math.imul(low ^ 0x9e3779b9, nextHigh | 1) + Math.imul(high | 1, nextLow);

const known = new WeakMap<Keys, Int32Array>();

/** The fold up to each block. Kept as long as the keys are: who asks twice pays once. */
export function foldsOf(keys: Keys): Int32Array {
  let folds = known.get(keys);
  if (folds !== undefined) return folds;
  const count = keys.length / 2;
  folds = new Int32Array(count);
  let fold = 0;
  for (let i = 1; i < count; i++) {
    const at = 2 * i;
    fold = (fold + stepOf(keys[at - 2]!, keys[at - 1]!, keys[at]!, keys[at + 1]!)) | 0;
    folds[i] = fold;
  }
  known.set(keys, folds);
  return folds;
}
