/** End-of-sequence ids of a Hugging Face model folder: `eos_token_id`, a number or a list, of two files. */
import { readFileSync } from 'node:fs';
import { join } from 'node:path';
import { KvError } from '@kvtier/errors';

/** generation_config.json wins over config.json, as in transformers. Sorted, without repeats; empty when there is none. */
export function readStopTokenIds(modelDir: string, vocabSize: number): number[] {
  for (const name of ['generation_config.json', 'config.json']) {
    const file = join(modelDir, name);
    const value = readJson(file)?.eos_token_id;
    if (value === undefined || value === null) continue;
    const ids: unknown[] = Array.isArray(value) ? value : [value];
    for (const id of ids) {
      if (typeof id !== 'number' || !Number.isInteger(id) || id < 0 || id >= vocabSize) {
        throw new KvError('MODEL', `${file}: eos_token_id ${JSON.stringify(id)} is no token id below ${vocabSize}`);
      }
    }
    return [...new Set(ids as number[])].sort((a, b) => a - b);
  }
  return [];
}

function readJson(file: string): { eos_token_id?: unknown } | undefined {
  let text: string;
  try {
    text = readFileSync(file, 'utf8');
  } catch (error) {
    if ((error as NodeJS.ErrnoException).code === 'ENOENT') return undefined;
    throw new KvError('MODEL', `${file}: cannot be read (${(error as Error).message}); check its permissions`);
  }
  try {
    const value: unknown = JSON.parse(text);
    if (typeof value !== 'object' || value === null) throw new Error('no object');
    return value;
  } catch (error) {
    throw new KvError('MODEL', `${file}: not valid JSON (${(error as Error).message}); download the model again`);
  }
}
