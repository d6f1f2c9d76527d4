/** A straight line through samples that fade: y = base + slope × x, least squares; nothing below zero. */

/** Where samples all have about the same x, base and slope cannot be told apart: all is base. */
const leastSpread = 0.01;

export interface Line {
  readonly base: number;
  readonly slope: number;
}

/** The line that these sums of weights w are best met by; all zero without samples. */
export function lineOf(w: number, wx: number, wxx: number, wy: number, wxy: number): Line {
  if (!(w > 0)) return { base: 0, slope: 0 };
  const spread = w * wxx - wx * wx;
  const base = (wy * wxx - wxy * wx) / spread;
  const slope = (wxy * w - wy * wx) / spread;
  if (spread < leastSpread * w * wxx || !(slope > 0)) return { base: wy / w, slope: 0 };
  return base > 0 ? { base, slope } : { base: 0, slope: wxy / wxx };
}

export class FadingLine {
  readonly #keep: number;
  #w = 0;
  #wx = 0;
  #wxx = 0;
  #wy = 0;
  #wxy = 0;
  #line: Line = { base: 0, slope: 0 };

  /** @param keep of what is remembered at each new sample */
  constructor(keep: number) {
    this.#keep = keep;
  }

  observe(x: number, y: number): void {
    this.fade(this.#keep);
    this.#w += 1;
    this.#wx += x;
    this.#wxx += x * x;
    this.#wy += y;
    this.#wxy += x * y;
    this.#line = lineOf(this.#w, this.#wx, this.#wxx, this.#wy, this.#wxy);
  }

  /** What was seen until now counts so much less. */
  fade(keep: number): void {
    this.#w *= keep;
    this.#wx *= keep;
    this.#wxx *= keep;
    this.#wy *= keep;
    this.#wxy *= keep;
  }

  get line(): Line {
    return this.#line;
  }
}
