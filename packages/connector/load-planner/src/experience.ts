/**
 * How long loads took in truth, against what the node says beforehand. Kept per set of tiers as time per block, and compared with what
 * the node says next: it learns from the same loads, and a factor learned beside it would correct the same error twice.
 *
 * Experience fades towards believing the node, half of it in `halfLifeMs`: a tier that was slow once is tried again.
 */
const halfLifeMs = 10_000;
const minCorrection = 0.5;
const maxCorrection = 32;
/** Sets of tiers; there are never many. */
const maxSets = 32;

interface Experience {
  usPerBlock: number;
  atMs: number;
}

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

  /** By what to multiply the node's estimate of `usPerBlock`. */
  correction(tiers: string, usPerBlock: number, nowMs: number): number {
    const known = this.#byTiers.get(tiers);
    if (known === undefined || !(usPerBlock > 0)) return 1;
    const truth = Math.min(maxCorrection, Math.max(minCorrection, known.usPerBlock / usPerBlock));
    return 1 + (truth - 1) * 0.5 ** (Math.max(0, nowMs - known.atMs) / halfLifeMs);
  }
}
