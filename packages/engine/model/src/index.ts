/** What a model folder says: families, rope, weights, digests, made-up models. */
export { cacheDir } from './cache-dir.ts';
export { modelDigest } from './digest.ts';
export { type ModelConfig, type ModelShape, readModelConfig } from './model-config.ts';
export { ModelFolder, readModelFolder } from './model-folder.ts';
export { type ModelPlan, planModel } from './plan-model.ts';
export { checkModel, type ResolvedModel, resolveModel } from './resolve-model.ts';
export type { Rope } from './rope.ts';
export { readTensorTable } from './safetensors.ts';
export { planWeights, type WeightPlan } from './weights.ts';
