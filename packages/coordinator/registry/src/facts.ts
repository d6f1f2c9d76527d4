/**
 * What a worker says of itself, checked before anything counts on it: a worker may be of another version, broken, or lie. What cannot be
 * is refused with one line. (Of its load: `loadOf`.)
 */
import { KvError } from '@kvtier/errors';
import type { Description } from '@kvtier/wire/grpc';
import * as z from 'zod';
import type { WorkerFacts } from './worker.ts';

/** Beyond this a number is nonsense, whatever it counts. */
const most = 2 ** 40;
const count = z.number().int().min(0).max(most);
const text = z.string().max(4096);
const digest = z.string().regex(/^[0-9a-f]{64}$/, 'not 64 hex digits');
const wide = z.bigint().min(0n).max(BigInt(most)).transform(Number);

const descriptionSchema = z.object({
  model: text.min(1),
  modelDir: text,
  maxModelTokens: count.min(1),
  blockTokens: count.min(1).max(65_536),
  vocabSize: count.min(1).max(2 ** 31),
  stopTokenIds: z.array(count).max(4096),
  blockCount: wide,
  blockBytes: wide,
  hashAlgorithm: text,
  hashSeed: text,
  modelDigest: text,
  textDigest: digest.optional(),
  tokenDigest: digest.optional(),
  bootEpoch: text,
  maxSequences: count,
  maxStepTokens: count,
  maxTotalTokens: wide.optional(),
  namespaces: z
    .array(text)
    .max(16)
    .refine((all) => all.every((one) => /^[0-9a-f]{16}$/.test(one)), 'not 16 hex digits each'),
});

/** @throws KvError PROTOCOL, one line */
export function factsOf(worker: string, description: Description): WorkerFacts {
  const told = checked(worker, 'what it is', descriptionSchema, description);
  const { blockCount, maxSequences, maxStepTokens, namespaces, ...facts } = told;
  return {
    ...{ ...facts, totalBlocks: blockCount },
    maxStepTokens: maxStepTokens > 0 ? maxStepTokens : undefined,
    maxRunning: maxSequences > 0 ? maxSequences : undefined,
    namespaces: namespaces.length > 0 ? namespaces : undefined,
  };
}

export function checked<T>(worker: string, what: string, schema: z.ZodType<T>, value: unknown): T {
  const result = schema.safeParse(value);
  if (result.success) return result.data;
  const { path, message } = result.error.issues[0]!;
  const where = path.length > 0 ? `${path.join('.')}: ` : '';
  throw new KvError(
    'PROTOCOL',
    `worker ${worker}: ${what} is told with nonsense (${where}${message}); run workers and coordinator of one version`,
  );
}

/** Why this worker cannot stand beside that one, which serves the same model; undefined: it can. What is not said agrees. */
export function conflictOf(worker: string, mine: WorkerFacts, other: string, its: WorkerFacts): string | undefined {
  const differs = (a: string, b: string): boolean => a !== '' && b !== '' && a !== b;
  const against = (what: string, a: string | number, b: string | number): string =>
    `worker ${worker}: ${what} ${a}, worker ${other} of the same model ${mine.model} has ${b}; configure both alike`;
  if (differs(mine.modelDigest, its.modelDigest))
    return against('has weights of digest', mine.modelDigest.slice(0, 16), its.modelDigest.slice(0, 16));
  if (differs(mine.textDigest ?? '', its.textDigest ?? ''))
    return against(
      'has tokenizer and chat template of digest',
      mine.textDigest!.slice(0, 16),
      its.textDigest!.slice(0, 16),
    );
  if (mine.blockTokens > 0 && its.blockTokens > 0 && mine.blockTokens !== its.blockTokens)
    return against('has blocks of', `${mine.blockTokens} tokens`, `${its.blockTokens} tokens`);
  // What a pod tells of is hashed anew here from its tokens: its own way is nothing to others.
  if (mine.modelDir === '' || its.modelDir === '') return undefined;
  if (differs(mine.hashAlgorithm, its.hashAlgorithm))
    return against('hashes blocks by', mine.hashAlgorithm, its.hashAlgorithm);
  if (differs(mine.hashSeed, its.hashSeed))
    return against('hashes blocks from the seed', JSON.stringify(mine.hashSeed), JSON.stringify(its.hashSeed));
  return undefined;
}
