/**
 * Whether a pod has answered that it holds less of the prompt than `cache_hit_threshold` asks for: finish reason cache_threshold, without a
 * token. Of a whole answer all is read, of a stream as far as its first token or finish reason; what was read is given on, then the rest.
 *
 * Invariant: at most `mostPeekBytes` are held; an answer of which so much says nothing is one.
 */
import type { Forwarded } from './engines.ts';

const mostPeekBytes = 256 << 10;
const finishReason = 'cache_threshold';

export interface Peeked {
  readonly isBelow: boolean;
  /** The same answer from its first byte on. */
  readonly rest: Forwarded;
}

export async function belowThreshold(answer: Forwarded): Promise<Peeked> {
  const isStream = String(answer.headers['content-type'] ?? '').startsWith('text/event-stream');
  const pieces = answer.body[Symbol.asyncIterator]();
  const seen: Buffer[] = [];
  let bytes = 0;
  let verdict: boolean | undefined;
  let isAtEnd = false;
  /** Of a stream: what has come of an event that is not whole yet. */
  let open = '';
  const decoder = new TextDecoder();
  while (verdict === undefined && bytes <= mostPeekBytes) {
    const next = await pieces.next();
    if (next.done) {
      isAtEnd = true;
      break;
    }
    seen.push(next.value);
    bytes += next.value.length;
    if (isStream) {
      const events = `${open}${decoder.decode(next.value, { stream: true })}`.split(/\r?\n\r?\n/);
      open = events.pop()!;
      verdict = verdictOfEvents(events);
    }
  }
  if (verdict === undefined && isAtEnd && answer.status === 200)
    verdict = isStream ? false : verdictOf(Buffer.concat(seen).toString('utf8'));
  const parts = (async function* () {
    try {
      yield* seen;
      if (isAtEnd) return;
      for (let next = await pieces.next(); !next.done; next = await pieces.next()) yield next.value;
    } finally {
      await pieces.return?.();
    }
  })();
  const body: AsyncIterator<Buffer> = {
    next: () => parts.next(),
    // A generator that was not begun ends without its `finally`.
    return: async () => {
      await pieces.return?.();
      return parts.return(undefined);
    },
  };
  return { isBelow: verdict === true, rest: { ...answer, body: { [Symbol.asyncIterator]: () => body } } };
}

/** undefined: none of them says it. */
function verdictOfEvents(events: readonly string[]): boolean | undefined {
  for (const event of events) {
    const data = /^data: ?(.*)$/m.exec(event)?.[1];
    const verdict = data === undefined ? undefined : verdictOf(data);
    if (verdict !== undefined) return verdict;
  }
  return undefined;
}

interface Choice {
  readonly finish_reason?: unknown;
  readonly text?: unknown;
  readonly delta?: Readonly<Record<string, unknown>>;
}

/** Of one JSON text. undefined: it says nothing of it, as the first piece of a chat, which names the role. */
function verdictOf(json: string): boolean | undefined {
  let choices: unknown;
  try {
    choices = (JSON.parse(json) as { choices?: unknown } | null)?.choices;
  } catch {
    return false; // "[DONE]", or nonsense: the client's to see
  }
  if (!Array.isArray(choices) || choices.length === 0) return undefined;
  const all = choices as readonly (Choice | null)[];
  if (all.some((choice) => choice?.finish_reason === finishReason)) return true;
  const hasBegun = all.some(
    (choice) =>
      (choice?.finish_reason ?? null) !== null ||
      (typeof choice?.text === 'string' && choice.text !== '') ||
      Object.entries(choice?.delta ?? {}).some(([name, value]) => name !== 'role' && (value ?? '') !== ''),
  );
  return hasBegun ? false : undefined;
}
