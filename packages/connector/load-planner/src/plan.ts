/** What the planner is told of a hit, and what it says of it. */
/** In chain order; counts sum to the blocks held. */
export interface Span {
  readonly tier: string;
  readonly count: number;
}

/** What is known about a hit. */
export interface Hit {
  readonly spans: readonly Span[];
  /** The node's estimate of the time to bring all of it into its arena. */
  readonly estimatedUs: number;
}

/** A prefix that could be loaded, where not every length can (attention groups with windows). */
export interface LoadChoice {
  /** Of the chain. */
  readonly blocks: number;
  /** Blocks to copy, of all groups together. */
  readonly copies: number;
  /** The node's estimate of the time to bring them into its arena. */
  readonly bringUs: number;
}

export interface Plan {
  /** Blocks in front of those that are loaded, to be computed meanwhile; 0 but for plans from both ends (both-ends.ts). */
  readonly head: number;
  /** Blocks to load, from the first one behind the head on. */
  readonly blocks: number;
  /** Predicted time of the load, 0 when nothing is loaded. */
  readonly loadUs: number;
  /** Predicted time to compute what is not loaded, or of the step behind it; of a head, what it takes beyond the load. */
  readonly computeUs: number;
  /** What of it has to be brought into the arena: the tiers, how many blocks, and how long that will take. */
  readonly away: { readonly tiers: string; readonly blocks: number; readonly us: number };
  /** What is left is computed to learn how long that takes, and not because it would be slower to load. */
  readonly isProbe?: true;
  /** What is held behind it and rather computed: blocks by tier, and how long they would have taken. */
  readonly passed?: { readonly byTier: Readonly<Record<string, number>>; readonly us: number };
}

/** Nothing of a plan has to be brought. */
export const nothingAway: Plan['away'] = { tiers: '', blocks: 0, us: 0 };
