/**
 * From the bytes of a body to what a worker is asked: JSON, the model it names, parameters, chat template, token ids, hashes of the
 * prompt's blocks. All work on clients' texts is here, and none of it on the event loop: text-thread.ts runs it. What has no text, and is
 * small, is read at once (ids-at-once.ts).
 */
import { KvError } from '@kvtier/errors';
import type { Keys } from '@kvtier/kv-index';
import { badParameter, HttpError } from './errors.ts';
import { Unbroken } from './fast-encode.ts';
import { boundsOf, checkJsonBounds } from './json-bounds.ts';
import { bodyWithIds } from './json-ids.ts';
import { membersOf } from './json-members.ts';
import { type GenerationParams, type Prompt, parseChat, parseCompletion, parsePin, parseUnpin } from './params.ts';
import { type PassedOn, passOn } from './pass-on.ts';
import { keysOfPrompt } from './prompt-keys.ts';
import type { TextModel } from './text-model.ts';
import type { Tokenizer } from './tokenizer.ts';

/** A prompt's token ids, in memory that moves between threads. */
export type TokenIds = Uint32Array<ArrayBuffer>;

/** What came out, by the kind of body. */
export interface Understood {
  readonly completion: UnderstoodPrompts | PassedOn;
  readonly chat: UnderstoodPrompts | PassedOn;
  readonly pin: {
    readonly model: string;
    readonly name: string;
    readonly cacheSalt: string;
    readonly prompt: TokenIds;
  };
  readonly unpin: { readonly model: string; readonly name: string };
}
export type BodyKind = keyof Understood;

export interface UnderstoodPrompts {
  readonly model: string;
  readonly params: GenerationParams;
  readonly prompts: readonly TokenIds[];
  /** Hashes of each prompt's full blocks, as the KV index names them. */
  readonly keys: readonly Keys[];
  /** Text of each prompt that its answers begin with (`echo`). */
  readonly echoes: readonly string[];
}

/** What was read of a body has these names of blocks in it. */
export function keysIn(value: Understood[BodyKind]): readonly Keys[] {
  if ('passedOn' in value) return [value.keys];
  return 'keys' in value ? value.keys : [];
}

type Understand = {
  readonly [K in BodyKind]: (body: unknown, model: TextModel, tokenizer: () => Tokenizer) => Understood[K];
};

const byKind: Understand = {
  completion: (body, model, load) => {
    if (model.isPassedOn) return passOn('completion', body, model, load);
    const { prompts, echo, ...params } = parseCompletion(body);
    const ids = prompts.map((prompt) => promptTokens(prompt, model, load, params, true));
    const echoes = prompts.map((prompt) => (echo ? promptText(prompt, load) : ''));
    if (!params.stream) checkEchoes(echoes, params.n);
    return {
      model: model.name,
      params,
      prompts: ids,
      keys: ids.map((prompt) => keysOfPrompt(prompt, model.blocks, params.sampling.cacheSalt)),
      echoes,
    };
  },
  chat: (body, model, load) => {
    if (model.isPassedOn) return passOn('chat', body, model, load);
    const { messages, ...params } = parseChat(body, model.maxModelTokens);
    const tokenizer = load();
    const prompt = promptTokens(tokenizer.chatPrompt(messages), model, load, params, false);
    const keys = [keysOfPrompt(prompt, model.blocks, params.sampling.cacheSalt)];
    return { model: model.name, params, prompts: [prompt], keys, echoes: [''] };
  },
  pin: (body, model, load) => {
    const { name, prompt, cacheSalt } = parsePin(body);
    checkOwn(model);
    const limits = { maxTokens: undefined, maxTokensParam: 'prompt' };
    return { model: model.name, name, cacheSalt, prompt: promptTokens(prompt, model, load, limits, true) };
  },
  unpin: (body, model) => {
    checkOwn(model);
    return { model: model.name, name: parseUnpin(body).name };
  },
};

/**
 * `body`: UTF-8 text as it came. `models`: all that are served, one or more. `load`: gives a model's tokenizer; asked only for texts.
 * @throws HttpError or KvError: what the client is told
 */
export function understand<K extends BodyKind>(
  kind: K,
  body: Uint8Array,
  models: readonly TextModel[],
  load: (model: TextModel) => Tokenizer,
): Understood[K] {
  const value = (kind === 'chat' ? undefined : parseWithIds(body, models)) ?? parse(body, models);
  const model = modelOf(value, models);
  const understood = byKind[kind](value, model, () => load(model));
  return 'passedOn' in understood ? { ...understood, members: membersOf(body) } : understood;
}

/**
 * The same of a completion whose prompt is a list of token ids, with `mostBeside` bytes beside it at most. undefined: it is none, or something
 * is wrong, which `understand` says.
 */
export function understandIds(
  body: Uint8Array,
  models: readonly TextModel[],
  mostBeside: number,
): UnderstoodPrompts | undefined {
  const value = parseWithIds(body, models, mostBeside);
  if (value === undefined) return undefined;
  try {
    const model = modelOf(value, models);
    const understood = model.isPassedOn ? undefined : byKind.completion(value, model, noTexts);
    return understood === undefined || 'passedOn' in understood ? undefined : understood;
  } catch {
    return undefined;
  }
}

