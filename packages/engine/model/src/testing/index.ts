/** For tests: doubles, rigs and what else of this room they look at. */
export { parseModelConfig } from '../model-config.ts';
export { makeRealModel, randomShape } from '../random-model.ts';
export { type RealShape, realShapes, realTensors } from '../real-shapes.ts';
export type { TensorStack } from '../weights.ts';
