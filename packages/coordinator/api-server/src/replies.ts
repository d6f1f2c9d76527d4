/** The JSON that OpenAI's clients expect: whole answers and chunks of a stream, for both endpoints. */
import type { Delta, FinishReason, Totals } from './plan.ts';

export type Endpoint = 'completion' | 'chat';

export interface ReplyHead {
  readonly id: string;
  readonly created: number;
  readonly model: string;
}

/** One finished answer. */
export interface Answer {
  text: string;
  /** Present when the client asked for `return_token_ids`. */
  readonly tokenIds: number[] | undefined;
  finishReason: FinishReason | null;
}

export const usageOf = (totals: Totals) => ({
  prompt_tokens: totals.promptTokens,
  completion_tokens: totals.completionTokens,
  total_tokens: totals.promptTokens + totals.completionTokens,
  prompt_tokens_details: { cached_tokens: totals.cachedTokens },
});

/** Our extension: where cached tokens came from, where the time before the first token went, how often an answer went on elsewhere. */
export const kvtierOf = (totals: Totals) => ({
  tokens_by_tier: totals.tokensByTier,
  queue_us: totals.queueUs,
  load_us: totals.loadUs,
  prefill_us: totals.prefillUs,
  ...(totals.handOff !== undefined && { hand_off: handOffOf(totals.handOff) }),
  ...(totals.moves > 0 && { moves: totals.moves }),
});

const handOffOf = (took: NonNullable<Totals['handOff']>) => ({
  first_token_by: took.isEarly ? 'prefill' : 'decode',
  admit_us: took.admitUs,
  queue_us: took.queueUs,
  prefill_us: took.prefillUs,
  transfer_us: took.transferUs,
  tail_us: took.tailUs,
});

const withTokenIds = (tokenIds: readonly number[] | undefined) => (tokenIds ? { token_ids: tokenIds } : {});

export function wholeReply(endpoint: Endpoint, head: ReplyHead, answers: readonly Answer[], totals: Totals) {
  const choices = answers.map(({ text, tokenIds, finishReason }, index) => ({
    index,
    ...(endpoint === 'chat' ? { message: { role: 'assistant', content: text, refusal: null } } : { text }),
    logprobs: null,
    finish_reason: finishReason,
    ...withTokenIds(tokenIds),
  }));
  return {
    id: head.id,
    object: endpoint === 'chat' ? 'chat.completion' : 'text_completion',
    created: head.created,
    model: head.model,
    choices,
    usage: usageOf(totals),
    kvtier: kvtierOf(totals),
  };
}

const chunkOf = (endpoint: Endpoint, head: ReplyHead, choices: readonly unknown[]) => ({
  id: head.id,
  object: endpoint === 'chat' ? 'chat.completion.chunk' : 'text_completion',
  created: head.created,
  model: head.model,
  choices,
});

/**
 * The chunks of one delta. The first token always makes one, so that a client can time it; a chat answer opens with its
 * role. After that an empty text (half a character, what may become a stop string) is not worth a chunk.
 */
export function chunksOf(endpoint: Endpoint, head: ReplyHead, delta: Delta, returnTokenIds = false) {
  const { index, text, finishReason } = delta;
  const ids = withTokenIds(returnTokenIds ? delta.tokenIds : undefined);
  const chunk = (choice: object) => chunkOf(endpoint, head, [choice]);
  if (endpoint === 'completion') {
    const wanted = delta.first || text !== '' || finishReason !== null || returnTokenIds;
    return wanted ? [chunk({ index, text, logprobs: null, finish_reason: finishReason, ...ids })] : [];
  }
  const say = (part: object, reason: FinishReason | null) =>
    chunk({ index, delta: part, logprobs: null, finish_reason: reason });
  return [
    ...(delta.first ? [say({ role: 'assistant', content: '', refusal: null }, null)] : []),
    ...(text !== '' || returnTokenIds
      ? [chunk({ index, delta: { content: text }, logprobs: null, finish_reason: null, ...ids })]
      : []),
    ...(finishReason !== null ? [say({}, finishReason)] : []),
  ];
}

/**
 * A token's chunk as text, as `chunksOf` makes it, for the many that neither begin nor end an answer: all that such chunks of one answer have
 * in common is written out once.
 */
export class PlainChunks {
  readonly #open: string;
  readonly #afterText: string;
  readonly #close: string;
  readonly #returnTokenIds: boolean;

  /** `includeUsage`: each chunk says that it has none. */
  constructor(endpoint: Endpoint, head: ReplyHead, index: number, includeUsage: boolean, returnTokenIds: boolean) {
    const all = JSON.stringify(chunkOf(endpoint, head, []));
    const isChat = endpoint === 'chat';
    this.#open = `${all.slice(0, -']}'.length)}{"index":${index},${isChat ? '"delta":{"content":' : '"text":'}`;
    this.#close = `]${includeUsage ? ',"usage":null' : ''}}`;
    this.#returnTokenIds = returnTokenIds;
    this.#afterText = `${isChat ? '}' : ''},"logprobs":null,"finish_reason":null`;
  }

  /** JSON; undefined: none. Not of a delta that is the first of its answer or has a finish reason. */
  of({ text, tokenIds }: Delta): string | undefined {
    if (text === '' && !this.#returnTokenIds) return undefined;
    const ids = this.#returnTokenIds ? `,"token_ids":[${tokenIds.join()}]` : '';
    return `${this.#open}${JSON.stringify(text)}${this.#afterText}${ids}}${this.#close}`;
  }
}

/** The last chunk when usage is asked for: no choices. */
export const usageChunk = (endpoint: Endpoint, head: ReplyHead, totals: Totals) => ({
  ...chunkOf(endpoint, head, []),
  usage: usageOf(totals),
  kvtier: kvtierOf(totals),
});
