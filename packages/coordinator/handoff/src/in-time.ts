/**
 * Whether a request's first token comes in time at the pod that was chosen for it, by what is predicted and by how much later than that
 * nine in ten of that pod's came of late. For pods with OpenAI's API, whichever way their requests come in; for our own workers
 * `HandOffs` does it, which knows both ways that a prompt may be computed.
 */
import { Saturated } from '@kvtier/dispatch';
import { LatestOfWorkers, type Whose } from './late.ts';

/** A request's target; undefined: it has none, and is served however late. */
export interface Wanted {
  readonly model: string;
  /** performance.now() of its arrival. */
  readonly arrivedMs: number;
  readonly ttftMs: number | undefined;
}

const mostLateS = 0.5;
/** What was learned is believed half after so many targets without anything new. */
const believedTargets = 4;

export class InTime {
  readonly #latest = new LatestOfWorkers(mostLateS);
  readonly #onRefused: () => void;

  constructor(onRefused: () => void = () => {}) {
    this.#onRefused = onRefused;
  }

  /** `predictedS`: from now to its first token, at this worker. @throws Saturated: that is too late; it says when to come again */
  admit({ model, arrivedMs, ttftMs }: Wanted, worker: string, predictedS: number, nowMs = performance.now()): void {
    if (ttftMs === undefined) return;
    const comesS = predictedS + this.#latest.s({ model, worker }, predictedS, nowMs, believedTargets * ttftMs);
    const lateS = (nowMs - arrivedMs) / 1_000 + comesS - ttftMs / 1_000;
    if (lateS <= 0) return;
    this.#onRefused();
    const late = `its first token would come ${(lateS * 1_000).toFixed(0)} ms after the ${ttftMs} ms that it may take`;
    throw new Saturated(`model ${model}: ${late} (worker ${worker}); try again later`, lateS);
  }

  /** The first token of one that was predicted to take so long came after `seenS`, from this worker. */
  came(predictedS: number, seenS: number, of: Whose, nowMs = performance.now()): void {
    this.#latest.came(of, predictedS, seenS, nowMs);
  }
}
