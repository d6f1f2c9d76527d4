/** A mixed load on one coordinator: streams that decode all the time, and long prompts that arrive among them. Seeded; timed from here. */
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
  readonly degraded: string;
}

export interface LoadShape {
  /** Streams at a time: so many prompt tokens each, so many tokens of answer. */
  readonly streams: number;
  readonly streamTokens: number;
  readonly answerTokens: number;
  /** Long prompts: tokens, and milliseconds from one to the next in the mean. */
  readonly promptTokens: number;
  readonly everyMs: number;
}

interface Chunk {
  readonly choices?: readonly { readonly token_ids?: readonly number[] }[];
  readonly error?: { readonly message: string };
}

/** Ids of ordinary words in the demo tokenizer. */
const wordIds = { from: 300, to: 1300 };
const limitMs = 120_000;
let drawn = 1 + (Date.now() % 1_000_000);

/** Never the same twice in one run. */
export function freshPrompt(tokens: number): number[] {
  return Array.from({ length: tokens }, () => {
    drawn = (Math.imul(drawn, 1_664_525) + 1_013_904_223) >>> 0;
    return wordIds.from + ((drawn >>> 8) % (wordIds.to - wordIds.from));
  });
}

/** @throws KvError for a request that fails */
export async function ask(
  url: string,
  kind: Timed['kind'],
  prompt: readonly number[],
  answerTokens: number,
): Promise<Timed> {
  const begin = performance.now();
  const options = { stream: true, return_token_ids: true, ignore_eos: true, temperature: 0 };
  const response = await fetch(`${url}/v1/completions`, {
    method: 'POST',
    headers: { 'content-type': 'application/json' },
    body: JSON.stringify({ prompt, max_tokens: answerTokens, ...options }),
    signal: AbortSignal.timeout(limitMs),
  });
  if (response.status !== 200) throw new KvError('REQUEST', `${url}: ${response.status} ${await response.text()}`);
  let [ttftMs, lastMs] = [0, 0];
  const gapsMs: number[] = [];
  let rest = '';
  const decoder = new TextDecoder();
  for await (const bytes of response.body!) {
    const lines = (rest + decoder.decode(bytes, { stream: true })).split('\n');
    rest = lines.pop()!;
    for (const line of lines) {
      if (!line.startsWith('data: {')) continue;
      const { choices, error } = JSON.parse(line.slice(6)) as Chunk;
      if (error) throw new KvError('REQUEST', `${url}: ${error.message}`);
      if ((choices?.[0]?.token_ids ?? []).length === 0) continue;
      const nowMs = performance.now();
      if (ttftMs === 0) ttftMs = nowMs - begin;
      else gapsMs.push(nowMs - lastMs);
      lastMs = nowMs;
    }
  }
  const wholeMs = performance.now() - begin;
  const header = (name: string): string => response.headers.get(name) ?? '';
  const [decision, degraded] = [header('x-kvtier-handoff'), header('x-kvtier-degraded')];
  return { kind, tokens: prompt.length, ttftMs, gapsMs, wholeMs, decision, degraded };
}

/** Runs it for `durationMs`; resolves when all that was begun has ended. */
export async function mixedLoad(url: string, shape: LoadShape, durationMs: number, seed: number): Promise<Timed[]> {
  const all: Timed[] = [];
  const end = performance.now() + durationMs;
  const stream = async (): Promise<void> => {
    while (performance.now() < end)
      all.push(await ask(url, 'stream', freshPrompt(shape.streamTokens), shape.answerTokens));
  };
  const prompts = async (): Promise<void> => {
    const begun: Promise<void>[] = [];
    let state = seed;
    for (;;) {
      state = (Math.imul(state, 1_664_525) + 1_013_904_223) >>> 0;
      const pauseMs = -Math.log(1 - state / 2 ** 32) * shape.everyMs;
      if (performance.now() + pauseMs >= end) break;
      await new Promise((resolve) => setTimeout(resolve, pauseMs));
      begun.push(ask(url, 'prompt', freshPrompt(shape.promptTokens), 8).then((timed) => void all.push(timed)));
    }
    await Promise.all(begun);
  };
  await Promise.all([prompts(), ...Array.from({ length: shape.streams }, stream)]);
  return all;
}

export function percentile(values: readonly number[], share: number): number {
  const sorted = [...values].sort((a, b) => a - b);
  return sorted[Math.min(sorted.length - 1, Math.floor(share * sorted.length))] ?? Number.NaN;
}
