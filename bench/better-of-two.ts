/**
 * A way that chooses between two, against the better of the two, from rounds in which all three were timed.
 *
 * Which of two is better and how long it takes must not come from the same times: the faster of two equal things that are timed with
 * noise is faster than either. Of 12 rounds that scatter by 10 % that makes 1.4 %, by 20 % 2.6 %, for a choice that could not be better.
 * So each round is compared with the way that all other rounds say is better, and the figure is the median of these. That says 1 of
 * two equal ways, and the truth where one is clearly better. Between (5 % apart, rounds that scatter by 10 %) it now and then compares
 * with the worse, and says 1.1 % too much; the same rounds for both say what is told beside it (`strict`), 0 to 2.6 % too little.
 */
import { median } from './figures.ts';

export interface Timed {
  readonly chosen: number;
  readonly ways: readonly [number, number];
}

export interface BetterOfTwo {
  /** Which of the two all rounds say is better. */
  readonly better: 0 | 1;
  /** better ÷ chosen. */
  readonly ratio: number;
  readonly strict: number;
}

export function betterOfTwo(rounds: readonly Timed[]): BetterOfTwo {
  const better = betterOf(rounds);
  const others = (round: Timed): readonly Timed[] =>
    rounds.length > 1 ? rounds.filter((each) => each !== round) : rounds;
  return {
    better,
    ratio: median(rounds.map((round) => round.ways[betterOf(others(round))] / round.chosen)),
    strict: median(rounds.map(({ ways, chosen }) => ways[better] / chosen)),
  };
}

function betterOf(rounds: readonly Timed[]): 0 | 1 {
  const [first, second] = [0, 1].map((way) => median(rounds.map(({ ways }) => ways[way]!)));
  return first! <= second! ? 0 : 1;
}
