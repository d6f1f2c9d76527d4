/**
 * Bodies for workers with OpenAI's API (vLLM, SGLang): they go on byte by byte, and are read only for the choice of a worker. What is
 * wrong with them is the worker's to say.
 *
 * Where the model's tokenizer is known, a prompt is its tokens, as the worker will have them. Elsewhere, and where the worker makes
 * another prompt of it than we would (tools, images, templates of the client's), four bytes of text count as a token, and an attachment
 * as a fixed number (attachments.ts): enough to weigh requests, and to send those that begin alike to one worker. All other parameters, known or not, change nothing here.
 */
import type { Keys } from '@kvtier/kv-index';
import type { OtherName } from '@kvtier/registry';
import { bytesPerToken, jsonOfMessages } from './attachments.ts';
import { badParameter } from './errors.ts';
import type { JsonMembers } from './json-members.ts';
import { parseChat, parseCompletion, sessionOf } from './params.ts';
import { type BlockNames, keysOfPrompt } from './prompt-keys.ts';
import type { TextModel } from './text-model.ts';
import type { Tokenizer } from './tokenizer.ts';
import { isLoan, transferIn } from './transfer.ts';
import { isEmpty, whyUnsplit } from './unsplit.ts';

export interface PassedOn {
  readonly model: string;
  /** Where the body names its model otherwise: only some of its workers may know that name. */
  readonly otherName?: OtherName | undefined;
  /** The body as it came, when it comes back from the thread. */
  readonly passedOn: ArrayBuffer;
  readonly tokens: number;
  readonly maxTokens: number;
  readonly blockTokens: number;
  readonly keys: Keys;
  readonly session: string;
  /** Where its parameters lie in `passedOn`; undefined: it has more than anybody sends. */
  readonly members?: JsonMembers | undefined;
  /** The member by which it tells a pod where blocks come from or go to, which not everybody may (transfer.ts); undefined: none does. */
  readonly transferIn: string | undefined;
  /** The client's own `kv_transfer_params`: it knows better how its prompt gets there. */
  readonly isTransfer: boolean;
  /** They stand for blocks that one pod may read, once (transfer.ts). */
  readonly isLoan: boolean;
  /** Why one pod has to serve all of it (unsplit.ts); undefined: one may compute the prompt for another. */
  readonly unsplit: string | undefined;
  /** Share of the prompt that a pod has to hold, else it answers with finish reason cache_threshold; undefined: none. */
  readonly cacheHitThreshold: number | undefined;
}

/** OpenAI's default for completions; of a chat as many as a usual answer has. */
const defaultMaxTokens = { completion: 16, chat: 1_024 } as const;
const ofText: BlockNames = { blockTokens: 64, algorithm: 'xxhash_cbor', seed: 'text' };
const nothing = new ArrayBuffer(0);
/** Of an answer, for a worker that does not say its context. */
const maxAnswerTokens = 1 << 20;
/** What makes a worker's prompt another than ours, unless it is empty or false. By vLLM's names. */
const elsewise = {
  completion: ['prompt_embeds', 'truncate_prompt_tokens'],
  chat: [
    ...['tools', 'functions', 'documents', 'chat_template', 'chat_template_kwargs'],
    ...['continue_final_message', 'add_special_tokens', 'truncate_prompt_tokens'],
  ],
} as const;
/** The other way around. */
const unlessTrue = { completion: ['add_special_tokens'], chat: ['add_generation_prompt'] } as const;

type Endpoint = keyof typeof defaultMaxTokens;
type Body = Readonly<Record<string, unknown>>;

