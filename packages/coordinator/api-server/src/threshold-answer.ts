/**
 * Whether a pod has answered that it holds less of the prompt than `cache_hit_threshold` asks for: finish reason cache_threshold, without a
 * token. A stream has said so by the time that it begins; of a whole answer all is read, and given on as it came.
 *
 * Invariant: at most `mostPeekBytes` and one piece are held; an answer of which so much says nothing is one.
 */
import { isOfEvents } from './answer-end.ts';
import type { Forwarded } from './engines.ts';

const mostPeekBytes = 256 << 10;
const finishReason = 'cache_threshold';

export interface Peeked {
  readonly isBelow: boolean;
  /** The same answer from its first byte on. */
  readonly rest: Forwarded;
}

export async function belowThreshold(answer: Forwarded): Promise<Peeked> {
  if (isOfEvents(answer)) return { isBelow: answer.start?.finishReason === finishReason, rest: answer };
  const pieces = answer.body[Symbol.asyncIterator]();
  const seen: Buffer[] = [];
  let bytes = 0;
  let isAtEnd = false;
  while (!isAtEnd && bytes <= mostPeekBytes) {
    const next = await pieces.next();
    if (next.done) isAtEnd = true;
    else {
      seen.push(next.value);
      bytes += next.value.length;
    }
  }
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
  const isBelow = isAtEnd && answer.status === 200 && saysBelow(Buffer.concat(seen).toString('utf8'));
  return { isBelow, rest: { ...answer, body: { [Symbol.asyncIterator]: () => body } } };
}

function saysBelow(json: string): boolean {
  try {
    const choices = (JSON.parse(json) as { readonly choices?: unknown } | null)?.choices;
    return Array.isArray(choices) && choices.some((choice) => choice?.finish_reason === finishReason);
  } catch {
    return false; // nonsense: the client's to see
  }
}
