/**
 * A pod says "not here, not now", and perhaps when it may be asked again. Of a 500 its request may be as much the reason as the pod is: its
 * words are kept, for a client that no other pod answers better. An answer of OpenAI's shape goes on as it is; of any other, such as a page
 * of HTML, the words alone: clients read `error.message`.
 *
 * Invariant: at most `mostSaidBytes` are read of them, for `mostSayingMs`.
 */
import type { Choice } from '@kvtier/dispatch';
import { KvError } from '@kvtier/errors';
import { leave } from '@kvtier/registry';
import type { Forwarded } from './engines.ts';

/** Nobody is told to stay away for longer, whatever a pod says. */
const maxRetryAfterS = 60;
const mostSaidBytes = 64 << 10;
const mostSayingMs = 1_000;
const mostWords = 2_000;

export class PodRefusal extends KvError {
  readonly by: Choice;
  /** Whole seconds, 1 or more; undefined: it does not say. */
  readonly retryAfterS: number | undefined;
  /** The request, and not the pod, may be why. */
  readonly mayBeRequest: boolean;
  /** What the pod has answered then, where a client can read it. */
  readonly said: Forwarded | undefined;
  /** Its own; empty: none. */
  readonly words: string;

  /** `retryAfter`: its header, in seconds; a date says nothing to us, whose clock may be another. */
  constructor(by: Choice, answer: Forwarded, bytes: Buffer = Buffer.alloc(0)) {
    const { status, headers } = answer;
    const { name } = by.worker.record;
    super(status === 429 ? 'BUSY' : 'DISCONNECTED', `worker ${name}: answers ${status}; try again`, { retry: true });
    this.by = by;
    const retryAfter = headers['retry-after'];
    const isSeconds = typeof retryAfter === 'string' && /^\d{1,9}$/.test(retryAfter);
    this.retryAfterS = isSeconds ? Math.min(Math.max(Number(retryAfter), 1), maxRetryAfterS) : undefined;
    this.mayBeRequest = status === 500;
    const { words, isInShape } = wordsIn(bytes);
    this.words = words;
    this.said = isInShape ? { ...answer, body: oneOf(bytes) } : undefined;
  }
}

/** Of an answer that is none; the rest of it is left. */
export async function refusalOf(by: Choice, answer: Forwarded): Promise<PodRefusal> {
  const isReadable = (answer.headers['content-encoding'] ?? 'identity') === 'identity';
  const bytes = answer.status === 500 && isReadable ? await beginningOf(answer) : undefined;
  await leave(answer);
  return new PodRefusal(by, answer, bytes);
}

/** As much as comes soon. */
async function beginningOf({ body }: Forwarded): Promise<Buffer> {
  const pieces: Buffer[] = [];
  let bytes = 0;
  let timer: NodeJS.Timeout | undefined;
  const isLate = new Promise<undefined>((resolve) => {
    timer = setTimeout(() => resolve(undefined), mostSayingMs);
  });
  const parts = body[Symbol.asyncIterator]();
  try {
    while (bytes < mostSaidBytes) {
      const coming = parts.next();
      coming.catch(() => {}); // when it is late nobody waits for it
      const next = await Promise.race([coming, isLate]);
      if (next === undefined || next.done) break;
      pieces.push(next.value);
      bytes += next.value.length;
    }
  } catch {
    // It has failed as it is.
  } finally {
    clearTimeout(timer);
  }
  return Buffer.concat(pieces).subarray(0, mostSaidBytes);
}

/** OpenAI's `error.message`; SGLang's `message`, FastAPI's `detail`; or all of it. */
function wordsIn(bytes: Buffer): { readonly words: string; readonly isInShape: boolean } {
  const text = bytes.toString('utf8').trim();
  const { error, message, detail } = objectIn(text);
  const told = (error as { readonly message?: unknown } | null | undefined)?.message;
  const words = [told, error, message, detail].find((value) => typeof value === 'string' && value !== '') ?? text;
  return { words: (words as string).slice(0, mostWords), isInShape: Boolean(error) };
}

function objectIn(json: string): Readonly<Record<string, unknown>> {
  try {
    const value: unknown = JSON.parse(json);
    return typeof value === 'object' && value !== null ? (value as Record<string, unknown>) : {};
  } catch {
    return {};
  }
}

async function* oneOf(part: Buffer): AsyncGenerator<Buffer> {
  yield part;
}
