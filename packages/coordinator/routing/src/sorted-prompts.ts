/** Prompts in the order of their hashes, one after the other: the neighbours of a prompt's place are those that have most of it. */
import type { Keys } from '@kvtier/kv-index';

/** Of those before it, none is behind the prompt in the order; of equal ones it is behind all. */
export function placeOf(sorted: readonly { readonly keys: Keys }[], keys: Keys): number {
  let low = 0;
  let high = sorted.length;
  while (low < high) {
    const middle = (low + high) >>> 1;
    if (isBefore(keys, sorted[middle]!.keys)) high = middle;
    else low = middle + 1;
  }
  return low;
}

function isBefore(a: Keys, b: Keys): boolean {
  const at = 2 * commonBlocks(a, b);
  if (at >= a.length || at >= b.length) return a.length < b.length;
  return a[at] === b[at] ? a[at + 1]! < b[at + 1]! : a[at]! < b[at]!;
}

/** A chain hash names its block and all before it: where two are equal, all before them are. */
export function commonBlocks(a: Keys, b: Keys): number {
  let low = 0;
  let high = Math.min(a.length, b.length) / 2;
  // Most have nothing in common.
  if (high === 0 || !areEqual(a, b, 0)) return 0;
  while (low < high) {
    const middle = (low + high + 1) >>> 1;
    if (areEqual(a, b, middle - 1)) low = middle;
    else high = middle - 1;
  }
  return low;
}

const areEqual = (a: Keys, b: Keys, block: number): boolean =>
  a[2 * block] === b[2 * block] && a[2 * block + 1] === b[2 * block + 1];
