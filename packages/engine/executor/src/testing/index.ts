/** For tests: doubles, rigs and what else of this room they look at. */
export { binding } from '../binding.ts';
export { goldenDir, goldenFamilies, readGolden } from './golden.ts';
export { blocksFor, prefill, relativeError, runStep } from './run-step.ts';
