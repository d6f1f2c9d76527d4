/** The CUDA backend on a GPU (`npm run test:gpu`); where there is none, cuda-emulated.slow.test.ts ran the same. */
import { describe, it } from 'vitest';
import { gpuMissing } from './backend.ts';
import { describeGpuBackend } from './testing/backend-suite.ts';

const reason = gpuMissing();

if (reason === null) {
  describeGpuBackend('cuda', { prompts: 1000, bf16Families: 8 });
} else {
  console.warn(`SKIPPED: the CUDA backend on a GPU (${reason})`);
  describe('the CUDA backend on a GPU', () => it.skip('needs a GPU', () => {}));
}
