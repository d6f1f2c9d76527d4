/**
 * A small client of the API server for measuring: one streamed completion, timed from the request to its first text. Over node:http, on a
 * connection that stays open: with fetch the client alone takes more than a millisecond of a first token.
 */
import { Agent as HttpAgent, request as httpRequest, type IncomingMessage } from 'node:http';
import { Agent as HttpsAgent, request as httpsRequest } from 'node:https';
import { KvError } from '@kvtier/errors';

export interface CompletionRequest {
  readonly prompt: string | readonly number[];
  readonly max_tokens: number;
  readonly temperature: number;
  readonly ignore_eos?: boolean;
  readonly seed?: number;
}

export interface Completion {
  readonly text: string;
  /** What the engine generated, with a token that ended the answer. */
  readonly tokenIds: readonly number[];
  readonly finishReason: string;
  readonly promptTokens: number;
  readonly completionTokens: number;
  readonly cachedTokens: number;
  /** Cached tokens by the tier they came from: engine, arena, disk. */
  readonly tokensByTier: Readonly<Record<string, number>>;
  /** Time to first token, seen from here. */
  readonly ttftMs: number;
}

interface Chunk {
  readonly choices: readonly {
    readonly text: string;
    readonly finish_reason: string | null;
    readonly token_ids: readonly number[];
  }[];
  readonly usage?: {
    readonly prompt_tokens: number;
    readonly completion_tokens: number;
    readonly prompt_tokens_details: { readonly cached_tokens: number };
  };
  readonly kvtier?: { readonly tokens_by_tier: Record<string, number> };
  readonly error?: { readonly message: string };
}

const deadlineMs = 300_000;

/** @throws KvError REQUEST with the API server's own message, DISCONNECTED when there is no API server */
export async function complete(url: string, request: CompletionRequest): Promise<Completion> {
  const options = { stream: true, stream_options: { include_usage: true }, return_token_ids: true };
  const body = JSON.stringify({ ...request, ...options });
  const begin = performance.now();
  const response = await post(`${url}/v1/completions`, body);
  if (response.statusCode !== 200)
    throw new KvError('REQUEST', `${url}: ${response.statusCode} ${await textOf(response)}`);
  let text = '';
  const tokenIds: number[] = [];
  let finishReason = '';
  let ttftMs = Number.NaN;
  let last: Chunk | undefined;
  for await (const chunk of sseChunks(response)) {
    if (chunk.error) throw new KvError('REQUEST', `${url}: ${chunk.error.message}`);
    if (Number.isNaN(ttftMs)) ttftMs = performance.now() - begin;
    const choice = chunk.choices[0];
    text += choice?.text ?? '';
    tokenIds.push(...(choice?.token_ids ?? []));
    finishReason = choice?.finish_reason ?? finishReason;
    if (chunk.usage) last = chunk;
  }
  if (!last?.usage) throw new KvError('PROTOCOL', `${url}: the stream ended without usage`);
  return {
    text,
    tokenIds,
    finishReason,
    promptTokens: last.usage.prompt_tokens,
    completionTokens: last.usage.completion_tokens,
    cachedTokens: last.usage.prompt_tokens_details.cached_tokens,
    tokensByTier: last.kvtier?.tokens_by_tier ?? {},
    ttftMs,
  };
}

async function* sseChunks(body: AsyncIterable<Uint8Array>): AsyncGenerator<Chunk> {
  const decoder = new TextDecoder();
  let rest = '';
  for await (const bytes of body) {
    const lines = (rest + decoder.decode(bytes, { stream: true })).split('\n');
    rest = lines.pop()!;
    for (const line of lines) {
      const data = line.startsWith('data: ') ? line.slice(6).trim() : '';
      if (data !== '' && data !== '[DONE]') yield JSON.parse(data) as Chunk;
    }
  }
}

const agents = { 'http:': new HttpAgent({ keepAlive: true }), 'https:': new HttpsAgent({ keepAlive: true }) };

function post(url: string, body: string): Promise<IncomingMessage> {
  const { protocol } = new URL(url);
  const options = {
    method: 'POST',
    headers: { 'content-type': 'application/json', 'content-length': Buffer.byteLength(body) },
    signal: AbortSignal.timeout(deadlineMs),
  };
  return new Promise((resolve, reject) => {
    const sent =
      protocol === 'https:'
        ? httpsRequest(url, { ...options, agent: agents[protocol] }, resolve)
        : httpRequest(url, { ...options, agent: agents['http:'] }, resolve);
    sent.on('error', (error) => reject(new KvError('DISCONNECTED', `${url}: no answer (${error.message})`)));
    sent.end(body);
  });
}

async function textOf(response: IncomingMessage): Promise<string> {
  const decoder = new TextDecoder();
  let text = '';
  for await (const bytes of response) text += decoder.decode(bytes as Buffer, { stream: true });
  return text;
}

async function ask(url: string, init: RequestInit): Promise<Response> {
  try {
    return await fetch(url, { ...init, signal: AbortSignal.timeout(deadlineMs) });
  } catch (error) {
    const cause = (error as Error & { cause?: Error }).cause;
    throw new KvError('DISCONNECTED', `${url}: no answer (${cause?.message ?? (error as Error).message})`);
  }
}

/** Asks `probe` until it says yes. @throws KvError DEADLINE with `what` */
export async function waitUntil(what: string, limitMs: number, probe: () => Promise<boolean>): Promise<void> {
  const end = performance.now() + limitMs;
  while (!(await probe())) {
    if (performance.now() > end) throw new KvError('DEADLINE', `${what}: not so after ${limitMs / 1000} s`);
    await new Promise((resolve) => setTimeout(resolve, 20));
  }
}

/** Drops the engine's own prefix cache (not the tiers); waits until blocks that are being stored allow it. */
export async function resetPrefixCache(url: string, limitMs = 30_000): Promise<void> {
  await waitUntil('reset of the engine’s prefix cache', limitMs, async () => {
    const response = await ask(`${url}/admin/reset_prefix_cache`, { method: 'POST' });
    return response.ok && ((await response.json()) as { done: boolean }).done;
  });
}

/** The API server answers and the engine serves; with `tier`, the engine is attached to its cache node as well. */
export async function waitUntilServing(url: string, tier: boolean, limitMs = 30_000): Promise<void> {
  await waitUntil(
    `${url}/health: ${tier ? 'engine attached to its cache node' : 'engine serving'}`,
    limitMs,
    async () => {
      const response = await ask(`${url}/health`, {});
      const { engine } = (await response.json()) as { engine?: { tier_attached: boolean } };
      return response.ok && (!tier || engine?.tier_attached === true);
    },
  );
}

/** Values of one metric of /metrics by their labels as written, e.g. {'{tier="disk"}': 12}. */
export async function metricValues(url: string, name: string): Promise<Map<string, number>> {
  const text = await (await ask(`${url}/metrics`, {})).text();
  const values = new Map<string, number>();
  for (const line of text.split('\n')) {
    const match = /^([A-Za-z_:][\w:]*)(\{.*\})?\s+(\S+)$/.exec(line);
    if (match?.[1] === name) values.set(match[2] ?? '', Number(match[3]));
  }
  return values;
}
