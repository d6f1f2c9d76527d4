/**
 * Turns above 50 ms that product code began and that fail no test, each with its reason. The first list is for what is the doing of the test; a
 * turn that the product would have in service, too, does not belong there. The second one is for defects, and is to become empty.
 */
interface NamedTurn {
  /** From the root of the checkout. */
  readonly file: string;
  readonly test: RegExp;
  readonly reason: string;
}

const ownTurns: readonly NamedTurn[] = [
  {
    file: 'packages/engine/executor/src/cuda-emulated.slow.test.ts',
    test: /^/,
    reason: 'the emulator of CUDA computes on this machine what a GPU would compute beside it',
  },
  {
    file: 'packages/coordinator/registry/src/engine-calls.test.ts',
    test: /given up at once/,
    reason: 'the test gives up two thousand calls in one turn, and so does the engine in the same process',
  },
];

const defects: readonly NamedTurn[] = [];

export const isNamedTurn = (file: string, test: string): boolean =>
  [...ownTurns, ...defects].some((named) => named.file === file && named.test.test(test));
