/** Blocks of tests: nodes of a tree, by number, and their hashes from these. */
import type { Keys } from '../keys.ts';

const keyOf = (node: number): [number, number] => [
  Math.imul(node + 1, 0x9e3779b1) | 0,
  Math.imul(node + 7, 0x85ebca6b) | 0,
];
export const keysOf = (nodes: readonly number[]): Keys => Int32Array.from(nodes.flatMap(keyOf));

/** Two of 256 sources, for each number another two. */
export const pairOf = (number: number): [number, number] => [number % 256, (number + 1 + (number >> 8)) % 256];
