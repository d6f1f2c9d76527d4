/**
 * Whether a prompt is computed by a prefill pod, or by the decode pod that will give the answer; pure.
 *
 *     here  = decode's work ahead + uncached ÷ decode's rate
 *     there = prefill's work ahead + uncached ÷ prefill's rate
 *     split, if uncached ≥ minUncachedTokens and there ≤ here + held up × patience and there ≤ prefillMs
 *
 * `held up` are the seconds for which the answers that run on the decode pod would wait for this prompt: uncached ÷ decode's rate, or 0
 * where none runs. As in the rules that others use (docs/handoff.md), a short rest is not worth a second pod, and a prefill pod with a
 * queue is worse than none; here both are one comparison of times. A leg that would be cut before the prompt is computed is worth nothing
 * to anybody: the prompt would be computed twice.
 *
 * What is cached counts as the KV index says it: on the decode pod, and what it can have brought from the store behind both.
 */
import type { PodHandOffConfig } from '@kvtier/config';

/** Of one pod, at this moment. */
export interface PodWork {
  /** Seconds of work that it has. */
  readonly aheadS: number;
  /** As measured, or as usual for its model. Above 0. */
  readonly prefillTokensPerS: number;
}

export interface SplitFigures {
  readonly tokens: number;
  /** Of these, what the decode pod would have to compute. */
  readonly uncachedTokens: number;
  /** `running`: answers that it gives now. */
  readonly decode: PodWork & { readonly running: number };
  /** The prefill pod with the least ahead; undefined: none takes requests now. */
  readonly prefill: PodWork | undefined;
}

export interface Decision {
  readonly split: boolean;
  /** short: not worth it. busy: prefill would be slower, or not done in time. nobody: it is worth it, and no prefill pod takes requests. worth: it is. */
  readonly reason: 'short' | 'busy' | 'nobody' | 'worth';
  /** Seconds until the prompt is computed at the prefill pod, for one that is split. */
  readonly thereS: number | undefined;
  /** The figures in one short line, printable ASCII. */
  readonly why: string;
}

export type SplitLimits = Pick<PodHandOffConfig, 'minUncachedTokens' | 'patience' | 'prefillMs'>;

export function decideSplit(figures: SplitFigures, { minUncachedTokens, patience, prefillMs }: SplitLimits): Decision {
  const { tokens, uncachedTokens, decode, prefill } = figures;
  const uncached = `${uncachedTokens} of ${tokens} tokens uncached`;
  if (uncachedTokens < minUncachedTokens)
    return { split: false, reason: 'short', thereS: undefined, why: `${uncached}, below ${minUncachedTokens}` };
  if (prefill === undefined)
    return { split: false, reason: 'nobody', thereS: undefined, why: `${uncached}, no prefill pod takes requests` };
  const heldUpS = decode.running > 0 ? uncachedTokens / decode.prefillTokensPerS : 0;
  const hereS = decode.aheadS + uncachedTokens / decode.prefillTokensPerS;
  const thereS = prefill.aheadS + uncachedTokens / prefill.prefillTokensPerS;
  const isCut = thereS * 1_000 > prefillMs;
  const split = !isCut && thereS <= hereS + heldUpS * patience;
  const held = decode.running > 0 ? `, holds up ${decode.running} answers for ${ms(heldUpS)} ms` : '';
  const why = `${uncached}, there ${ms(thereS)} ms${isCut ? `, above ${prefillMs}` : ''}, here ${ms(hereS)} ms${held}`;
  return { split, reason: split ? 'worth' : 'busy', thereS: split ? thereS : undefined, why };
}

const ms = (seconds: number): string => (seconds * 1_000).toFixed(0);
