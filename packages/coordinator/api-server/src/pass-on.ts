/**
 * Bodies for workers with OpenAI's API (vLLM, SGLang): they go on byte by byte, and are read only for the choice of a worker. What is
 * wrong with them is the worker's to say.
 *
 * Where the model's tokenizer is known, a prompt is its tokens, as the worker will have them. Elsewhere four bytes of text count as a
 * token: enough to weigh requests, and to send those that begin alike to one worker.
 */
import type { Keys } from '@kvtier/kv-index';
import { badParameter } from './errors.ts';
import { parseChat, parseCompletion, sessionOf } from './params.ts';
import { type BlockNames, keysOfPrompt } from './prompt-keys.ts';
import type { TextModel } from './text-model.ts';
import type { Tokenizer } from './tokenizer.ts';

export interface PassedOn {
  readonly model: string;
  /** The body as it came, when it comes back from the thread. */
  readonly passedOn: ArrayBuffer;
  readonly tokens: number;
  readonly maxTokens: number;
  readonly blockTokens: number;
  readonly keys: Keys;
  readonly session: string;
}

const bytesPerToken = 4;
/** OpenAI's default for completions; of a chat as many as a usual answer has. */
const defaultMaxTokens = { completion: 16, chat: 1_024 } as const;
const ofText: BlockNames = { blockTokens: 64, algorithm: 'xxhash_cbor', seed: 'text' };
const nothing = new ArrayBuffer(0);

type Endpoint = keyof typeof defaultMaxTokens;

/** @throws HttpError 400: not an object */
export function passOn(endpoint: Endpoint, body: unknown, model: TextModel, load: () => Tokenizer): PassedOn {
  if (typeof body !== 'object' || body === null || Array.isArray(body))
    throw badParameter(undefined, 'The body must be a JSON object.', 'invalid_json');
  const given = body as Readonly<Record<string, unknown>>;
  const asked = given.max_completion_tokens ?? given.max_tokens;
  const head = {
    model: model.name,
    passedOn: nothing,
    maxTokens: typeof asked === 'number' && asked > 0 && Number.isFinite(asked) ? asked : defaultMaxTokens[endpoint],
    session: sessionOf(given),
  };
  const ids = model.modelDir === '' ? undefined : tokensOf(endpoint, body, model, load());
  if (ids !== undefined) {
    const salt = typeof given.cache_salt === 'string' ? given.cache_salt : '';
    const blockTokens = model.blocks?.blockTokens ?? ofText.blockTokens;
    return { ...head, tokens: ids.length, blockTokens, keys: keysOfPrompt(ids, model.blocks ?? ofText, salt) };
  }
  const words = wordsOf(endpoint === 'chat' ? given.messages : given.prompt);
  return { ...head, tokens: words.length, blockTokens: ofText.blockTokens, keys: keysOfPrompt(words, ofText) };
}

/** As the worker will have them, if we read the body as it does; undefined: we do not. */
function tokensOf(endpoint: Endpoint, body: object, model: TextModel, tokenizer: Tokenizer): Uint32Array | undefined {
  try {
    const maxTokens = model.maxModelTokens > 0 ? model.maxModelTokens : Number.POSITIVE_INFINITY;
    if (endpoint === 'chat') {
      const text = tokenizer.chatPrompt(parseChat(body).messages);
      return Uint32Array.from(tokenizer.encode(text, { addSpecialTokens: false, maxTokens }));
    }
    const [prompt] = parseCompletion(body).prompts;
    return Uint32Array.from(
      typeof prompt === 'string' ? tokenizer.encode(prompt, { addSpecialTokens: true, maxTokens }) : prompt!,
    );
  } catch {
    return undefined; // tools, images, what the worker refuses
  }
}

/** Text in pieces of four bytes, a number each. */
function wordsOf(prompt: unknown): Uint32Array {
  const bytes = Buffer.from(typeof prompt === 'string' ? prompt : (JSON.stringify(prompt) ?? ''));
  const words = new Uint32Array(Math.ceil(bytes.length / bytesPerToken));
  new Uint8Array(words.buffer).set(bytes);
  return words;
}
