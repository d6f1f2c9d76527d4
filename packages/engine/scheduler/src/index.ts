/**
 * Who runs in the engine, and the port to what keeps blocks elsewhere (`connector.ts`). Beside engine, loop and scheduler: prompts of
 * which another worker computes a part (`awaited-prompt.ts`, `incoming.ts`), heads that are computed while the rest is loaded (`head.ts`),
 * the pace that spares streams (`pacing.ts`), what is stored and what exports hold (`storing.ts`, `held-by-exports.ts`), whom a pass looks
 * up (`looks.ts`).
 */
export {
  type ArrivedLoad,
  type AwaitedLoad,
  type ByTier,
  type Connector,
  type LoadResult,
  type Match,
  noConnector,
  type StoreOptions,
} from './connector.ts';
export { Engine } from './engine.ts';
export type { EngineLoadFigures } from './engine-load.ts';
export type { EngineOptions, StepInfo } from './engine-options.ts';
export * from './types.ts';