/** @throws HttpError 400: not an object */
export function passOn(endpoint: Endpoint, body: unknown, model: TextModel, load: () => Tokenizer): PassedOn {
  if (typeof body !== 'object' || body === null || Array.isArray(body))
    throw badParameter(undefined, 'The body must be a JSON object.', 'invalid_json');
  const given = body as Body;
  const most = model.maxModelTokens > 0 ? model.maxModelTokens : maxAnswerTokens;
  const asked = given.max_completion_tokens ?? given.max_tokens;
  // Of an adapter's blocks no index knows the names: under these, whatever the model holds is not taken for the adapter's.
  const otherName = model.otherNames?.find(({ name }) => name === given.model);
  const loraName = otherName?.isAdapter ? otherName.name : '';
  const head = {
    ...{ model: model.name, otherName },
    passedOn: nothing,
    maxTokens: typeof asked === 'number' && asked > 0 ? Math.min(Math.ceil(asked), most) : defaultMaxTokens[endpoint],
    session: sessionOf(given),
    transferIn: transferIn(given),
    isTransfer: !isEmpty(given.kv_transfer_params),
    isLoan: isLoan(given.kv_transfer_params),
    unsplit: whyUnsplit(endpoint, given),
    cacheHitThreshold: shareOf(given.cache_hit_threshold),
  };
  const ids = model.modelDir === '' ? undefined : tokensOf(endpoint, given, model, load);
  if (ids !== undefined) {
    const salt = typeof given.cache_salt === 'string' ? given.cache_salt : '';
    const blockTokens = model.blocks?.blockTokens ?? ofText.blockTokens;
    return {
      ...head,
      tokens: ids.length,
      blockTokens,
      keys: keysOfPrompt(ids, model.blocks ?? ofText, salt, loraName),
    };
  }
  const words = wordsOf(endpoint === 'completion' ? textOf(given.prompt) : jsonOfMessages(toolsFirst(given)));
  return {
    ...head,
    tokens: words.length,
    blockTokens: ofText.blockTokens,
    keys: keysOfPrompt(words, ofText, '', loraName),
  };
}

/** As the worker will have them, if we read the body as it does; undefined: we do not. */
function tokensOf(endpoint: Endpoint, body: Body, model: TextModel, load: () => Tokenizer): Uint32Array | undefined {
  if (elsewise[endpoint].some((name) => !isEmpty(body[name]))) return undefined;
  if (unlessTrue[endpoint].some((name) => body[name] === false)) return undefined;
  try {
    const tokenizer = load();
    const maxTokens = model.maxModelTokens > 0 ? model.maxModelTokens : Number.POSITIVE_INFINITY;
    if (endpoint === 'chat') {
      if (tokenizer.readsParts && hasParts(body.messages)) return undefined;
      const text = tokenizer.chatPrompt(parseChat({ messages: body.messages }).messages);
      return Uint32Array.from(tokenizer.encode(text, { addSpecialTokens: false, maxTokens }));
    }
    const [prompt] = parseCompletion({ prompt: body.prompt }).prompts;
    if (prompt instanceof Uint32Array) return prompt;
    return Uint32Array.from(
      typeof prompt === 'string' ? tokenizer.encode(prompt, { addSpecialTokens: true, maxTokens }) : prompt!,
    );
  } catch {
    return undefined; // calls of tools, images, what the worker refuses; a tokenizer that cannot be read any more
  }
}

/** Some message is several texts. */
const hasParts = (messages: unknown): boolean =>
  Array.isArray(messages) && messages.some((one) => Array.isArray(one?.content) && one.content.length > 1);

const shareOf = (value: unknown): number | undefined =>
  typeof value === 'number' && value >= 0 && value <= 1 ? value : undefined;

/** Templates put tools in front of the messages: those of other tools begin otherwise. */
const toolsFirst = ({ tools, messages }: Body): unknown => (isEmpty(tools) ? messages : [tools, messages]);

function textOf(prompt: unknown): string {
  const json = prompt instanceof Uint32Array ? Array.from(prompt) : prompt;
  return typeof json === 'string' ? json : (JSON.stringify(json) ?? '');
}

/** Text in pieces of four bytes, a number each. */
function wordsOf(text: string): Uint32Array {
  const bytes = Buffer.from(text);
  const words = new Uint32Array(Math.ceil(bytes.length / bytesPerToken));
  new Uint8Array(words.buffer).set(bytes);
  return words;
}
