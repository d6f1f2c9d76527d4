export { gpuMissing } from './backend.ts';
export { checkModelFolder, createExecutor } from './create-executor.ts';
export * from './executor.ts';
export type { GpuDemand, GpuMemory } from './gpu-memory.ts';
