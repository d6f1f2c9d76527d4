/**
 * A Llama in plain loops over doubles, without cache, blocks, tiles or threads: the oracle of the property tests. One
 * whole prompt in, the logits of every position out. Test code only.
 */
import { readFileSync } from 'node:fs';
import { planWeights, readModelConfig, readTensorTable } from '@kvtier/model';
import type { TensorStack } from '@kvtier/model/testing';

type Row = Float64Array;

/** Reads f32 models only (the oracle has no need for more). */
export async function naiveModel(modelDir: string): Promise<(tokens: readonly number[]) => Row[]> {
  const config = await readModelConfig(modelDir);
  const table = await readTensorTable(modelDir);
  const plan = planWeights(config, table, modelDir);
  const files = table.files.map((file) => readFileSync(file.path));
  const matrix = (stack: TensorStack): Float64Array => {
    const out: number[] = [];
    for (const { file, offset, count, dtype } of stack) {
      if (dtype !== 0) throw new Error('the naive model reads f32 only');
      for (let i = 0; i < count; i++) out.push(files[file]!.readFloatLE(offset + 4 * i));
    }
    return Float64Array.from(out);
  };
  const multiply = (weight: Float64Array, x: Row): Row =>
    Float64Array.from({ length: weight.length / x.length }, (_, row) =>
      x.reduce((sum, value, i) => sum + value * weight[row * x.length + i]!, 0),
    );
  const norm = (x: Row, weight: Float64Array): Row => {
    const scale = 1 / Math.sqrt(x.reduce((sum, value) => sum + value * value, 0) / x.length + config.rmsEps);
    return x.map((value, i) => value * scale * weight[i]!);
  };
  const rotate = (x: Row, position: number): Row => {
    const half = x.length / 2;
    return x.map((value, i) => {
      const angle = position * config.rope.freqs[i % half]!;
      return value * Math.cos(angle) + (i < half ? -x[i + half]! : x[i - half]!) * Math.sin(angle);
    });
  };
  const { headDim, heads, kvHeads } = config;
  const head = (x: Row, index: number): Row => x.subarray(index * headDim, (index + 1) * headDim);
  const layers = plan.layers.map((layer) => ({
    inputNorm: matrix(layer.inputNorm),
    qkv: matrix(layer.qkv),
    o: matrix(layer.o),
    postNorm: matrix(layer.postNorm),
    gateUp: matrix(layer.gateUp),
    down: matrix(layer.down),
  }));
  const embedding = matrix(plan.embedding);
  const finalNorm = matrix(plan.norm);
  const lmHead = plan.lmHead.length === 0 ? embedding : matrix(plan.lmHead);

  return (tokens) => {
    const hidden = config.hiddenSize;
    let rows: Row[] = tokens.map((token) => embedding.slice(token * hidden, (token + 1) * hidden));
    for (const layer of layers) {
      const qkv = rows.map((row) => multiply(layer.qkv, norm(row, layer.inputNorm)));
      const rotated = qkv.map((x, t) => Array.from({ length: heads + kvHeads }, (_, h) => rotate(head(x, h), t)));
      rows = rows.map((row, t) => {
        const mixed = new Float64Array(heads * headDim);
        for (let h = 0; h < heads; h++) {
          const kvHead = Math.floor((h * kvHeads) / heads);
          const scores = Array.from({ length: t + 1 }, (_, k) => {
            const key = rotated[k]![heads + kvHead]!;
            return Math.exp(rotated[t]![h]!.reduce((sum, q, i) => sum + q * key[i]!, 0) / Math.sqrt(headDim));
          });
          const total = scores.reduce((sum, score) => sum + score, 0);
          for (const [k, score] of scores.entries()) {
            const value = head(qkv[k]!, heads + kvHeads + kvHead);
            for (let i = 0; i < headDim; i++) mixed[h * headDim + i]! += (score / total) * value[i]!;
          }
        }
        const attended = multiply(layer.o, mixed).map((value, i) => value + row[i]!);
        const inner = multiply(layer.gateUp, norm(attended, layer.postNorm));
        const half = inner.length / 2;
        const gated = inner.slice(0, half).map((gate, i) => (gate / (1 + Math.exp(-gate))) * inner[half + i]!);
        return multiply(layer.down, gated).map((value, i) => value + attended[i]!);
      });
    }
    return rows.map((row) => multiply(lmHead, norm(row, finalNorm)));
  };
}
