/**
 * The bodies of /v1/completions and /v1/chat/completions, checked. OpenAI's names and defaults; `null` means absent.
 *
 * Invariant: nothing that would change the answer is ignored. A parameter that we do not serve is refused by name,
 * unless it has its neutral value; labels that never change an answer (user, metadata, ...) are accepted.
 * Extensions, by the names that vLLM gave them: top_k, ignore_eos, stop_token_ids, cache_salt, kv_cache_report_mode,
 * return_token_ids.
 */
import * as z from 'zod';
import type { ChatMessage } from './chat-template.ts';
import { badParameter } from './errors.ts';
import type { ReadIds } from './json-ids.ts';

/** Answers of one HTTP request: prompts × n. */
export const maxChoices = 128;
const maxStopChars = 4_096;

const maxUint32 = 0xffff_ffff;
const tokenId = z.number().int().min(0).max(maxUint32);
const empty = (value: unknown): boolean =>
  typeof value === 'object' && value !== null && Object.keys(value).length === 0;
/** Accepted only where it changes nothing. */
const neutral = (test: (value: unknown) => boolean) =>
  z.unknown().refine(test, { error: 'is not supported by this server; leave it out' }).optional();
const label = z.unknown().optional();

const shared = {
  model: z.string().optional(),
  temperature: z.number().min(0).max(2).default(1),
  top_p: z.number().min(0).max(1).default(1),
  top_k: z.number().int().min(-1).max(maxUint32).default(0),
  n: z.number().int().min(1).max(maxChoices).default(1),
  seed: z.number().int().min(Number.MIN_SAFE_INTEGER).max(Number.MAX_SAFE_INTEGER).optional(),
  stop: z.union([z.string().min(1).max(maxStopChars), z.array(z.string().min(1).max(maxStopChars)).max(4)]).default([]),
  stop_token_ids: z.array(tokenId).max(64).default([]),
  ignore_eos: z.boolean().default(false),
  cache_salt: z.string().max(1_024).default(''),
  kv_cache_report_mode: z.enum(['full']).optional(),
  return_token_ids: z.boolean().default(false),
  stream: z.boolean().default(false),
  stream_options: z
    .strictObject({ include_usage: z.boolean().optional(), include_obfuscation: z.boolean().optional() })
    .optional(),

  user: label,
  metadata: label,
  store: label,
  service_tier: label,
  safety_identifier: label,
  prompt_cache_key: label,
  prompt_cache_retention: label,
  presence_penalty: neutral((value) => value === 0),
  frequency_penalty: neutral((value) => value === 0),
  repetition_penalty: neutral((value) => value === 1),
  min_p: neutral((value) => value === 0),
  logit_bias: neutral(empty),
};

const completionSchema = z.strictObject({
  ...shared,
  // Its shapes are told apart below: a union's error would say little.
  prompt: z.unknown().refine((value) => value !== undefined, { error: 'is required' }),
  max_tokens: z.number().int().min(1).max(maxUint32).optional(),
  echo: z.boolean().default(false),
  best_of: neutral((value) => value === 1),
  suffix: neutral((value) => value === ''),
  logprobs: neutral(() => false),
});

const textPart = z.strictObject({ type: z.literal('text'), text: z.string() });
const messageSchema = z.object({
  role: z.enum(['system', 'developer', 'user', 'assistant']),
  content: z.union([z.string(), z.array(textPart)], { error: 'must be a text or a list of {type: "text", text}' }),
  name: z.string().optional(),
  tool_calls: neutral((value) => Array.isArray(value) && value.length === 0),
});

const chatSchema = z.strictObject({
  ...shared,
  messages: z.array(messageSchema).min(1),
  max_tokens: z.number().int().min(1).max(maxUint32).optional(),
  max_completion_tokens: z.number().int().min(1).max(maxUint32).optional(),
  logprobs: neutral((value) => value === false),
  top_logprobs: neutral((value) => value === 0),
  response_format: neutral((value) => (value as { type?: unknown })?.type === 'text'),
  tools: neutral((value) => Array.isArray(value) && value.length === 0),
  tool_choice: neutral((value) => value === 'none' || value === 'auto'),
  parallel_tool_calls: label, // says nothing without tools
  modalities: neutral((value) => JSON.stringify(value) === '["text"]'),
});

