/**
 * Which answer must begin now, or it runs on alone after all others. In front of busy workers short prompts go first, and a long answer
 * that was behind them all would end last by as much as it is longer: of work that is given, nothing else decides when all is done
 * (Graham 1969: the longest first).
 *
 *     begins now, if   answer > 1.1 × max(what is left of the longest answer that was begun, what is queued)
 *
 * Times at best: a step a token. By the tenth, one that begins before its turn makes the longest so much longer that few do.
 */
import type { WorkerState } from './policy.ts';

const longerBy = 1.1;

export class LongestAnswer {
  /** Until when some answer that was begun runs at best. */
  #untilMs = 0;
  /** Of one token, at best. */
  #tokenMs = 0;

  /** An answer of so many tokens begins on one of these workers. */
  begins(tokens: number, workers: readonly WorkerState[], nowMs: number): void {
    let stepsS = 0;
    for (const { stepS, stepPerRequestS, running } of workers) stepsS += stepS + running * stepPerRequestS;
    this.#tokenMs = (1000 * stepsS) / workers.length;
    this.#untilMs = Math.max(this.#untilMs, nowMs + tokens * this.#tokenMs);
  }

  /** `queuedMs`: until all that wait are given. */
  mustBegin(tokens: number, queuedMs: number, nowMs: number): boolean {
    const leftMs = Math.max(this.#untilMs - nowMs, queuedMs);
    return tokens * this.#tokenMs > longerBy * leftMs;
  }
}
