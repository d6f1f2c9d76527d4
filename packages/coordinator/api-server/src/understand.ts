/**
 * From the bytes of a body to what the engine is asked: JSON, parameters, chat template, token ids. All work on clients' texts
 * is here, and none of it on the event loop: text-thread.ts runs it.
 */
import { KvError } from '@kvtier/errors';
import { badParameter, HttpError } from './errors.ts';
import { boundsOf, checkJsonBounds } from './json-bounds.ts';
import { type GenerationParams, type Prompt, parseChat, parseCompletion, parsePin, parseUnpin } from './params.ts';
import type { Tokenizer } from './tokenizer.ts';

/** What has to be known of the model. */
export interface TextModel {
  /** Its name to clients. */
  readonly name: string;
  readonly modelDir: string;
  readonly maxModelTokens: number;
  readonly vocabSize: number;
}

/** A prompt's token ids, in memory that moves between threads. */
export type TokenIds = Uint32Array<ArrayBuffer>;

/** What came out, by the kind of body. */
export interface Understood {
  readonly completion: UnderstoodPrompts;
  readonly chat: UnderstoodPrompts;
  readonly pin: { readonly name: string; readonly cacheSalt: string; readonly prompt: TokenIds };
  readonly unpin: { readonly name: string };
}
export type BodyKind = keyof Understood;

export interface UnderstoodPrompts {
  readonly params: GenerationParams;
  readonly prompts: readonly TokenIds[];
  /** Text of each prompt that its answers begin with (`echo`). */
  readonly echoes: readonly string[];
}

type Understand = {
  readonly [K in BodyKind]: (body: unknown, model: TextModel, tokenizer: Tokenizer) => Understood[K];
};

const byKind: Understand = {
  completion: (body, model, tokenizer) => {
    const { prompts, echo, ...params } = parseCompletion(body);
    checkModel(params.model, model);
    return {
      params,
      prompts: prompts.map((prompt) => promptTokens(prompt, model, tokenizer, params, true)),
      echoes: prompts.map((prompt) => (echo ? promptText(prompt, tokenizer) : '')),
    };
  },
  chat: (body, model, tokenizer) => {
    const { messages, ...params } = parseChat(body, model.maxModelTokens);
    checkModel(params.model, model);
    const prompt = tokenizer.chatPrompt(messages);
    return { params, prompts: [promptTokens(prompt, model, tokenizer, params, false)], echoes: [''] };
  },
  pin: (body, model, tokenizer) => {
    const { name, prompt, cacheSalt } = parsePin(body);
    const limits = { maxTokens: undefined, maxTokensParam: 'prompt' };
    return { name, cacheSalt, prompt: promptTokens(prompt, model, tokenizer, limits, true) };
  },
  unpin: (body) => parseUnpin(body),
};

/** `body`: UTF-8 text as it came. @throws HttpError or KvError: what the client is told */
export function understand<K extends BodyKind>(
  kind: K,
  body: Uint8Array,
  model: TextModel,
  tokenizer: Tokenizer,
): Understood[K] {
  checkJsonBounds(body, boundsOf(model.maxModelTokens));
  return byKind[kind](parseJson(body), model, tokenizer);
}

function parseJson(body: Uint8Array): unknown {
  if (body.length === 0) throw invalidJson('The body is empty; send a JSON object.');
  try {
    return JSON.parse(new TextDecoder().decode(body)); // drops a byte order mark
  } catch (error) {
    throw invalidJson(`The body is not valid JSON (${(error as Error).message}).`);
  }
}

const invalidJson = (message: string): HttpError => new HttpError(400, message, { code: 'invalid_json' });

export const unknownModel = (name: string): HttpError =>
  new HttpError(404, `The model '${name}' does not exist; GET /v1/models lists what is served.`, {
    param: 'model',
    code: 'model_not_found',
  });

function checkModel(name: string | undefined, model: TextModel): void {
  if (name !== undefined && name !== model.name) throw unknownModel(name);
}

/**
 * Token ids of a prompt, as far as they leave room for an answer.
 * @throws HttpError 400: too long, empty, or ids that the model does not have
 */
function promptTokens(
  prompt: Prompt,
  { maxModelTokens, vocabSize }: TextModel,
  tokenizer: Tokenizer,
  params: Pick<GenerationParams, 'maxTokens' | 'maxTokensParam'>,
  addSpecialTokens: boolean,
): TokenIds {
  const tooLong = (tokens: number, exact: boolean): Error => {
    const answer = params.maxTokens ?? 1;
    return badParameter(
      tokens >= maxModelTokens ? (addSpecialTokens ? 'prompt' : 'messages') : params.maxTokensParam,
      `This model's maximum context length is ${maxModelTokens} tokens. However, you requested ${exact ? '' : 'at least '}` +
        `${tokens + answer} tokens (${tokens} in the prompt, ${answer} for the completion). Shorten one of them.`,
      'context_length_exceeded',
    );
  };
  const least = typeof prompt === 'string' ? tokenizer.leastTokens(prompt) : prompt.length;
  if (least >= maxModelTokens) throw tooLong(least, typeof prompt !== 'string');
  let ids: readonly number[];
  try {
    ids =
      typeof prompt === 'string' ? tokenizer.encode(prompt, { addSpecialTokens, maxTokens: maxModelTokens }) : prompt;
  } catch (error) {
    throw error instanceof KvError && error.code === 'TOO_LONG' ? tooLong(maxModelTokens, false) : error;
  }
  if (ids.length === 0) throw badParameter('prompt', 'prompt: has no tokens; give at least one character.');
  const foreign = typeof prompt === 'string' ? undefined : ids.find((id) => id >= vocabSize);
  if (foreign !== undefined) {
    throw badParameter('prompt', `prompt: token id ${foreign} is outside of the vocabulary (0 to ${vocabSize - 1}).`);
  }
  if (ids.length + (params.maxTokens ?? 1) > maxModelTokens) throw tooLong(ids.length, true);
  return Uint32Array.from(ids);
}

const promptText = (prompt: Prompt, tokenizer: Tokenizer): string =>
  typeof prompt === 'string' ? prompt : tokenizer.decode(prompt);
