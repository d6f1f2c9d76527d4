/** Prompts as chains of hashes, for tests. */

/** A chain: hashes are equal as long as all numbers before them are. */
export function keysOf(numbers: readonly number[]): Int32Array {
  const keys = new Int32Array(2 * numbers.length);
  let chain = 17;
  numbers.forEach((number, i) => {
    chain = Math.imul(chain ^ (number + 1), 0x9e3779b1) | 0;
    keys[2 * i] = chain;
    keys[2 * i + 1] = Math.imul(chain, 31);
  });
  return keys;
}

export const naiveCommon = (a: readonly number[], b: readonly number[]): number => {
  let blocks = 0;
  while (blocks < Math.min(a.length, b.length) && a[blocks] === b[blocks]) blocks++;
  return blocks;
};
