/**
 * What the answers of one HTTP request are made of: prompts, parameters, where they come from, what is told of them, and what an engine
 * worker is asked for each of them.
 */
import { randomBytes } from 'node:crypto';
import type { Choice, Dispatch, Targets } from '@kvtier/dispatch';
import type { HandedOff, HandOffs, InTime, Took } from '@kvtier/handoff';
import type { Keys } from '@kvtier/kv-index';
import type { PodHandOff } from '@kvtier/pod-handoff';
import type { GenerateRequest } from '@kvtier/wire/grpc';
import type { Engines } from './engines.ts';
import type { Expected } from './expected.ts';
import type { Model } from './models.ts';
import type { GenerationParams } from './params.ts';
import type { TryLimits } from './tries.ts';
import type { TokenIds } from './understand.ts';

export type FinishReason = 'stop' | 'length';

/** What an answer grew by. */
export interface Delta {
  /** Index of the answer: prompt index × n + number of the answer to it. */
  readonly index: number;
  readonly text: string;
  /** The engine's tokens of this delta, with one that ended the answer. */
  readonly tokenIds: readonly number[];
  /** The first of its answer. */
  readonly first: boolean;
  readonly finishReason: FinishReason | null;
}

/** Sums over all answers; a prompt with several answers counts once. */
export interface Totals {
  promptTokens: number;
  completionTokens: number;
  cachedTokens: number;
  readonly tokensByTier: Record<string, number>;
  queueUs: number;
  loadUs: number;
  prefillUs: number;
  /** Of a split prompt; of several, of the last. */
  handOff?: Took;
  /** Answers that had begun and went on at another worker, so often. */
  moves: number;
}

export interface Plan {
  readonly requestId: string;
  /** W3C's, of the client. */
  readonly traceparent: string | undefined;
  readonly model: Model;
  readonly prompts: readonly TokenIds[];
  /** Of each prompt. */
  readonly keys: readonly Keys[];
  readonly params: GenerationParams;
  readonly defaultMaxTokens: number;
  /** performance.now() */
  readonly arrivedMs: number;
  readonly targets: Targets;
}

/** Where answers come from. */
export interface Workplace {
  readonly dispatch: Dispatch;
  readonly engines: Engines;
  /** Has other workers compute prompts where that pays; undefined: nobody does. */
  readonly handOffs: Pick<HandOffs, 'follow'> | undefined;
  readonly tries: TryLimits;
  readonly expected: Expected;
  /** Prefill and decode apart, for pods with OpenAI's API; and which of their requests would be answered too late. */
  readonly pods: PodHandOff;
  readonly inTime: Pick<InTime, 'admit' | 'came'>;
  /** Names of the only workers that get this model's requests; undefined: all that serve it. */
  among(model: string): ReadonlySet<string> | undefined;
}

export interface AnswersListener {
  /** Awaited, so a slow reader slows the worker's stream and nothing piles up here. */
  delta(delta: Delta): void | Promise<void>;
  /** A worker was chosen; `moved`: for an answer that has begun elsewhere. */
  chosen(choice: Choice, moved: boolean): void;
  /** Who computes the chosen worker's prompt; told again when that changes. */
  handedOff(choice: Choice, state: HandedOff): void;
  /** The chosen worker failed; the answer is tried at another. */
  retried(error: unknown, choice: Choice): void;
}

/** `answer`: number among the answers to its prompt. Each draws from its own seed; the first from the one given. */
export function engineRequest(plan: Plan, prompt: TokenIds, index: number, answer: number): GenerateRequest {
  const { sampling, maxTokens } = plan.params;
  const room = plan.model.maxModelTokens - prompt.length;
  return {
    requestId: index === 0 ? plan.requestId : `${plan.requestId}-${index}`,
    promptTokenIds: prompt as unknown as number[], // it is only read, id by id
    maxTokens: maxTokens ?? Math.min(plan.defaultMaxTokens, room),
    temperature: sampling.temperature,
    topK: sampling.topK,
    topP: sampling.topP,
    seed: seedOf(sampling, answer),
    ignoreEos: sampling.ignoreEos,
    stopTokenIds: [...sampling.stopTokenIds],
    cacheSalt: sampling.cacheSalt,
    kvCacheReportMode: sampling.kvCacheReportMode,
    loraName: '',
    traceparent: plan.traceparent,
  };
}

/** Whatever is drawn has a seed, so that any worker can go on with it; what is greedy needs none. */
function seedOf({ seed, temperature }: GenerationParams['sampling'], answer: number): bigint | undefined {
  if (seed !== undefined) return derivedSeed(seed, answer);
  return temperature === 0 ? undefined : randomBytes(8).readBigUInt64LE();
}

/** Far apart for neighbouring answers (the step of SplitMix64). */
const derivedSeed = (seed: number, answer: number): bigint =>
  BigInt.asUintN(64, BigInt(seed) + BigInt(answer) * 0x9e3779b97f4a7c15n);
