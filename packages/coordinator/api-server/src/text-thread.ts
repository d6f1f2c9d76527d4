/**
 * The entry of one text thread: a job in, its outcome out, one at a time (text-pool.ts). It has no timers and waits for
 * nothing: who gives it a job ends the thread when the job takes too long.
 */
import { parentPort } from 'node:worker_threads';
import { KvError } from '@kvtier/errors';
import { toHttpError } from './errors.ts';
import type { TextFailure, TextJob, TextOutcome } from './text-pool.ts';
import { loadTokenizer, type Tokenizer } from './tokenizer.ts';
import { understand } from './understand.ts';

/** A client's own words come back to it in an error; not all of them. */
const maxToldChars = 1_000;

const port = parentPort!;
let loaded: { readonly generation: number; readonly tokenizer: Tokenizer } | undefined;

function tokenizerOf({ model, generation }: TextJob): Tokenizer {
  if (loaded?.generation !== generation) {
    loaded = undefined; // two at a time might not fit
    loaded = { generation, tokenizer: loadTokenizer(model.modelDir) };
  }
  return loaded.tokenizer;
}

function run(job: TextJob): { outcome: TextOutcome; transfer: ArrayBuffer[] } {
  const tokenizer = tokenizerOf(job);
  if (job.kind === 'load') {
    const parts = tokenizer.tableParts();
    return { outcome: { value: parts }, transfer: [parts.bytes.buffer, parts.ends.buffer] };
  }
  const value = understand(job.kind, new Uint8Array(job.body), job.model, tokenizer);
  const ids = 'prompts' in value ? value.prompts : 'prompt' in value ? [value.prompt] : [];
  return { outcome: { value }, transfer: ids.map(({ buffer }) => buffer) };
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

port.on('message', (job: TextJob) => {
  try {
    const { outcome, transfer } = run(job);
    port.postMessage(outcome, transfer);
  } catch (error) {
    port.postMessage({ failure: failureOf(error) } satisfies TextOutcome);
  }
});

port.postMessage({ ready: true } satisfies TextOutcome);
