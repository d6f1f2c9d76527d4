/**
 * What workers of both roles are for just now; pure. Of N such workers as many lean to prefill as the plan needs there beyond those that
 * only prefill, in halves: one may do both.
 *
 *     level = N × prefill ÷ (prefill + decode), of what is needed beyond the workers of one role
 *
 * A level stays until another one is better by more than `band` workers, and at least `holdMs`: a load that swings does not swing workers.
 *
 * Invariants: somebody takes whole requests, always; a worker changes only if the level or the members did; new requests alone are
 * concerned.
 */
import type { Leaning } from '@kvtier/registry';

export interface BothWorker {
  readonly number: number;
  readonly leaning: Leaning | undefined;
  /** Answers that it gives, and prompt tokens that it has to compute. */
  readonly running: number;
  readonly tokensAhead: number;
}

export interface LeaningInput {
  readonly both: readonly BothWorker[];
  /** Workers of one role alone. */
  readonly prefillOnly: number;
  readonly decodeOnly: number;
  /** Of all workers, as planned. */
  readonly prefillNeeded: number;
  readonly decodeNeeded: number;
}

/** In workers: a whole number and perhaps a half. */
export interface Level {
  readonly level: number;
  readonly sinceMs: number;
}

export interface LeaningLimits {
  readonly holdMs: number;
  readonly band: number;
}

export interface Leanings {
  readonly held: Level;
  readonly byNumber: ReadonlyMap<number, Leaning>;
}

export function leanWorkers(
  input: LeaningInput,
  before: Level | undefined,
  nowMs: number,
  { holdMs, band }: LeaningLimits,
): Leanings {
  const { both, decodeOnly } = input;
  const most = Math.max(decodeOnly > 0 ? both.length : both.length - 1, 0);
  const wanted = Math.min(wantedLevel(input) ?? before?.level ?? 0, most);
  let held = before ?? { level: 0, sinceMs: nowMs - holdMs };
  if (held.level > most) held = { level: most, sinceMs: nowMs };
  if (Math.abs(wanted - held.level) > band && nowMs - held.sinceMs >= holdMs)
    held = { level: Math.round(wanted * 2) / 2, sinceMs: nowMs };
  const prefills = Math.floor(held.level);
  const mixed = prefills + (held.level > prefills ? 1 : 0);
  const byNumber = new Map<number, Leaning>();
  for (const [at, { number }] of both.toSorted(byFitness).entries())
    byNumber.set(number, at < prefills ? 'prefill' : at < mixed ? 'mixed' : 'decode');
  return { held, byNumber };
}

/** undefined: nothing is needed of them. */
function wantedLevel({ both, prefillOnly, decodeOnly, prefillNeeded, decodeNeeded }: LeaningInput): number | undefined {
  const prefill = Math.max(prefillNeeded - prefillOnly, 0);
  const decode = Math.max(decodeNeeded - decodeOnly, 0);
  return prefill + decode > 0 ? (both.length * prefill) / (prefill + decode) : undefined;
}

const rank: Readonly<Record<Leaning, number>> = { prefill: 0, mixed: 1, decode: 2 };

/** Who prefills goes on, then who has most of it to do and fewest answers under way. */
function byFitness(a: BothWorker, b: BothWorker): number {
  return (
    rank[a.leaning ?? 'decode'] - rank[b.leaning ?? 'decode'] ||
    b.tokensAhead - a.tokensAhead ||
    a.running - b.running ||
    a.number - b.number
  );
}
