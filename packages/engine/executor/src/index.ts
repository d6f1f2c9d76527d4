export { attentionGroups, kvBlockBytes } from './attention-groups.ts';
export { gpuMissing } from './backend.ts';
export { checkModelFolder, createExecutor } from './create-executor.ts';
export * from './executor.ts';
export { defaultGpuMemoryUtilization, type GpuDemand, type GpuMemory, gpuBlockCount } from './gpu-memory.ts';
