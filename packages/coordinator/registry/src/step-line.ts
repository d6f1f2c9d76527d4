/**
 * How long a step of a pod takes, by the requests that run: the line through what its scrapes show, of many pods of one model together.
 *
 *     one scrape ─► (requests that ran, seconds between two tokens) ─► sums of its pod, old ones forgotten
 *     each pod about its own mean, all added up      ─┐
 *     where that says nothing: all pods on one line  ─┴─► seconds that a request adds
 *
 * Pods may be of unequal speed, and the fast ones have more requests: one line through all of them would then say that more requests make
 * steps shorter. About their own means they agree. A pod that always has as many requests says nothing so; then few here and many there are
 * believed, as far as they say that requests add something.
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

  get slope(): number {
    return StepLine.slopeOf([this]);
  }

  /** Seconds that a request adds, above 0: one that adds nothing that can be measured counts as nearly nothing. 0: not known. */
  static slopeOf(lines: readonly StepLine[]): number {
    const all = new StepLine();
    let [spread, together] = [0, 0]; // about each line's own mean
    for (const line of lines) {
      if (line.#weight === 0) continue;
      all.#weight += line.#weight;
      all.#n += line.#n;
      all.#nn += line.#nn;
      all.#y += line.#y;
      all.#ny += line.#ny;
      spread += line.#nn - line.#n ** 2 / line.#weight;
      together += line.#ny - (line.#n * line.#y) / line.#weight;
    }
    const samples = all.#weight;
    if (samples < leastSamples) return 0;
    const [mean, meanS] = [all.#n / samples, all.#y / samples];
    const least = Math.max(leastSpread, leastShare * mean) ** 2 * samples;
    const within = (slope: number): number => Math.min(Math.max(slope, meanS * leastSlope), meanS / mean);
    if (spread >= least) return within(together / spread);
    const wide = all.#nn - mean * all.#n;
    const slope = (all.#ny - mean * all.#y) / wide;
    return wide >= least && slope > 0 ? within(slope) : 0;
  }
}

/** What one more scrape leaves of those before it: half of them are of the last three minutes. */
const keep = 0.999;
const leastSamples = 8;
/** Of the requests that ran, their standard deviation: less says nothing of a line, but for noise. */
const [leastSpread, leastShare] = [0.25, 0.03];
/** Of a step. */
const leastSlope = 1e-4;
