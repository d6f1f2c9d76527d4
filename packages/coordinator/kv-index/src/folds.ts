/**
 * Whether a stretch of a run is a stretch of a prompt, told by its two ends. Each step from one block to the next is a number, and a fold is
 * the sum of all steps so far, in 32 bits: where two stretches begin with the same block and their folds grow by the same, they are the same
 * blocks in the same order, but for one chance in 2^32. Hashes are given to publishers and not chosen by them, so that one who lies about the
 * order of blocks cannot choose his chance.
 */
import type { Keys } from './keys.ts';

/** From one block to the next. */
export const stepOf = (low: number, nextHigh: number): number => Math.imul(low ^ 0x9e3779b9, nextHigh | 1);

const known = new WeakMap<ArrayBufferLike, Int32Array>();

/**
 * The fold up to each block of a prompt. Kept as long as the keys' memory is, and shared by what begins where it begins: whoever makes keys
 * to be asked for asks once here, and decisions find them.
 */
export function foldsOf(keys: Keys): Int32Array {
  if (keys.byteOffset !== 0) return summed(keys);
  let folds = known.get(keys.buffer);
  if (folds === undefined) {
    folds = summed(new Int32Array(keys.buffer));
    known.set(keys.buffer, folds);
  }
  return folds;
}

/** Folds that were made beside the keys in another thread (`foldsOf` there), whose memory both have left. */
export function keepFolds(keys: Keys, folds: Int32Array): void {
  if (keys.byteOffset === 0 && 2 * folds.length === keys.length) known.set(keys.buffer, folds);
}

function summed(keys: Keys): Int32Array {
  const folds = new Int32Array(keys.length >>> 1);
  let fold = 0;
  for (let i = 1; i < folds.length; i++) {
    const at = 2 * i;
    fold = (fold + stepOf(keys[at - 2]!, keys[at + 1]!)) | 0;
    folds[i] = fold;
  }
  return folds;
}
