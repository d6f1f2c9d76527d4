/**
 * How a pod's stream of events begins. Its status is 200 whatever happens later, so what an answer that is not streamed says by its status
 * is said by the first event: an error, or a token. Until then the stream is held, and what was held is given on as it came.
 *
 *   comments, a role, no choices ─► held
 *   a token, a finish reason     ─► the answer: all that has come goes on
 *   an error                     ─► 429, 5xx: the pod's, who streams no answer; any other is the request's, and goes on
 *
 * Invariants: at most `mostHeldBytes` and one piece are held, no later than `mostHeldMs` from when it was asked for, and for `roleMs` once an
 * event has come: a pod tells a role with its first token, but what a model thinks may be hidden for as long as it likes. An event that has
 * begun then has `roleMs` to become whole, once. Then all goes on; of comments alone what they say of the pod is told when more has come.
 */

/** What a stream that goes on begins with. */
export interface StreamStart {
  /** Its request is refused. */
  readonly isRefused: boolean;
  /** Of an answer that ends in its first event. */
  readonly finishReason: string | undefined;
}

export type Verdict =
  /** For its client. */
  | ({ readonly kind: 'goes on' } & StreamStart)
  /** As the same answer would not have been streamed. */
  | { readonly kind: 'failed'; readonly status: number; readonly json: string }
  | { readonly kind: 'aborted' };

export interface Started {
  readonly verdict: Verdict;
  /** The stream from its first byte on. */
  readonly rest: AsyncIterable<Buffer>;
}

export interface StartOptions {
  /** When it was asked for, on performance.now(). */
  readonly sentAtMs?: number;
  /** What it begins with, once: of a stream that goes on behind comments alone later, of one that breaks or is left before then never. */
  readonly told?: (verdict: Verdict) => void;
}

const mostHeldBytes = 256 << 10;
/** Where proxies wait for a byte, they do for a minute. */
const mostHeldMs = 30_000;
const roleMs = 500;
const [lf, cr] = [0x0a, 0x0d];

const answer: Extract<Verdict, { readonly kind: 'goes on' }> = {
  kind: 'goes on',
  isRefused: false,
  finishReason: undefined,
};

/** What it says of the pod: that it failed, and how, or (no `failure`) that it answers; undefined: neither. */
export function outcomeOf(verdict: Verdict): { readonly failure: string | undefined } | undefined {
  if (verdict.kind === 'goes on') return verdict.isRefused ? undefined : { failure: undefined };
  if (verdict.kind === 'aborted') return { failure: 'ends with "abort" before its first token' };
  return verdict.status < 500 ? undefined : { failure: `answers ${verdict.status} in its first event` };
}

/** Reads as far as the verdict. @throws what `parts` does */
export async function startOf(parts: AsyncIterator<Buffer>, options: StartOptions = {}): Promise<Started> {
  const { sentAtMs = performance.now(), told = () => {} } = options;
  const held: Buffer[] = [];
  const reader = new StartReader();
  /** What was asked for and has not come. */
  let coming: Promise<IteratorResult<Buffer>> | undefined;
  let timer: NodeJS.Timeout | undefined;
  let isRoleTimed = false;
  let isWholeAwaited = false;
  let isOver = new Promise<undefined>(() => {});
  const within = (ms: number): void => {
    clearTimeout(timer);
    isOver = new Promise((resolve) => (timer = setTimeout(() => resolve(undefined), ms)));
  };
  let verdict: Verdict | undefined;
  try {
    for (;;) {
      coming ??= parts.next();
      const next: IteratorResult<Buffer> | undefined = await Promise.race([coming, isOver]);
      if (next === undefined) {
        if (reader.isWithinEvent && !isWholeAwaited) {
          isWholeAwaited = true;
          within(roleMs);
          continue;
        }
        if (reader.hasEvent) verdict = answer;
        break;
      }
      coming = undefined;
      verdict = next.done ? answer : reader.push(next.value);
      if (!next.done) held.push(next.value);
      if (verdict !== undefined) break;
      if (held.length === 1) within(Math.max(sentAtMs + mostHeldMs - performance.now(), 0));
      if (reader.hasEvent && !isRoleTimed) within(roleMs);
      isRoleTimed = reader.hasEvent;
    }
  } finally {
    clearTimeout(timer);
  }
  coming?.catch(() => {}); // of a stream that is left nobody takes it
  if (verdict !== undefined) told(verdict);
  const later = verdict === undefined ? { reader, told } : undefined;
  return { verdict: verdict ?? answer, rest: after(held, coming, parts, later) };
}

/** In one piece what was held, then what comes. `later`: who reads that, until it says something, and is told what. */
function after(
  held: readonly Buffer[],
  coming: Promise<IteratorResult<Buffer>> | undefined,
  parts: AsyncIterator<Buffer>,
  later: { readonly reader: StartReader; readonly told: (verdict: Verdict) => void } | undefined,
): AsyncIterable<Buffer> {
  let first = held.length > 1 ? Buffer.concat(held) : held[0];
  const read = (result: IteratorResult<Buffer>): IteratorResult<Buffer> => {
    const verdict = result.done ? answer : later?.reader.push(result.value);
    if (verdict === undefined) return result;
    later?.told(verdict);
    later = undefined;
    return result;
  };
  const iterator: AsyncIterator<Buffer> = {
    next: () => {
      const value = first;
      first = undefined;
      if (value !== undefined) return Promise.resolve({ done: false, value });
      const next = coming ?? parts.next();
      coming = undefined;
      return later === undefined ? next : next.then(read);
    },
    return: async () => {
      later = undefined;
      return (await parts.return?.()) ?? { done: true, value: undefined };
    },
  };
  return { [Symbol.asyncIterator]: () => iterator };
}

