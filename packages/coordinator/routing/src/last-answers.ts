/**
 * Which workers are left to an answer that would run on alone. Once nobody comes any more, what waits is a batch: all is done when the last
 * answer is, and a step that computes prompts takes ten times as long as one that only gives tokens. So a worker whose answer runs on
 * for longer than all others have to do gets no more prompts: the others compute them meanwhile (Jackson 1955: of work with tails, the
 * longest tail decides).
 *
 *     steps  = prompts since it began ÷ those of a full step + other time since ÷ a step that only gives tokens
 *     left   = (tokens − steps) × a step that only gives tokens
 *     others = (what waits + what they have ahead) ÷ how many they are + the longest answer that waits
 *     left to its answer, if   left > others      and no more than a quarter of all are
 *
 * What waits is served by fewer workers from then on, by all but one of eight for instance: so this begins as late as it can, when both would
 * end at once. Tokens at most count as the answer's, of those that wait, too: where all may be as long, none is longer.
 */
import { aheadS, usualStepTokens } from './policies/predicted.ts';
import type { WorkerState } from './policy.ts';

/** Of all workers. */
const mostLeft = 1 / 4;

/** What a worker was given. */
interface Given {
  /** Seconds of prompts in all. */
  promptsS: number;
  /** Its longest answer: tokens, when it begins, and `promptsS` until then. */
  tokens: number;
  beginsMs: number;
  promptsBeforeS: number;
}

export class LastAnswers {
  readonly #given: Given[] = [];

  /** It is given a prompt that takes `promptS`, and an answer of so many tokens that begins after `takesS`. */
  gives(number: number, worker: WorkerState, promptS: number, tokens: number, takesS: number, nowMs: number): void {
    const before = this.#given[number] ?? { promptsS: 0, tokens: 0, beginsMs: nowMs, promptsBeforeS: 0 };
    const promptsS = before.promptsS + promptS;
    this.#given[number] =
      tokens > tokensLeft(before, worker, nowMs)
        ? { promptsS, tokens, beginsMs: nowMs + takesS * 1000, promptsBeforeS: promptsS }
        : { ...before, promptsS };
  }

  /** This number stands for another worker from now on, or for none. */
  left(number: number): void {
    delete this.#given[number];
  }

  /** Nobody comes any more; `queuedS` of prompts wait, and the longest answer among them has so many tokens: the workers that get none. */
  alone(
    workers: readonly (WorkerState | undefined)[],
    queuedS: number,
    longestTokens: number,
    nowMs: number,
  ): number[] {
    let restS = queuedS;
    const answers: { number: number; leftS: number; aheadS: number; tokenS: number }[] = [];
    workers.forEach((worker, number) => {
      if (worker === undefined) return;
      const given = this.#given[number];
      const tokenS = worker.stepS + worker.stepPerRequestS;
      const tokens = given === undefined ? 0 : tokensLeft(given, worker, nowMs);
      answers.push({ number, leftS: tokens * tokenS, aheadS: aheadS(worker), tokenS });
      restS += aheadS(worker);
    });
    answers.sort((a, b) => b.leftS - a.leftS);
    const alone: number[] = [];
    for (const { number, leftS, aheadS, tokenS } of answers) {
      if (alone.length + 1 > answers.length * mostLeft) break;
      const othersS = (restS - aheadS) / (answers.length - alone.length - 1) + longestTokens * tokenS;
      if (leftS <= othersS) break;
      alone.push(number);
      restS -= aheadS;
    }
    return alone;
  }
}

/** Of its longest answer, at most: what it has is known by the steps that it has had time for. */
function tokensLeft({ promptsS, promptsBeforeS, tokens, beginsMs }: Given, worker: WorkerState, nowMs: number): number {
  const { stepS, stepPerRequestS, waiting, running, prefillTokensPerS, maxStepTokens = usualStepTokens } = worker;
  if (waiting + running === 0) return 0;
  const sinceS = Math.max((nowMs - beginsMs) / 1000, 0);
  const promptS = Math.min(Math.max(promptsS - promptsBeforeS - aheadS(worker), 0), sinceS);
  const tokenS = stepS + running * stepPerRequestS;
  const tokenSteps = tokenS > 0 ? (sinceS - promptS) / tokenS : 0;
  return Math.max(tokens - (promptS * prefillTokensPerS) / maxStepTokens - tokenSteps, 0);
}
