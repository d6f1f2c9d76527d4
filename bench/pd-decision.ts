/**
 * Whether prompts are split as is best: times of requests as the coordinator decides, beside those where all are split, and where none is.
 * By medians, and by means: a decision that is wrong in less than half of all cases is in no median.
 */
import { KvError } from '@kvtier/errors';
import { type Figure, median, time } from './figures.ts';

export const decidedWays = ['predicted', 'always', 'never'] as const;
export type DecidedWay = (typeof decidedWays)[number];

/** Each way once, another one first in each round: a machine that gets slower meanwhile does it to all of them. */
export const inTurn = <Way>(ways: readonly Way[], round: number): Way[] =>
  ways.map((_, at) => ways[(round + at) % ways.length]!);

/** Milliseconds of requests, by rounds. */
export type Rounds = readonly (readonly number[])[];
export type Taken = Readonly<Record<DecidedWay, Rounds>>;

/** Of several kinds of load the worst, by medians of the rounds' means, and by the mean of all requests. */
export function decisionFigures(
  gbit: number,
  kinds: ReadonlyMap<string, Taken>,
  log: (line: string) => void,
): Figure[] {
  const medianOf = (rounds: Rounds): number => median(rounds.map(mean));
  const meanOf = (rounds: Rounds): number => mean(rounds.flat());
  return [
    worst(`decision_${gbit}g`, 'by medians', kinds, medianOf, log),
    worst(`mean_decision_${gbit}g`, 'by means', kinds, meanOf, log),
  ];
}

function worst(
  name: string,
  by: string,
  kinds: ReadonlyMap<string, Taken>,
  msOf: (rounds: Rounds) => number,
  log: (line: string) => void,
): Figure {
  const figures = [...kinds].map(([kind, taken]) => {
    const [predicted, always, never] = decidedWays.map((way) => msOf(taken[way])) as [number, number, number];
    log(
      `${name} ${kind}: decided ${predicted.toFixed(1)} ms, always ${always.toFixed(1)} ms, never ${never.toFixed(1)} ms`,
    );
    const limit = `the better of always and never, ${by}, ${kind}, the worst of ${kinds.size}; ratio ≥ 0.97`;
    return time(name, predicted, 'ms', Math.min(always, never), limit);
  });
  if (figures.length === 0) throw new KvError('CONFIG', `bench pd: ${name}: no kind of load was measured`);
  return figures.reduce((a, b) => (b.ratio < a.ratio ? b : a));
}

const mean = (values: readonly number[]): number => values.reduce((sum, each) => sum + each, 0) / values.length;
