export {
  type ArrivedLoad,
  type AwaitedLoad,
  type ByTier,
  type Connector,
  type LoadResult,
  type Match,
  noConnector,
} from './connector.ts';
export { Engine } from './engine.ts';
export type { EngineLoadFigures } from './engine-load.ts';
export type { EngineOptions, StepInfo } from './engine-options.ts';
export { drawSeed } from './seed.ts';
export * from './types.ts';
