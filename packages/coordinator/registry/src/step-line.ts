/**
 * How long a step of a pod takes, by the requests that run: the line through what its scrapes show, of many pods of one model together.
 *
 *     one scrape ─► (requests that ran, seconds between two tokens) ─► sums, old ones forgotten ─┐
 *     the other pods of the model ─────────────────────────────────────────────────────► sums ─┴─► seconds that a request adds
 *
 * Sums of several pods add up, so that a model's line is known as soon as any of its pods, or two of them together, had few and many.
 */
export class StepLine {
  #weight = 0;
  #n = 0;
  #nn = 0;
  #y = 0;
  #ny = 0;

  add(requests: number, seconds: number): void {
    this.#weight = this.#weight * keep + 1;
    this.#n = this.#n * keep + requests;
    this.#nn = this.#nn * keep + requests * requests;
    this.#y = this.#y * keep + seconds;
    this.#ny = this.#ny * keep + requests * seconds;
  }

  /** All that another one has seen, too. */
  join(other: StepLine): void {
    this.#weight += other.#weight;
    this.#n += other.#n;
    this.#nn += other.#nn;
    this.#y += other.#y;
    this.#ny += other.#ny;
  }

  /** Seconds that a request adds, above 0: one that adds nothing that can be measured counts as nearly nothing. 0: not known. */
  get slope(): number {
    if (this.#weight < leastSamples) return 0;
    const mean = this.#n / this.#weight;
    const spread = this.#nn / this.#weight - mean * mean;
    if (!(spread >= Math.max(leastSpread, leastShare * mean) ** 2)) return 0;
    const meanS = this.#y / this.#weight;
    const slope = (this.#ny / this.#weight - mean * meanS) / spread;
    return Math.min(Math.max(slope, meanS * leastSlope), meanS / mean);
  }
}

/** What one more scrape leaves of those before it: half of them are of the last three minutes. */
const keep = 0.999;
const leastSamples = 8;
/** Of the requests that ran, their standard deviation: less says nothing of a line, but for noise. */
const [leastSpread, leastShare] = [0.25, 0.03];
/** Of a step. */
const leastSlope = 1e-4;
