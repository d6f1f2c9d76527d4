/**
 * The entry of one text thread: a job in, its outcome out, one at a time (text-pool.ts). It has no timers and waits for
 * nothing: who gives it a job ends the thread when the job takes too long.
 */
import { getPriority, setPriority } from 'node:os';
import { parentPort, workerData } from 'node:worker_threads';
import { KvError } from '@kvtier/errors';
import { foldsOf } from '@kvtier/kv-index';
import { toHttpError } from './errors.ts';
import { KeptTokenizers, keptBytesOf } from './kept-tokenizers.ts';
import type { TextFailure, TextJob, TextOutcome, TextThreadData } from './text-pool.ts';
import { loadTokenizer, type Tokenizer } from './tokenizer.ts';
import { keysIn, understand } from './understand.ts';

/** A client's own words come back to it in an error; not all of them. */
const maxToldChars = 1_000;

const { niceness, heapMiB } = workerData as TextThreadData;
standBack(niceness);

const port = parentPort!;
const kept = new KeptTokenizers<Tokenizer>(keptBytesOf(heapMiB));

function tokenizerOf({ model, generation }: TextJob['models'][number], onReread: () => void): Tokenizer {
  return kept.get(generation, () => loadTokenizer(model.modelDir, model.textDigest), onReread);
}

function run(job: TextJob): { outcome: TextOutcome; transfer: ArrayBuffer[] } {
  if (job.kind === 'load') {
    const tokenizer = tokenizerOf(job.models[0]!, () => {});
    const parts = tokenizer.tableParts();
    return {
      outcome: { value: parts, chatProblem: tokenizer.chatProblem },
      transfer: [parts.bytes.buffer, parts.ends.buffer],
    };
  }
  const { kind, body, models } = job;
  const found: { reread?: string } = {};
  const value = understand(
    kind,
    new Uint8Array(body),
    models.map(({ model }) => model),
    (model) =>
      tokenizerOf(models.find((known) => known.model === model)!, () => {
        found.reread = model.name;
      }),
  );
  const keys = keysIn(value);
  const folds = keys.map(foldsOf);
  const ids = 'prompts' in value ? value.prompts : 'prompt' in value ? [value.prompt] : [];
  const transfer = [...ids, ...keys, ...folds].map(({ buffer }) => buffer as ArrayBuffer);
  if (!('passedOn' in value)) return { outcome: { value, folds, ...found }, transfer };
  return { outcome: { value: { ...value, passedOn: body }, folds, ...found }, transfer: [...transfer, body] };
}

function failureOf(error: unknown): TextFailure {
  if (error instanceof KvError && error.code === 'MODEL') return { kind: 'model', message: error.message };
  const told = toHttpError(error);
  const { message, param, code, type } = told.body.error;
  if (told.status >= 500) return { kind: 'defect', message: String((error as Error)?.stack ?? error) };
  return {
    kind: 'refused',
    status: told.status,
    message: clip(message),
    param: param === null ? undefined : clip(param),
    code: code ?? undefined,
    type,
  };
}

const clip = (text: string): string => (text.length > maxToldChars ? `${text.slice(0, maxToldChars)}…` : text);

/** 0 is whoever calls: on Linux this thread, and no other of its process. Where that is forbidden, all are equal. */
function standBack(by: number): void {
  try {
    if (by > 0) setPriority(0, Math.min(19, getPriority(0) + by));
  } catch {
    // It reads bodies all the same.
  }
}

port.on('message', (job: TextJob) => {
  try {
    const { outcome, transfer } = run(job);
    port.postMessage(outcome, transfer);
  } catch (error) {
    port.postMessage({ failure: failureOf(error) } satisfies TextOutcome);
  }
});

port.postMessage({ ready: true } satisfies TextOutcome);
