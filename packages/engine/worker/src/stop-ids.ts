/**
 * Which tokens end an answer, by a Hugging Face model folder: `eos_token_id`, a number or a list, of generation_config.json or config.json,
 * and the tokenizer's own `eos_token`. Both count, as in vLLM: what is fine-tuned to talk often ends a turn with a token of its own, and still
 * has the generation config of the model that it was made of.
 */
import { readFileSync, statSync } from 'node:fs';
import { join } from 'node:path';
import { KvError } from '@kvtier/errors';

type Json = Readonly<Record<string, unknown>>;

/** Of tokenizer.json, the largest of these files: many times the largest that there is. */
const mostBytes = 256 * 2 ** 20;

/** Sorted, without repeats; empty when nothing is said. @throws KvError MODEL */
export function readStopTokenIds(modelDir: string, vocabSize: number): number[] {
  const own = tokenizerEnd(modelDir);
  // A token that the model does not have is never drawn.
  const ids = own !== undefined && isToken(own, vocabSize) ? [own] : [];
  return [...new Set([...configuredEnds(modelDir, vocabSize), ...ids])].sort((a, b) => a - b);
}

/** generation_config.json wins over config.json, as in transformers. */
function configuredEnds(modelDir: string, vocabSize: number): number[] {
  for (const name of ['generation_config.json', 'config.json']) {
    const file = join(modelDir, name);
    const value = readJson(file)?.eos_token_id;
    if (value === undefined || value === null) continue;
    const ids: unknown[] = Array.isArray(value) ? value : [value];
    for (const id of ids) {
      if (!isToken(id, vocabSize)) {
        throw new KvError('MODEL', `${file}: eos_token_id ${JSON.stringify(id)} is no token id below ${vocabSize}`);
      }
    }
    return ids as number[];
  }
  return [];
}

/** Named by its text, as the API server takes it for chat templates. What has no id ends nothing. */
function tokenizerEnd(modelDir: string): unknown {
  const read = (name: string): Json | undefined => readJson(join(modelDir, name));
  const { eos_token: named } = { ...read('special_tokens_map.json'), ...read('tokenizer_config.json') } as Json;
  const text = typeof named === 'string' ? named : (named as { content?: unknown } | null | undefined)?.content;
  if (typeof text !== 'string') return undefined;
  const { added_tokens: added, model } = read('tokenizer.json') ?? {};
  const one = Array.isArray(added)
    ? added.find((token: { content?: unknown } | null) => token?.content === text)
    : null;
  if (one) return (one as { id?: unknown }).id;
  const vocab = (model as { vocab?: unknown } | null | undefined)?.vocab;
  // Of a unigram model it is a list of tokens with their scores, in the order of their ids.
  if (Array.isArray(vocab)) return vocab.findIndex((entry: unknown) => Array.isArray(entry) && entry[0] === text);
  return typeof vocab === 'object' && vocab !== null && Object.hasOwn(vocab, text) ? (vocab as Json)[text] : undefined;
}

const isToken = (id: unknown, vocabSize: number): id is number =>
  typeof id === 'number' && Number.isInteger(id) && id >= 0 && id < vocabSize;

function readJson(file: string): Json | undefined {
  let text: string;
  try {
    const { size } = statSync(file);
    if (size > mostBytes) throw new KvError('MODEL', `${file}: ${size} bytes are too many; download the model again`);
    text = readFileSync(file, 'utf8');
  } catch (error) {
    if ((error as NodeJS.ErrnoException).code === 'ENOENT') return undefined;
    if (error instanceof KvError) throw error;
    throw new KvError('MODEL', `${file}: cannot be read (${(error as Error).message}); check its permissions`);
  }
  try {
    const value: unknown = JSON.parse(text);
    if (typeof value !== 'object' || value === null) throw new Error('no object');
    return value as Json;
  } catch (error) {
    throw new KvError('MODEL', `${file}: not valid JSON (${(error as Error).message}); download the model again`);
  }
}