const noTexts = (): never => {
  throw new Error('a text after all');
};

/** Of a model that does not say its context: long. */
const contextOf = ({ maxModelTokens }: TextModel): number => (maxModelTokens > 0 ? maxModelTokens : 1 << 20);

/** The one that the body names; without a name the only one that has workers. @throws HttpError 404, 400 */
function modelOf(body: unknown, models: readonly TextModel[]): TextModel {
  const name = (body as { model?: unknown } | null)?.model;
  if (typeof name === 'string') {
    const model =
      models.find((served) => served.name === name) ??
      models.find(({ otherNames }) => otherNames?.some((other) => other.name === name));
    if (model === undefined) throw unknownModel(name);
    return model;
  }
  const here = models.filter(({ hasLeft }) => !hasLeft);
  const [only, another] = here.length > 0 ? here : models;
  if (another !== undefined)
    throw badParameter('model', 'model: is required here, as a text; GET /v1/models lists what is served.');
  return only!;
}

function parse(body: Uint8Array, models: readonly TextModel[]): unknown {
  checkJsonBounds(body, boundsOf(models.reduce((most, model) => Math.max(most, contextOf(model)), 0)));
  return parseJson(body);
}

/** The same where a list of token ids is most of it; undefined: where it is not, or where something is wrong, which `parse` says. */
function parseWithIds(body: Uint8Array, models: readonly TextModel[], mostBeside = Number.POSITIVE_INFINITY): unknown {
  const withIds = bodyWithIds(body);
  if (withIds === undefined || withIds.shortened.length > mostBeside) return undefined;
  try {
    return withIds.complete(parse(withIds.shortened, models));
  } catch {
    return undefined;
  }
}

/** A body that holds a name or two, read at once. @throws HttpError 400 */
export function smallJson(body: Uint8Array): unknown {
  if (body.length > 4096) throw invalidJson(`The body has ${body.length} bytes; 4096 are enough for this.`);
  return parseJson(body);
}

function parseJson(body: Uint8Array): unknown {
  if (body.length === 0) throw invalidJson('The body is empty; send a JSON object.');
  let text: string;
  try {
    text = new TextDecoder('utf-8', { fatal: true }).decode(body); // drops a byte order mark
  } catch {
    // Replaced bytes would be another prompt than the client's.
    throw invalidJson('The body is not UTF-8; send JSON in UTF-8.');
  }
  try {
    return JSON.parse(text);
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

/** @throws HttpError 400 */
function checkOwn({ name, isPassedOn }: TextModel): void {
  if (isPassedOn) throw badParameter('model', `model: the workers of '${name}' cannot pin prefixes.`);
}

/**
 * Token ids of a prompt, as far as they leave room for an answer.
 * @throws HttpError 400: too long, empty, or ids that the model does not have
 */
function promptTokens(
  prompt: Prompt,
  { maxModelTokens, vocabSize }: TextModel,
  load: () => Tokenizer,
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
  const least = typeof prompt === 'string' ? load().leastTokens(prompt) : prompt.length;
  if (least >= maxModelTokens) throw tooLong(least, typeof prompt !== 'string');
  let ids: readonly number[] | TokenIds;
  try {
    ids = typeof prompt === 'string' ? load().encode(prompt, { addSpecialTokens, maxTokens: maxModelTokens }) : prompt;
  } catch (error) {
    const param = addSpecialTokens ? 'prompt' : 'messages';
    if (error instanceof Unbroken) throw badParameter(param, `${param}: ${error.message}`);
    throw error instanceof KvError && error.code === 'TOO_LONG' ? tooLong(maxModelTokens, false) : error;
  }
  if (ids.length === 0) throw badParameter('prompt', 'prompt: has no tokens; give at least one character.');
  const foreign = typeof prompt === 'string' ? undefined : firstFrom(ids, vocabSize);
  if (foreign !== undefined) {
    throw badParameter('prompt', `prompt: token id ${foreign} is outside of the vocabulary (0 to ${vocabSize - 1}).`);
  }
  if (ids.length + (params.maxTokens ?? 1) > maxModelTokens) throw tooLong(ids.length, true);
  return ids instanceof Uint32Array ? ids : new Uint32Array(ids);
}

/** The first id that the vocabulary does not have. */
function firstFrom(ids: ArrayLike<number>, vocabSize: number): number | undefined {
  for (let at = 0; at < ids.length; at++) if (ids[at]! >= vocabSize) return ids[at];
  return undefined;
}

/** Of what answers that are written as one JSON begin with: the event loop writes it in one turn, 10 ms on an idle CPU. */
const maxEchoChars = 1 << 20;

/** @throws HttpError 400 */
function checkEchoes(echoes: readonly string[], n: number): void {
  const chars = n * echoes.reduce((sum, { length }) => sum + length, 0);
  if (chars > maxEchoChars)
    throw badParameter(
      'echo',
      `echo: the prompts of all answers have ${chars} characters; at most ${maxEchoChars} where stream is false. Stream them, or leave echo out.`,
    );
}

const promptText = (prompt: Prompt, load: () => Tokenizer): string =>
  typeof prompt === 'string' ? prompt : load().decode(Array.from(prompt));
