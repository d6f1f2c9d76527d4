/** The CUDA backend, its kernels on the CPU: everything but its speed. On a GPU: cuda.gpu.slow.test.ts. */
import { describeGpuBackend } from './testing/backend-suite.ts';

describeGpuBackend('cuda-emulated', { prompts: 6, bf16Families: 2 });
