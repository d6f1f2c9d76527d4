/** A model of which one token makes logits that are no numbers, and what a backend owes everybody else then. Test code only. */
import { open } from 'node:fs/promises';
import { join } from 'node:path';
import { expect } from 'vitest';
import type { Executor } from '../executor.ts';
import { runStep } from './run-step.ts';

const embedding = 'model.embed_tokens.weight';

/** Of a model of one file, of f32: the token's row of the embedding becomes NaN. */
export async function spoilToken(modelDir: string, token: number): Promise<void> {
  const file = await open(join(modelDir, 'model.safetensors'), 'r+');
  try {
    const { buffer: length } = await file.read(Buffer.alloc(8), 0, 8, 0);
    const headerBytes = Number(length.readBigUInt64LE());
    const { buffer: header } = await file.read(Buffer.alloc(headerBytes), 0, headerBytes, 8);
    const { shape, data_offsets: offsets } = JSON.parse(header.toString())[embedding];
    const rowBytes = shape[1] * Float32Array.BYTES_PER_ELEMENT;
    await file.write(Buffer.alloc(rowBytes, 0xff), 0, rowBytes, 8 + headerBytes + offsets[0] + token * rowBytes);
  } finally {
    await file.close();
  }
}

/** Prompts beside it, in either order, and in the blocks that it leaves behind, draw what they draw alone. */
export async function expectOnlyItsOwnHarm(executor: Executor, token: number): Promise<void> {
  const sound = { blocks: [1], computed: 0, tokens: [9, 8, 11, 10] };
  const spoiled = { blocks: [2], computed: 0, tokens: [5, token, ...new Array<number>(14).fill(6)] };
  const draws = async (...pieces: (typeof sound)[]): Promise<number[]> => [
    ...(await runStep(executor, pieces)).tokenIds,
  ];
  const [alone] = await draws(sound);
  expect(alone).toBeGreaterThanOrEqual(0);
  expect(await draws(sound, spoiled)).toEqual([alone, -1]);
  expect(await draws(spoiled, sound)).toEqual([-1, alone]);
  const next = { ...sound, computed: 4, tokens: [alone!] };
  const [after] = await draws(next);
  expect(await draws(next, { ...spoiled, computed: 15, tokens: [6] })).toEqual([after, -1]);
  // Block 2 is full of what is no number; of this prompt it holds four tokens.
  expect(await draws({ ...sound, blocks: [2] })).toEqual([alone]);
  expect(await draws({ ...next, blocks: [2] })).toEqual([after]);
}
