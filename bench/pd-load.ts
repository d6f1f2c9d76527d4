/**
 * A mixed load on one coordinator: streams that decode, and long prompts that arrive among them. What is sent when is drawn beforehand
 * from a seed, so that a slow way to serve it gets no lighter load than a fast one; timed from here.
 */
import { KvError } from '@kvtier/errors';

export interface Timed {
  readonly kind: 'stream' | 'prompt';
  readonly tokens: number;
  readonly ttftMs: number;
  /** Between two tokens. */
  readonly gapsMs: readonly number[];
  /** From the request to its end. */
  readonly wholeMs: number;
  /** What the coordinator decided, and why. */
  readonly decision: string;
  /** What its first token took, in milliseconds, one part after the other; of a split prompt those of `splitParts`. */
  readonly madeOf: Readonly<Record<string, number>>;
  readonly degraded: string;
}

/** What is wanted of an answer: to its first token, between two tokens. */
export interface Targets {
  readonly ttftMs: number;
  readonly itlMs: number;
}

export const isInTime = ({ ttftMs, gapsMs }: Pick<Timed, 'ttftMs' | 'gapsMs'>, targets: Targets): boolean =>
  ttftMs <= targets.ttftMs && gapsMs.every((gapMs) => gapMs <= targets.itlMs);

/** A request that was told to come again (429 and `Retry-After`): by which words. */
export interface Refused {
  readonly refused: string;
}

export interface LoadShape {
  /** Streams: so many prompt tokens each, so many tokens of answer. */
  readonly streamTokens: number;
  readonly answerTokens: number;
  /** Long prompts: tokens, and tokens of answer. */
  readonly promptTokens: number;
  readonly promptAnswerTokens: number;
}

export interface Arrival {
  readonly kind: Timed['kind'];
  readonly atMs: number;
}

/** Until the decode side has room, at the prefill side, until the last block is in, and the rest. */
const splitParts = ['admit', 'queue', 'prefill', 'transfer', 'tail'] as const;
/** Of these, what passes before the first token where the prefill side gives it. */
const earlyParts = 3;
const aloneParts = ['queue', 'load', 'prefill'] as const;

interface Chunk {
  /** With the last one. */
  readonly kvtier?: Readonly<Record<string, unknown>> & { readonly hand_off?: Readonly<Record<string, unknown>> };
  readonly choices?: readonly { readonly token_ids?: readonly number[] }[];
  readonly error?: { readonly message: string };
}

/** Ids of ordinary words in the demo tokenizer. */
const wordIds = { from: 300, to: 1300 };
const usualLimitMs = 120_000;
let drawn = 1 + (Date.now() % 1_000_000);

/** Never the same twice in one run. */
export function freshPrompt(tokens: number): number[] {
  return Array.from({ length: tokens }, () => {
    drawn = (Math.imul(drawn, 1_664_525) + 1_013_904_223) >>> 0;
    return wordIds.from + ((drawn >>> 8) % (wordIds.to - wordIds.from));
  });
}

/** @throws KvError for a request that fails, or is told to come again */
export async function ask(
  url: string,
  kind: Timed['kind'],
  prompt: readonly number[],
  answerTokens: number,
): Promise<Timed> {
  const answer = await askUnlessRefused(url, kind, prompt, answerTokens);
  if ('refused' in answer) throw new KvError('REQUEST', `${url}: 429 ${answer.refused}`);
  return answer;
}

/**
 * `wantedMs`: by when its first token is wanted, which the coordinator is told; `limitMs`: after which it has failed.
 * @throws KvError for a request that fails, or whose answer is not whole
 */
