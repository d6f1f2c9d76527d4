/**
 * How long loads took in truth, against what the node says beforehand. Kept per set of tiers as time per block, and compared with what
 * the node says next: it learns from the same loads, and a factor learned beside it would correct the same error twice.
 *
 * Experience fades towards believing the node, half of it in `halfLifeMs`: a tier that was slow once is tried again.
 */
const halfLifeMs = 10_000;
const minCorrection = 0.5;
/** Loads beside steps are shared out between tier and executor by what they take: that is believed however little it is. */
const minBeside = 1 / 16;
const maxCorrection = 32;
/** Sets of tiers; there are never many. */
const maxSets = 32;

interface Experience {
  usPerBlock: number;
  atMs: number;
}

/** Experience with loads from tiers beside which the head of the hit is computed. */
export const besideSteps = (tiers: string): string => `${tiers} beside steps`;

export class Experiences {
  readonly #byTiers = new Map<string, Experience>();

  /** Blocks of these tiers took `usPerBlock` each. */
  observe(tiers: string, usPerBlock: number, nowMs: number): void {
    if (!(usPerBlock >= 0) || !Number.isFinite(usPerBlock)) return;
    const known = this.#byTiers.get(tiers);
    if (known === undefined) {
      if (this.#byTiers.size < maxSets) this.#byTiers.set(tiers, { usPerBlock, atMs: nowMs });
      return;
    }
    known.usPerBlock = (known.usPerBlock + usPerBlock) / 2;
    known.atMs = nowMs;
  }

  /** By what to multiply the node's estimate of `usPerBlock`; never by less than `least`. */
  correction(tiers: string, usPerBlock: number, nowMs: number, least = minCorrection): number {
    const known = this.#byTiers.get(tiers);
    if (known === undefined || !(usPerBlock > 0)) return 1;
    const truth = Math.min(maxCorrection, Math.max(least, known.usPerBlock / usPerBlock));
    return 1 + (truth - 1) * 0.5 ** (Math.max(0, nowMs - known.atMs) / halfLifeMs);
  }

  /**
   * What a block of these tiers takes where the node says `saidUs`, and what it takes beside steps. Alone it takes no longer than that:
   * whichever was seen last bounds the other one, so that who loads all one way sees that a tier has become faster, or slower.
   */
  timesOf(tiers: string, saidUs: number, nowMs: number): { readonly aloneUs: number; readonly besideUs: number } {
    const aloneUs = saidUs * this.correction(tiers, saidUs, nowMs);
    const beside = this.#byTiers.get(besideSteps(tiers));
    if (beside === undefined) return { aloneUs, besideUs: aloneUs };
    const besideUs = saidUs * this.correction(besideSteps(tiers), saidUs, nowMs, minBeside);
    const aloneMs = this.#byTiers.get(tiers)?.atMs ?? Number.NEGATIVE_INFINITY;
    if (beside.atMs < aloneMs) return { aloneUs, besideUs: Math.max(aloneUs, besideUs) };
    return { aloneUs: Math.min(aloneUs, besideUs), besideUs };
  }
}
