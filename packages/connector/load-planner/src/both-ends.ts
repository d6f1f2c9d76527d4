/**
 * A hit from both ends: its front is computed while what lies behind is loaded, and neither waits for the other (Cake: S. Jin et al.,
 * "Compute Or Load KV Cache? Why Not Both?", 2024, arXiv:2410.03065). Cake lets both run until they meet; here the meeting place is
 * planned, because a load is one message, and what is measured on the way moves the next one.
 *
 *     cost(head) = max(slowed × compute(head), load(the rest))    falls and rises: the least is where both take as long
 *
 * It pays where link and executor are about as fast: twice as fast as either at best. Steps and loads slow each other down where they
 * share processors or memory; both learn by how much (`observeStep`, and the experience with tiers that are loaded beside steps).
 */
import type { Experiences } from './experience.ts';
import type { Span } from './plan.ts';

/**
 * It costs a step more, others that come meanwhile wait for it, and where loads take processor time themselves, as over fast links, both
 * take longer than alone by more than a few of them tell (prompts of 480 tokens over 10 Gbit/s on two cores: 17 ms for 14): only for so
 * much less than the best of both.
 */
const worthwhile = 0.8;
/** Experience with steps beside which blocks are loaded, against what they were thought to take. */
const stepsBeside = 'steps';

/** Times of the planner's model, µs. */
export interface EndCosts {
  readonly roundTripUs: number;
  /** Of a block in the arena; of one that is brought, or copied meanwhile. */
  readonly copyUs: number;
  readonly awayUs: number;
  /** Of those that are brought, so many are copied when the last one has come. */
  readonly lastCopied: number;
  /** To compute so many blocks of the hit, from its first on. */
  readonly computeUs: (blocks: number) => number;
  /** What is left when all are there. */
  readonly restUs: number;
  /** Of the best plan that does one after the other. */
  readonly bestUs: number;
  /** No load may take longer. */
  readonly mostLoadUs: number;
}

export interface Ends {
  /** Blocks to compute, from the first on; all others are loaded. */
  readonly head: number;
  readonly headUs: number;
  readonly loadUs: number;
  /** Of those that are loaded, those that have to be brought, and their time. */
  readonly away: { readonly blocks: number; readonly us: number };
}

export class BothEnds {
  readonly #experiences: Experiences;

  constructor(experiences: Experiences) {
    this.#experiences = experiences;
  }

  /** A step beside which blocks were loaded was thought to take so long, and took so long. */
  observeStep(thoughtUs: number, tookUs: number, nowMs: number): void {
    if (thoughtUs > 0) this.#experiences.observe(stepsBeside, tookUs / thoughtUs, nowMs);
  }

  /** So many blocks are computed, whatever that takes. */
  at(head: number, spans: readonly Span[], costs: EndCosts): Ends {
    return { head, headUs: costs.computeUs(head), ...loadOf(spans, head, costs) };
  }

  /** The best place to meet; undefined: one after the other is as good. */
  plan(spans: readonly Span[], costs: EndCosts, nowMs: number): Ends | undefined {
    const held = spans.reduce((sum, { count }) => sum + count, 0);
    const slowed = this.#experiences.correction(stepsBeside, 1, nowMs);
    const headUs = (head: number): number => slowed * costs.computeUs(head);
    let low = 1;
    let high = held - 1;
    // The first head that takes as long as the load of what is behind it.
    while (low < high) {
      const middle = Math.floor((low + high) / 2);
      if (headUs(middle) < loadOf(spans, middle, costs).loadUs) low = middle + 1;
      else high = middle;
    }
    let best: Ends | undefined;
    for (const head of [low - 1, low]) {
      if (head < 1 || head >= held) continue;
      const ends = { head, headUs: headUs(head), ...loadOf(spans, head, costs) };
      if (ends.loadUs > costs.mostLoadUs) continue;
      if (best === undefined || longer(ends) < longer(best)) best = ends;
    }
    return best !== undefined && longer(best) + costs.restUs < worthwhile * costs.bestUs ? best : undefined;
  }
}

const longer = ({ headUs, loadUs }: Ends): number => Math.max(headUs, loadUs);

/** The load of all blocks behind the first `head`. */
function loadOf(
  spans: readonly Span[],
  head: number,
  { roundTripUs, copyUs, awayUs, lastCopied }: EndCosts,
): Pick<Ends, 'loadUs' | 'away'> {
  let at = 0;
  let near = 0;
  let blocks = 0;
  for (const { tier, count } of spans) {
    const behind = Math.min(count, Math.max(0, at + count - head));
    at += count;
    if (tier === 'arena') near += behind;
    else blocks += behind;
  }
  const us = blocks * awayUs;
  const loadUs = roundTripUs + near * copyUs + us + Math.min(lastCopied, blocks) * copyUs;
  return { loadUs, away: { blocks, us } };
}
