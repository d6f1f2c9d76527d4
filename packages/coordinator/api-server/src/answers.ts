/**
 * The answers of one HTTP request: prompts × n calls to workers at once (answer.ts: one of them).
 *
 * Invariant: when this returns or throws, no call of the request is still running at a worker, and none is counted on one. The first
 * failure that is final cancels the others.
 */
import { setMaxListeners } from 'node:events';
import { setImmediate } from 'node:timers/promises';
import { Answer } from './answer.ts';
import type { AnswersListener, Plan, Totals, Workplace } from './plan.ts';

/** Token ids written to the engine in one turn of the event loop; a longer prompt takes one for itself. */
const tokensPerTurn = 65_536;
/** What it takes to begin a call, in tokens that are written meanwhile: 16 calls a turn. */
const callTokens = 4_096;

/** Runs all answers. @throws KvError (Outdated: its tokens are to be made anew), HttpError, or what the listener threw */
export async function runAnswers(
  place: Workplace,
  plan: Plan,
  signal: AbortSignal,
  listener: AnswersListener,
): Promise<Totals> {
  const totals: Totals = {
    promptTokens: plan.prompts.reduce((sum, prompt) => sum + prompt.length, 0),
    completionTokens: 0,
    cachedTokens: 0,
    tokensByTier: {},
    queueUs: 0,
    loadUs: 0,
    prefillUs: 0,
    moves: 0,
  };
  if (plan.prompts.length * plan.params.n === 1) {
    await new Answer(place, plan, 0, 0, totals, listener).run(signal);
    return totals;
  }
  const siblings = new AbortController();
  const either = AbortSignal.any([signal, siblings.signal]);
  setMaxListeners(plan.prompts.length * plan.params.n * 4, either); // each answer listens
  let failure: { readonly error: unknown } | undefined;
  const run = async (promptIndex: number, answer: number): Promise<void> => {
    try {
      await new Answer(place, plan, promptIndex, answer, totals, listener).run(either);
    } catch (error) {
      failure ??= { error };
      siblings.abort(error);
    }
  };
  const runs: Promise<void>[] = [];
  let encoded = 0;
  for (const [promptIndex, prompt] of plan.prompts.entries()) {
    for (let answer = 0; answer < plan.params.n; answer++) {
      if (encoded >= tokensPerTurn) {
        await setImmediate();
        encoded = 0;
      }
      if (either.aborted) break;
      encoded += callTokens + prompt.length;
      runs.push(run(promptIndex, answer));
    }
  }
  if (either.aborted) failure ??= { error: either.reason };
  await Promise.all(runs);
  if (failure) throw failure.error;
  return totals;
}
