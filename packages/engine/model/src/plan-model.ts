/** What a folder's model is, and where its weights lie; none of them is read. */
import { type ModelConfig, readModelConfig } from './model-config.ts';
import type { ModelFolder } from './model-folder.ts';
import { readTensorTable, type TensorTable } from './safetensors.ts';
import { planWeights } from './weights.ts';

export interface ModelPlan {
  readonly config: ModelConfig;
  readonly table: TensorTable;
  readonly planned: ReturnType<typeof planWeights>;
}

/** @throws KvError MODEL */
export async function planModel(folder: ModelFolder): Promise<ModelPlan> {
  const config = await readModelConfig(folder);
  const table = await readTensorTable(folder);
  return { config, table, planned: planWeights(config, table, folder.dir) };
}
