/**
 * Prompt tokens that a pod has computed ÷ the time in which it had something to do: no pod is slower than that. Prompts that it computes in
 * one step all count that whole step as theirs (vLLM), so what it measures of each one alone says far too little.
 *
 * A pod counts the tokens of a prompt when all of it is computed. Therefore a time ends with a scrape that shows some, and begins where the
 * one before ended; and several of them are added up, so that a long prompt at the edge of one counts for little.
 */
export class ComputedRate {
  /** Of the last times; a ring. */
  readonly #tokens = new Float64Array(kept);
  readonly #seconds = new Float64Array(kept);
  #taken = 0;
  /** Of the time that has not ended. */
  #openTokens = 0;
  #openS = 0;

  /** 0: not known yet. */
  get tokensPerS(): number {
    if (this.#taken < kept) return 0;
    const sum = (all: Float64Array): number => all.reduce((before, one) => before + one);
    return sum(this.#tokens) / sum(this.#seconds);
  }

  /** Between two scrapes. `isIdle`: it had nothing to do at either. */
  took(tokens: number, seconds: number, isIdle: boolean): void {
    if (!(seconds > 0 && tokens >= 0)) return; // nothing of a counter that went back
    if (tokens === 0 && isIdle) return;
    this.#openTokens += tokens;
    this.#openS += seconds;
    if (tokens === 0 || this.#openS < leastS) return;
    const at = this.#taken % kept;
    this.#tokens[at] = this.#openTokens;
    this.#seconds[at] = this.#openS;
    this.#taken++;
    this.#openTokens = 0;
    this.#openS = 0;
  }
}

const kept = 16;
const leastS = 0.1;
