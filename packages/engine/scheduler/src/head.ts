/**
 * A hit that comes from both ends: its head is computed by steps while what lies behind is loaded (the planner's `both-ends.ts` says
 * where they meet, and whether it pays).
 *
 *     chain   | cached here | head: computed      | loaded meanwhile      | held nowhere
 *                             computedTokens ──▶  endTokens ── skips ──▶
 *
 * Invariant: until the load has ended its blocks belong to the connector. No step writes to them, none looks at them, and nobody finds
 * them; only when head and load are both over the request passes over what has come.
 */
export class Head {
  /** Tokens before the load's first block: no step computes beyond. */
  readonly endTokens: number;
  /** That the load brings, as far as is known: what need not be computed. */
  awaitedTokens: number;
  /** What it has brought; undefined until it is over. */
  loadedTokens: number | undefined;
  /** The connector has not ended the load in time: the request leaves its blocks to it as soon as no step uses them. */
  isOverdue = false;
  /** When all of the head was computed and the load was not over yet: what follows is time spent on the load. */
  waitsSinceUs: number | undefined;

  constructor(endTokens: number, awaitedTokens: number) {
    this.endTokens = endTokens;
    this.awaitedTokens = awaitedTokens;
  }

  get isLoading(): boolean {
    return this.loadedTokens === undefined;
  }

  /** The load is over, and brought so much. */
  loaded(tokens: number): void {
    this.loadedTokens = tokens;
    this.awaitedTokens = tokens;
  }
}