const pinName = z.string().min(1).max(256);
const pinSchema = z.strictObject({
  model: shared.model,
  name: pinName,
  prompt: completionSchema.shape.prompt,
  cache_salt: shared.cache_salt,
});
const unpinSchema = z.strictObject({ model: shared.model, name: pinName });
const drainSchema = z.strictObject({ worker: pinName });

/** A prompt as text or as token ids; as a list of its own where these were read from the body's bytes (json-ids.ts). */
export type Prompt = string | readonly number[] | ReadIds;

export interface SamplingParams {
  readonly temperature: number;
  readonly topP: number;
  readonly topK: number;
  readonly seed: number | undefined;
  readonly ignoreEos: boolean;
  readonly stopTokenIds: readonly number[];
  readonly cacheSalt: string;
  readonly kvCacheReportMode: string | undefined;
}

export interface GenerationParams {
  readonly model: string | undefined;
  /** Answers per prompt. */
  readonly n: number;
  readonly maxTokens: number | undefined;
  /** The name under which the client gave maxTokens. */
  readonly maxTokensParam: string;
  readonly stops: readonly string[];
  readonly stream: boolean;
  readonly includeUsage: boolean;
  /** Choices carry `token_ids`: what the engine generated, token by token. */
  readonly returnTokenIds: boolean;
  readonly sampling: SamplingParams;
  /** A session or user that the client names, for policies that keep these together; empty: none. */
  readonly session: string;
}

export interface CompletionParams extends GenerationParams {
  readonly prompts: readonly Prompt[];
  readonly echo: boolean;
}

export interface ChatParams extends GenerationParams {
  readonly messages: readonly ChatMessage[];
}

/** @throws HttpError 400 that names the parameter */
export function parseCompletion(body: unknown): CompletionParams {
  const given = parse(completionSchema, body);
  const prompts = parsePrompts(given.prompt);
  if (prompts.length * given.n > maxChoices) {
    throw badParameter('n', `prompts × n is ${prompts.length * given.n}; at most ${maxChoices} answers per request.`);
  }
  const { max_tokens: maxTokens, echo } = given;
  return { ...generationParams(given), prompts, echo, maxTokens, maxTokensParam: 'max_tokens' };
}

/** The body of /admin/pin_prefix. @throws HttpError 400 that names the parameter */
export function parsePin(body: unknown): { name: string; prompt: Prompt; cacheSalt: string } {
  const given = parse(pinSchema, body);
  const [prompt, second] = parsePrompts(given.prompt);
  if (second !== undefined) throw badParameter('prompt', 'prompt: one text or one list of token ids per pin.');
  return { name: given.name, prompt: prompt!, cacheSalt: given.cache_salt };
}

/** The body of /admin/unpin_prefix. @throws HttpError 400 that names the parameter */
export const parseUnpin = (body: unknown): { name: string } => parse(unpinSchema, body);

/** The body of /admin/drain. @throws HttpError 400 that names the parameter */
export const parseDrain = (body: unknown): { worker: string } => parse(drainSchema, body);

/** A message costs a token at least: `maxMessages` is the model's context. @throws HttpError 400 that names the parameter */
export function parseChat(body: unknown, maxMessages = Number.POSITIVE_INFINITY): ChatParams {
  const listed = (body as { messages?: unknown } | null)?.messages;
  if (Array.isArray(listed) && listed.length > maxMessages) {
    throw badParameter(
      'messages',
      `messages: ${listed.length} of them; this model's maximum context length is ${maxMessages} tokens. Send fewer.`,
      'context_length_exceeded',
    );
  }
  const given = parse(chatSchema, body);
  const messages = given.messages.map(
    ({ role, content, name }): ChatMessage => ({
      role: role === 'developer' ? 'system' : role,
      // As vLLM joins them for templates that take a text.
      content: typeof content === 'string' ? content : content.map((part) => part.text).join('\n'),
      ...(name !== undefined && { name }),
    }),
  );
  return {
    ...generationParams(given),
    messages,
    maxTokens: given.max_completion_tokens ?? given.max_tokens,
    maxTokensParam: given.max_completion_tokens === undefined ? 'max_tokens' : 'max_completion_tokens',
  };
}

type Shared = Pick<z.infer<typeof chatSchema>, keyof typeof shared>;

const maxSessionChars = 256;

