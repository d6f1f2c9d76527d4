/**
 * How much of a prompt goes into a step that streams wait for. A stream that says what may be between two of its tokens gets a step of
 * that length: what its decoding leaves of it is the prompts'.
 *
 *     tokens = 0.9 × max(target - step of so many streams, target ÷ 4) × prefill rate        at least one block
 *
 * A prompt gets a quarter of the target whatever the streams take, so that it ends. Where decoding alone takes longer than the target,
 * prompts are not what is too slow, and nothing is held back; nor is it while no rate is known.
 */
import type { Share } from './batch.ts';
import type { EngineLoad } from './engine-load.ts';

/** Rates are means: a chunk far down a prompt takes longer than one at its start. */
const trust = 0.9;
const leastShare = 1 / 4;

/** Prompt tokens that the step may have beside what decodes in it already. */
export function promptTokens(decoding: readonly Share[], load: EngineLoad, blockTokens: number): number {
  let betweenMs = Number.POSITIVE_INFINITY;
  for (const { request } of decoding) {
    const target = request.params.betweenMs ?? 0;
    if (target > 0 && target < betweenMs) betweenMs = target;
  }
  const targetS = betweenMs / 1000;
  const perS = load.prefillTokensPerS;
  const decodingS = load.decodingS(decoding.length);
  if (!Number.isFinite(targetS) || perS === 0 || decodingS >= targetS) return Number.POSITIVE_INFINITY;
  const leftS = Math.max(targetS - decodingS, targetS * leastShare);
  return Math.max(Math.floor(trust * leftS * perS), blockTokens);
}
