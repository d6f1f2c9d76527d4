/**
 * Probes: now and then the end of a hit is computed although all of it could be loaded sooner, because how long computing takes is only
 * learned by computing. An engine that imports whatever it is asked would never see that it has become the faster of both.
 *
 * As much is computed as one step takes, not the whole prompt: the model of steps (compute-model.ts) knows the rest from it. What probes cost together is bounded, by the planner's own numbers, for prompts that look
 * about as far back (`reachOf`):
 *
 *     Σ (time with a probe - time without)  ≤  first look + costShare × Σ time of plans
 *
 * so that a probe that costs nearly nothing comes often, and one that costs as much as a load after 64 of them. The first look
 * is where nothing of that length has been computed yet: it is on credit. This is the budgeted form of exploration in bandits (the cost
 * of a look is its regret); fixed pauses cost a quarter of all prompts' time where few prompts come in a process' first minute.
 */
import { type ComputeModel, reaches, reachOf } from './compute-model.ts';
import { nothingAway, type Plan } from './plan.ts';

/** What probes may cost, of what all plans of that reach cost. */
const costShare = 1 / 64;
/** What was learned by a step is believed for so long. */
const freshMs = 1_000;
/** Where loading is so much faster than computing, nothing that a probe may find would change it. */
const clearlyFaster = 10;
/** Where it is not this much faster, a smaller step might decide wrongly: it costs more a token than the whole would. */
const near = 3;
/** Where it is, or before the first step that says anything: so many tokens, and no more than this share of a hit. */
const fewTokens = 96;
const fewShare = 1 / 3;

interface Reach {
  /** Steps seen that looked as far back, and since when they are so many. */
  steps: number;
  sinceMs: number;
  /** When there was a probe last. */
  probedMs: number;
  /** What a probe may cost now; below zero after one on credit. */
  allowedUs: number;
}

export class Probes {
  readonly #compute: ComputeModel;
  readonly #blockTokens: number;
  readonly #reaches = Array.from({ length: reaches }, (): Reach => {
    return { steps: 0, sinceMs: Number.NEGATIVE_INFINITY, probedMs: Number.NEGATIVE_INFINITY, allowedUs: 0 };
  });

  constructor(compute: ComputeModel, blockTokens: number) {
    this.#compute = compute;
    this.#blockTokens = blockTokens;
  }

  /** @param plan loads all blocks of a hit, which begins with block `first` of the chain, some of them from elsewhere */
  next(plan: Plan, first: number, nowMs: number): Plan {
    const probe = this.#probeOf(plan, first);
    if (probe === undefined) return plan;
    const planUs = plan.loadUs + plan.computeUs;
    const costUs = Math.max(0, probe.loadUs + probe.computeUs - planUs);
    const middle = this.#seen(reachOf((first + plan.blocks / 2) * this.#blockTokens), nowMs);
    // What a probe tells: the end of a prompt looks further back than its middle.
    const end = this.#seen(reachOf((first + plan.blocks) * this.#blockTokens - fewTokens / 2), nowMs);
    const isUnseen = middle.steps + end.steps === 0;
    const learnedMs = Math.max(middle.probedMs, middle.sinceMs, end.sinceMs);
    middle.allowedUs = Math.min(middle.allowedUs + costShare * planUs, costUs);
    if (nowMs - learnedMs < freshMs || middle.allowedUs < (isUnseen ? 0 : costUs)) return plan;
    middle.allowedUs -= costUs;
    middle.probedMs = nowMs;
    return { ...probe, isProbe: true };
  }

  #seen(reach: number, nowMs: number): Reach {
    const seen = this.#reaches[reach]!;
    const steps = this.#compute.stepsOf(reach);
    if (steps !== seen.steps) {
      seen.steps = steps;
      seen.sinceMs = nowMs;
    }
    return seen;
  }

  /** The plan with an end that is computed; undefined where it would tell nothing. */
  #probeOf(plan: Plan, first: number): Plan | undefined {
    const allUs = this.#us(plan.blocks, first);
    if (allUs === undefined) return undefined; // nothing has been computed at all: a start should not wait
    const faster = allUs / (plan.loadUs + plan.computeUs);
    const isBegun = this.#compute.steps > 0;
    if (!isBegun || faster > near) {
      const few = Math.ceil(fewTokens / this.#blockTokens);
      if (few > plan.blocks * fewShare || (isBegun && faster > clearlyFaster)) return undefined;
      return this.#without(few, plan, first);
    }
    const whole = { head: 0, blocks: 0, loadUs: 0, computeUs: allUs, away: nothingAway };
    // Steps of so few tokens may have been probes themselves: how large a prompt's are is not known.
    if (this.#compute.stepTokens <= 2 * fewTokens) return whole;
    // With what follows the hit it is one step still.
    const step = Math.max(1, Math.floor(this.#compute.stepTokens / this.#blockTokens) - 1);
    const part = step < plan.blocks ? this.#without(step, plan, first) : undefined;
    return part !== undefined && part.loadUs + part.computeUs < allUs ? part : whole;
  }

  /** The plan without its last `probe` blocks. */
  #without(probe: number, plan: Plan, first: number): Plan {
    const blocks = plan.blocks - probe;
    const computeUs = this.#us(probe, first + blocks) ?? 0;
    const awayBlocks = Math.max(0, plan.away.blocks - probe);
    const away = { ...plan.away, blocks: awayBlocks, us: (plan.away.us * awayBlocks) / plan.away.blocks };
    return { head: 0, blocks, loadUs: (plan.loadUs * blocks) / plan.blocks, computeUs, away };
  }

  #us(blocks: number, first: number): number | undefined {
    return this.#compute.us(first * this.#blockTokens, (first + blocks) * this.#blockTokens);
  }
}