/** Labels that clients give to what belongs together. */
export function sessionOf({ prompt_cache_key: key, user }: { prompt_cache_key?: unknown; user?: unknown }): string {
  const label = typeof key === 'string' ? key : typeof user === 'string' ? user : '';
  return label.slice(0, maxSessionChars);
}

function generationParams(given: Shared): Omit<GenerationParams, 'maxTokens' | 'maxTokensParam'> {
  if (given.stream_options && !given.stream) {
    throw badParameter('stream_options', 'stream_options: only allowed when stream is true.');
  }
  return {
    model: given.model,
    session: sessionOf(given),
    n: given.n,
    stops: typeof given.stop === 'string' ? [given.stop] : given.stop,
    stream: given.stream,
    includeUsage: given.stream_options?.include_usage ?? false,
    returnTokenIds: given.return_token_ids,
    sampling: {
      temperature: given.temperature,
      // A nucleus of nothing is the most likely token alone.
      topP: given.top_p === 0 ? 1 : given.top_p,
      topK: given.top_p === 0 ? 1 : Math.max(0, given.top_k),
      seed: given.seed,
      ignoreEos: given.ignore_eos,
      stopTokenIds: given.stop_token_ids,
      cacheSalt: given.cache_salt,
      kvCacheReportMode: given.kv_cache_report_mode,
    },
  };
}

/** string | string[] | ids | ids[] */
function parsePrompts(prompt: unknown): readonly Prompt[] {
  const isIds = (value: unknown): value is number[] =>
    Array.isArray(value) && value.length > 0 && value.every((id) => Number.isInteger(id) && id >= 0 && id <= maxUint32);
  if (typeof prompt === 'string' || prompt instanceof Uint32Array) return [prompt as Prompt];
  if (isIds(prompt)) return [prompt];
  if (Array.isArray(prompt) && prompt.length > 0) {
    if (prompt.every((item) => typeof item === 'string') || prompt.every(isIds)) return prompt as Prompt[];
  }
  throw badParameter('prompt', 'prompt: must be a text, a list of texts, a list of token ids or a list of such lists.');
}

const isObject = (value: unknown): value is object =>
  typeof value === 'object' && value !== null && !Array.isArray(value);

const withoutNulls = (value: object): Record<string, unknown> =>
  Object.fromEntries(Object.entries(value).filter(([, inner]) => inner !== null));

/** What a message and its parts have. */
function presentIn(message: unknown): unknown {
  if (!isObject(message)) return message;
  const present = withoutNulls(message);
  if (Array.isArray(present.content))
    present.content = present.content.map((part) => (isObject(part) ? withoutNulls(part) : part));
  return present;
}

function parse<T>(schema: z.ZodType<T>, body: unknown): T {
  if (typeof body !== 'object' || body === null || Array.isArray(body)) {
    throw badParameter(undefined, 'The body must be a JSON object.', 'invalid_json');
  }
  const present = withoutNulls(body);
  // Clients send messages back as their library wrote them down, with a null for all that an answer does not have.
  if (Array.isArray(present.messages)) present.messages = present.messages.map(presentIn);
  if (isObject(present.stream_options)) present.stream_options = withoutNulls(present.stream_options);
  const result = schema.safeParse(present);
  if (result.success) return result.data;
  const issue = result.error.issues[0]!;
  const path = issue.path.reduce<string>(
    (text, step) =>
      typeof step === 'number' ? `${text}[${step}]` : text === '' ? String(step) : `${text}.${String(step)}`,
    '',
  );
  if (issue.code === 'unrecognized_keys') {
    const name = path === '' ? issue.keys[0]! : `${path}.${issue.keys[0]!}`;
    throw badParameter(name, `Unknown parameter: '${name}'; leave it out.`, 'unknown_parameter');
  }
  if (issue.code === 'invalid_type' && issue.input === undefined && issue.path.length > 0) {
    const owner = issue.path.slice(0, -1).reduce<unknown>((value, step) => (value as never)?.[step as never], present);
    const missing = !(typeof owner === 'object' && owner !== null && Object.hasOwn(owner, issue.path.at(-1)!));
    if (missing) throw badParameter(path, `${path}: is required.`, 'missing_required_parameter');
  }
  throw badParameter(path, `${path}: ${issue.message}`);
}
