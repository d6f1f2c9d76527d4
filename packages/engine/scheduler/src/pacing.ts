/**
 * How much of a prompt goes into a step that streams wait for. A stream that says what may be between two of its tokens gets a step of
 * that length: what its decoding leaves of it is the prompts'.
 *
 *     tokens = trust × max(target - step of so many streams, target ÷ 4) × prefill rate        at least one block
 *
 * Rates are means: a chunk far down a prompt takes longer than one at its start, and a machine that is busy longer than an idle one. So
 * a step that took longer than its target makes the next ones shorter, and each that did not a little longer again, so that 99 of 100
 * keep it: a stream whose tokens are in time but for one is late.
 *
 * A prompt gets a quarter of the target whatever the streams take, so that it ends. Where decoding alone takes longer than the target,
 * prompts are not what is too slow, and nothing is held back; nor is it while no rate is known.
 */
import type { Share } from './batch.ts';
import type { EngineLoad } from './engine-load.ts';

/** Of what is left of the target. */
const [mostTrust, leastTrust] = [0.9, 0.5];
const leastShare = 1 / 4;
const inTime = 0.99;
/** Of the trust: a step that is late takes so much, and those that are not give it back, as many as should be for each that is. */
const lateCosts = 0.06;
/** Of the tokens that it may have: a step with fewer says nothing. */
const full = 3 / 4;

export class Pace {
  #trust = mostTrust;
  /** Of the step that was put together last; infinite: nobody asked for anything. */
  #targetS = Number.POSITIVE_INFINITY;
  #tokens = Number.POSITIVE_INFINITY;

  /** Of what is left of a target, the share that prompts get now. */
  get trust(): number {
    return this.#trust;
  }

  /** Prompt tokens that the step may have beside what decodes in it already. */
  promptTokens(decoding: readonly Share[], load: EngineLoad, blockTokens: number): number {
    let betweenMs = Number.POSITIVE_INFINITY;
    for (const { request } of decoding) {
      const target = request.params.betweenMs ?? 0;
      if (target > 0 && target < betweenMs) betweenMs = target;
    }
    this.#targetS = betweenMs / 1000;
    this.#tokens = this.#allowed(decoding.length, load, blockTokens);
    return this.#tokens;
  }

  #allowed(decodes: number, load: EngineLoad, blockTokens: number): number {
    const targetS = this.#targetS;
    const perS = load.prefillTokensPerS;
    const decodingS = load.decodingS(decodes);
    if (!Number.isFinite(targetS) || perS === 0 || decodingS >= targetS) return Number.POSITIVE_INFINITY;
    const leftS = Math.max(targetS - decodingS, targetS * leastShare);
    return Math.max(Math.floor(this.#trust * leftS * perS), blockTokens);
  }

  /** That step has ended, with so many prompt tokens. */
  ended(promptTokens: number, seconds: number): void {
    if (!Number.isFinite(this.#tokens) || promptTokens < full * this.#tokens) return;
    const by = seconds > this.#targetS ? 1 - lateCosts : 1 + (lateCosts * (1 - inTime)) / inTime;
    this.#trust = Math.min(Math.max(this.#trust * by, leastTrust), mostTrust);
  }
}