export async function askUnlessRefused(
  url: string,
  kind: Timed['kind'],
  prompt: readonly number[],
  answerTokens: number,
  { wantedMs, limitMs = usualLimitMs }: { readonly wantedMs?: number; readonly limitMs?: number } = {},
): Promise<Timed | Refused> {
  const begin = performance.now();
  const options = { stream: true, return_token_ids: true, ignore_eos: true, temperature: 0 };
  const wanted = wantedMs === undefined ? {} : { 'x-slo-ttft-ms': String(wantedMs) };
  const response = await fetch(`${url}/v1/completions`, {
    method: 'POST',
    headers: { 'content-type': 'application/json', ...wanted },
    body: JSON.stringify({ prompt, max_tokens: answerTokens, ...options }),
    signal: AbortSignal.timeout(limitMs),
  });
  if (response.status === 429 && response.headers.has('retry-after')) return { refused: await response.text() };
  if (response.status !== 200) throw new KvError('REQUEST', `${url}: ${response.status} ${await response.text()}`);
  let [ttftMs, lastMs, given] = [0, 0, 0];
  let isWhole = false;
  const gapsMs: number[] = [];
  let rest = '';
  let last: NonNullable<Chunk['kvtier']> = {};
  const decoder = new TextDecoder();
  for await (const bytes of response.body!) {
    const lines = (rest + decoder.decode(bytes, { stream: true })).split('\n');
    rest = lines.pop()!;
    for (const line of lines) {
      isWhole ||= line === 'data: [DONE]';
      if (!line.startsWith('data: {')) continue;
      const { choices, error, kvtier } = JSON.parse(line.slice(6)) as Chunk;
      if (kvtier) last = kvtier;
      if (error) throw new KvError('REQUEST', `${url}: ${error.message}`);
      const ids = choices?.[0]?.token_ids ?? [];
      if (ids.length === 0) continue;
      given += ids.length;
      const nowMs = performance.now();
      if (ttftMs === 0) ttftMs = nowMs - begin;
      else gapsMs.push(nowMs - lastMs);
      lastMs = nowMs;
    }
  }
  if (!isWhole || given !== answerTokens)
    throw new KvError('REQUEST', `${url}: the answer broke off, ${given} of ${answerTokens} tokens came`);
  const wholeMs = performance.now() - begin;
  const header = (name: string): string => response.headers.get(name) ?? '';
  const [decision, degraded] = [header('x-kvtier-handoff'), header('x-kvtier-degraded')];
  const madeOf = partsOf(ttftMs, last);
  return { kind, tokens: prompt.length, ttftMs, gapsMs, wholeMs, decision, degraded, madeOf };
}

/** `rest`: what no part explains, the way to the coordinator and back among it. */
function partsOf(ttftMs: number, last: NonNullable<Chunk['kvtier']>): Timed['madeOf'] {
  const { hand_off: split } = last;
  const madeOf: Record<string, number> = {};
  let rest = ttftMs;
  const isEarly = split?.first_token_by === 'prefill';
  for (const [at, part] of (split === undefined ? aloneParts : splitParts).entries()) {
    const us = (split ?? last)[`${part}_us`];
    madeOf[part] = typeof us === 'number' ? us / 1_000 : 0;
    if (!isEarly || at < earlyParts) rest -= madeOf[part];
  }
  return { ...madeOf, rest };
}

/** In one line, whole milliseconds; of several the mean of each part. */
export function saysParts(all: readonly Timed[]): string {
  const names = Object.keys(all[0]?.madeOf ?? {});
  const mean = (name: string): number => all.reduce((sum, { madeOf }) => sum + (madeOf[name] ?? 0), 0) / all.length;
  return names.map((name) => `${name} ${mean(name).toFixed(0)}`).join(' + ');
}

/** Both kinds at their rates a second, as a Poisson process each, for `durationMs`: the same for the same seed, whoever serves it. */
export function arrivals(perS: Readonly<Record<Timed['kind'], number>>, durationMs: number, seed: number): Arrival[] {
  const all: Arrival[] = [];
  for (const [at, kind] of (['stream', 'prompt'] as const).entries()) {
    const random = randomOf(seed * 2 + at);
    for (let atMs = 0; perS[kind] > 0; ) {
      atMs -= (Math.log(1 - random()) / perS[kind]) * 1_000;
      if (atMs >= durationMs) break;
      all.push({ kind, atMs });
    }
  }
  return all.sort((a, b) => a.atMs - b.atMs);
}

/** mulberry32. */
function randomOf(seed: number): () => number {
  let state = seed >>> 0;
  return () => {
    state = (state + 0x6d2b79f5) >>> 0;
    let z = Math.imul(state ^ (state >>> 15), state | 1);
    z ^= z + Math.imul(z ^ (z >>> 7), z | 61);
    return ((z ^ (z >>> 14)) >>> 0) / 2 ** 32;
  };
}

/** Sends each when it is due, however slowly those before are served; resolves when all have ended. */
export async function mixedLoad(url: string, shape: LoadShape, due: readonly Arrival[]): Promise<Timed[]> {
  const begin = performance.now();
  return Promise.all(
    due.map(async ({ kind, atMs }) => {
      await new Promise((resolve) => setTimeout(resolve, begin + atMs - performance.now()));
      return kind === 'stream'
        ? ask(url, kind, freshPrompt(shape.streamTokens), shape.answerTokens)
        : ask(url, kind, freshPrompt(shape.promptTokens), shape.promptAnswerTokens);
    }),
  );
}

export function percentile(values: readonly number[], share: number): number {
  const sorted = [...values].sort((a, b) => a - b);
  return sorted[Math.min(sorted.length - 1, Math.floor(share * sorted.length))] ?? Number.NaN;
}