/**
 * Finds the events in pieces of a stream. Each byte is looked at once, and no more than `mostHeldBytes` are kept: those of an event that is
 * not whole, as parts of the pieces, or as copies where whoever pushes lets the pieces go.
 */
export class StartReader {
  /** One that says something has come. */
  hasEvent = false;
  readonly #mostCopiedBytes: number | undefined;
  #bytes = 0;
  /** Of the event that is not whole yet. */
  #open: Buffer[] = [];
  #openBytes = 0;
  #isLineEmpty = true;
  #wasCr = false;

  /** `mostCopiedBytes` of one event; undefined: none are copied. */
  constructor(mostCopiedBytes?: number) {
    this.#mostCopiedBytes = mostCopiedBytes;
  }

  /** A line that is no comment has begun, and its event is not whole. */
  get isWithinEvent(): boolean {
    return linesOf(Buffer.concat(this.#open).toString('utf8')).some((line) => line !== '' && !line.startsWith(':'));
  }

  /** undefined: nothing that tells. Behind a verdict there is nothing more to read. */
  push(piece: Buffer): Verdict | undefined {
    this.#bytes += piece.length;
    const verdict = this.#read(piece);
    const isLarge = this.#bytes > mostHeldBytes || this.#openBytes > (this.#mostCopiedBytes ?? mostHeldBytes);
    return verdict ?? (isLarge ? answer : undefined);
  }

  #read(piece: Buffer): Verdict | undefined {
    let from = 0;
    for (let at = 0; at < piece.length; at++) {
      const byte = piece[at];
      const isSecond = this.#wasCr && byte === lf;
      this.#wasCr = byte === cr;
      if (isSecond) continue;
      if (byte !== lf && byte !== cr) {
        this.#isLineEmpty = false;
        continue;
      }
      if (this.#isLineEmpty) {
        this.#open.push(piece.subarray(from, at));
        from = at;
        const data = dataOf(Buffer.concat(this.#open).toString('utf8'));
        this.#open = [];
        this.#openBytes = 0;
        if (data !== undefined) {
          this.hasEvent = true;
          const verdict = verdictOf(data);
          if (verdict !== undefined) return verdict;
        }
      }
      this.#isLineEmpty = true;
    }
    const open = piece.subarray(from);
    this.#open.push(this.#mostCopiedBytes === undefined ? open : Buffer.from(open));
    this.#openBytes += open.length;
    return undefined;
  }
}

/** undefined: comments, and lines that are not for the client. */
function dataOf(event: string): string | undefined {
  const lines: string[] = [];
  for (const line of linesOf(event)) {
    if (line.startsWith('data:')) lines.push(line.slice(line[5] === ' ' ? 6 : 5));
  }
  return lines.length === 0 ? undefined : lines.join('\n');
}

const linesOf = (text: string): string[] => text.split(/\r\n|\r|\n/);

interface Chunk {
  readonly error?: unknown;
  readonly choices?: unknown;
}

interface Choice {
  readonly finish_reason?: unknown;
  readonly text?: unknown;
  readonly delta?: unknown;
  readonly token_ids?: unknown;
}

/** undefined: it tells nothing, as the first event of a chat, which names the role. */
function verdictOf(json: string): Verdict | undefined {
  let chunk: Chunk | null;
  try {
    chunk = JSON.parse(json) as Chunk | null;
  } catch {
    return answer; // "[DONE]", or nonsense: the client's to see
  }
  if (chunk?.error) return verdictOfError(chunk.error, json);
  if (!Array.isArray(chunk?.choices)) return answer;
  const choices = (chunk.choices as readonly (Choice | null)[]).filter((choice) => choice !== null);
  const finished = choices.find(({ finish_reason: reason }) => (reason ?? '') !== '');
  const hasToken = choices.some(bringsToken);
  if (finished === undefined) return hasToken ? answer : undefined;
  const finishReason = wordOf(finished.finish_reason);
  if (finishReason === 'abort' && !hasToken) return { kind: 'aborted' };
  return { ...answer, finishReason };
}

/** By type, as vLLM, SGLang and OpenAI name them; letters alone. */
const statuses: ReadonlyMap<string, number> = new Map([
  ['badrequest', 400],
  ['badrequesterror', 400],
  ['invalidrequesterror', 400],
  ['authenticationerror', 401],
  ['permissionerror', 403],
  ['notfounderror', 404],
  ['unprocessableentityerror', 422],
  ['toomanyrequests', 429],
  ['ratelimiterror', 429],
]);

/** Whose code and type say nothing is no fault of the request that anybody named. */
function verdictOfError(error: unknown, json: string): Verdict {
  const { code, type } = error as { readonly code?: unknown; readonly type?: unknown };
  const letters = wordOf(type)
    .toLowerCase()
    .replace(/[^a-z]/g, '');
  const status = statusIn(wordOf(code)) ?? statuses.get(letters) ?? 500;
  if (status !== 429 && status < 500) return { ...answer, isRefused: true };
  return { kind: 'failed', status, json };
}

const statusIn = (code: string): number | undefined => (/^[45]\d\d$/.test(code) ? Number(code) : undefined);

/** Of objects, some of which no text can be made of, none is. */
const wordOf = (value: unknown): string => (typeof value === 'object' ? 'none' : String(value));

function bringsToken({ text, delta, token_ids: ids }: Choice): boolean {
  if (isSome(text) || isSome(ids)) return true;
  return Object.entries(delta ?? {}).some(([name, value]) => name !== 'role' && isSome(value));
}

const isSome = (value: unknown): boolean => (Array.isArray(value) ? value.length > 0 : (value ?? '') !== '');
