export { Engine, type EngineOptions, type StepInfo } from './engine.ts';
export { drawSeed } from './seed.ts';
export * from './types.ts';
