export {
  type ArrivedLoad,
  type ByTier,
  type Connector,
  type LoadResult,
  type Match,
  noConnector,
} from './connector.ts';
export { Engine, type EngineOptions, type StepInfo } from './engine.ts';
export { drawSeed } from './seed.ts';
export * from './types.ts';
