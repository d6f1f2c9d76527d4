/**
 * Which request must begin now, or it is under way alone after all others. In front of busy workers short prompts go first, and a long prompt
 * or a long answer that was behind them all would end last by as much as it is longer: of work that is given, nothing else decides when all
 * is done (Graham 1969: the longest first).
 *
 *     takes = its prompt + its answer, a step a token            begins now, if   takes > 5 × max(left, queued)
 *     left = of what was begun, until the last of it ends                  and   its prompt < 32 × queued
 *     queued = until all others that wait are given
 *
 * All at best. By the first factor few begin before their turn: one that does makes what is left so much longer. By the second nobody is kept
 * waiting by a prompt that would begin soon after all others. Once nobody comes any more, who is alone at the end is known: then the longest
 * begins where its prompt takes longer than `queued`.
 */
import type { WorkerState } from './policy.ts';

const longerBy = 5;
const soon = 32;

export class LongestRequest {
  /** Until when something that was begun runs at best. */
  #untilMs = 0;
  /** Of one token, at best. */
  #tokenMs = 0;

  /** Its prompt takes so long on one of these workers, and its answer has so many tokens. */
  begins(promptMs: number, tokens: number, workers: readonly WorkerState[], nowMs: number): void {
    let stepsS = 0;
    for (const { stepS, stepPerRequestS, running } of workers) stepsS += stepS + running * stepPerRequestS;
    this.#tokenMs = (1000 * stepsS) / workers.length;
    this.#untilMs = Math.max(this.#untilMs, nowMs + this.takesMs(promptMs, tokens));
  }

  /** How long a token takes is known from the first one on that began. */
  takesMs(promptMs: number, tokens: number): number {
    return promptMs + tokens * this.#tokenMs;
  }

  mustBegin(promptMs: number, tokens: number, queuedMs: number, nowMs: number, haveEnded: boolean): boolean {
    const leftMs = Math.max(this.#untilMs - nowMs, queuedMs);
    const takesMs = this.takesMs(promptMs, tokens);
    return haveEnded ? promptMs > queuedMs : takesMs > longerBy * leftMs && promptMs < soon * queuedMs;
  }
}
