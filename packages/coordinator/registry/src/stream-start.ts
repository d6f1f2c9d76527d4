/**
 * How a pod's stream of events begins. Its status is 200 whatever happens later, so what an answer that is not streamed says by its status
 * is said by the first event: an error, or a token. Until then the stream is held, and what was held is given on as it came.
 *
 *   comments, a role, no choices ─► held
 *   a token, a finish reason     ─► the answer: all that has come goes on
 *   an error                     ─► 429, 5xx: the pod's, who streams no answer; any other is the request's, and goes on
 *
 * Invariants: at most `mostHeldBytes` and one piece are held, never longer than `mostHeldMs`, and `roleMs` once an event has come: a pod
 * tells a role with its first token, but what a model thinks may be hidden for as long as it likes. Then all goes on.
 */

/** What a stream that goes on begins with. */
export interface StreamStart {
  /** Its request is refused. */
  readonly isRefused: boolean;
  /** Of an answer that ends in its first event. */
  readonly finishReason: string | undefined;
}

export type Verdict =
  /** For its client. `saysNothing`: so far it has brought comments alone. */
  | ({ readonly kind: 'goes on'; readonly saysNothing: boolean } & StreamStart)
  /** As the same answer would not have been streamed. */
  | { readonly kind: 'failed'; readonly status: number; readonly json: string }
  | { readonly kind: 'aborted' };

export interface Started {
  readonly verdict: Verdict;
  /** The stream from its first byte on. */
  readonly rest: AsyncIterable<Buffer>;
}

export interface StartTimes {
  readonly mostHeldMs: number;
  readonly roleMs: number;
}

const mostHeldBytes = 256 << 10;
/** Where proxies wait for a byte, they do for a minute. */
const times: StartTimes = { mostHeldMs: 30_000, roleMs: 500 };
const [lf, cr] = [0x0a, 0x0d];

type GoesOn = Extract<Verdict, { readonly kind: 'goes on' }>;
const answer: GoesOn = { kind: 'goes on', saysNothing: false, isRefused: false, finishReason: undefined };
const silence: GoesOn = { ...answer, saysNothing: true };

/** Reads as far as the verdict. @throws what `parts` does */
export async function startOf(parts: AsyncIterator<Buffer>, { mostHeldMs, roleMs } = times): Promise<Started> {
  const held: Buffer[] = [];
  const reader = new StartReader();
  /** What was asked for and has not come. */
  let coming: Promise<IteratorResult<Buffer>> | undefined;
  let bytes = 0;
  let timer: NodeJS.Timeout | undefined;
  let isRoleTimed = false;
  let over = (): void => {};
  const isOver = new Promise<undefined>((resolve) => (over = () => resolve(undefined)));
  const within = (ms: number): void => {
    clearTimeout(timer);
    timer = setTimeout(over, ms);
  };
  let verdict: Verdict | undefined;
  try {
    while (verdict === undefined) {
      coming = parts.next();
      const next: IteratorResult<Buffer> | undefined = await Promise.race([coming, isOver]);
      if (next === undefined) verdict = reader.hasEvent ? answer : silence;
      else coming = undefined;
      if (next?.done) verdict = answer;
      if (next === undefined || next.done) continue;
      held.push(next.value);
      bytes += next.value.length;
      verdict = reader.push(next.value) ?? (bytes > mostHeldBytes ? answer : undefined);
      if (held.length === 1) within(mostHeldMs);
      if (reader.hasEvent && !isRoleTimed) within(roleMs);
      isRoleTimed = reader.hasEvent;
    }
  } finally {
    clearTimeout(timer);
  }
  coming?.catch(() => {}); // of a stream that is left nobody takes it
  return { verdict, rest: after(held, coming, parts) };
}

/** In one piece what was held, then what comes. */
function after(
  held: readonly Buffer[],
  coming: Promise<IteratorResult<Buffer>> | undefined,
  parts: AsyncIterator<Buffer>,
): AsyncIterable<Buffer> {
  let first = held.length > 1 ? Buffer.concat(held) : held[0];
  const iterator: AsyncIterator<Buffer> = {
    next: () => {
      const value = first;
      first = undefined;
      if (value !== undefined) return Promise.resolve({ done: false, value });
      const next = coming ?? parts.next();
      coming = undefined;
      return next;
    },
    return: async () => (await parts.return?.()) ?? { done: true, value: undefined },
  };
  return { [Symbol.asyncIterator]: () => iterator };
}

/** Finds the events in pieces of a stream. Each byte is looked at once. */
class StartReader {
  /** One that says something has come. */
  hasEvent = false;
  /** Of the event that is not whole yet. */
  #open: Buffer[] = [];
  #isLineEmpty = true;
  #wasCr = false;

  /** undefined: nothing that tells. */
  push(piece: Buffer): Verdict | undefined {
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
        if (data !== undefined) {
          this.hasEvent = true;
          const verdict = verdictOf(data);
          if (verdict !== undefined) return verdict;
        }
      }
      this.#isLineEmpty = true;
    }
    this.#open.push(piece.subarray(from));
    return undefined;
  }
}

/** undefined: comments, and lines that are not for the client. */
function dataOf(event: string): string | undefined {
  const lines: string[] = [];
  for (const line of event.split(/\r\n|\r|\n/)) {
    if (line.startsWith('data:')) lines.push(line.slice(line[5] === ' ' ? 6 : 5));
  }
  return lines.length === 0 ? undefined : lines.join('\n');
}

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
  const finishReason = String(finished.finish_reason);
  if (finishReason === 'abort' && !hasToken) return { kind: 'aborted' };
  return { ...answer, finishReason };
}

/** Whose code says nothing is no fault of the request that anybody named. */
function verdictOfError(error: unknown, json: string): Verdict {
  const { code } = error as { readonly code?: unknown };
  const status = Number.isInteger(code) && (code as number) >= 400 && (code as number) < 600 ? (code as number) : 500;
  if (status !== 429 && status < 500) return { ...answer, isRefused: true };
  return { kind: 'failed', status, json };
}

function bringsToken({ text, delta, token_ids: ids }: Choice): boolean {
  if (isSome(text) || isSome(ids)) return true;
  return Object.entries(delta ?? {}).some(([name, value]) => name !== 'role' && isSome(value));
}

const isSome = (value: unknown): boolean => (Array.isArray(value) ? value.length > 0 : (value ?? '') !== '');
