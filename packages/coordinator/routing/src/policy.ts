/**
 * A routing policy: given a request and what is known of every worker, which one gets it. Pure: time and chance are
 * arguments, nothing is asked or sent, so that the same stream of requests is routed the same way, in tests, in the
 * simulation and in service.
 */
import type { Keys, Match } from '@kvtier/kv-index';

/** What is known of one worker at this moment. */
export interface WorkerState {
  /** Requests that wait for their first token, those included that were sent and that it has not told of yet. */
  readonly waiting: number;
  /** Requests that are given tokens. */
  readonly running: number;
  /** Prompt tokens that it has still to compute, of all that wait and run. */
  readonly tokensAhead: number;
  /** Of these, prompt tokens that the step which runs computes; undefined or 0: none, or it is not known. */
  readonly stepTokens?: number | undefined;
  /** For how many seconds that step has run; if none computes prompts, one of those that only give tokens. undefined: not known. */
  readonly stepForS?: number | undefined;
  /** KV blocks that its requests hold, and all that it has. */
  readonly usedBlocks: number;
  readonly totalBlocks: number;
  /** Blocks that those which wait will hold, and as measured, blocks that ended requests give back a second; 0: not known. */
  readonly waitingBlocks: number;
  readonly freedBlocksPerS: number;
  /** Prompt tokens that one step computes at most; undefined: not known. */
  readonly maxStepTokens?: number | undefined;
  /** Requests that it runs at most; undefined: not known. */
  readonly maxRunning?: number | undefined;
  /** Seconds that the loads take which were begun. */
  readonly loadAheadS: number;
  /** As measured: prompt tokens a second while it computes nothing else. */
  readonly prefillTokensPerS: number;
  /** As measured: time that one running request adds to a step, and that a step takes at least; in seconds. */
  readonly stepS: number;
  readonly stepPerRequestS: number;
  /** Blocks a second that it brings in from each medium (by the index's numbers); 0: not at all. */
  readonly loadBlocksPerS: readonly number[];
  /** What the KV index says of the request's prefix here: on the GPU, in its host's memory, on its disk. */
  readonly match: Match;
  /** How many blocks more can be brought in from elsewhere, and from which medium (by the index's numbers). */
  readonly remoteBlocks: number;
  readonly remoteMedium: number;
}

export interface RoutedRequest {
  /** Prompt tokens. */
  readonly tokens: number;
  readonly blockTokens: number;
  /** Most tokens of its answer. */
  readonly maxTokens: number;
  /** Hashes of its full blocks. */
  readonly keys: Keys;
  /** A session or user that the client names; empty: none. */
  readonly session: string;
}

/** A number from 0 to 1, 1 excluded. */
export type Random = () => number;

export interface Policy {
  readonly name: string;
  /** It looks at what the KV index says of the workers (`match`, `remoteBlocks`). */
  readonly asksIndex?: boolean;
  /**
   * The number of a worker. `workers` has at least one entry, and the same worker has the same number in each call until
   * `left`; those that are not eligible now are undefined.
   */
  choose(request: RoutedRequest, workers: readonly (WorkerState | undefined)[], nowMs: number, random: Random): number;
  /** The request was sent to this worker. Policies with an index of their own learn from it. */
  sent?(request: RoutedRequest, worker: number, nowMs: number): void;
  /** Memory of what it keeps of its own, where that grows with what was sent. */
  readonly bytes?: number;
  /** This worker's name, which is the same wherever it is known, as its number is not. Again is of no effect; untold, it has none. */
  named?(worker: number, name: string): void;
  /** This number stands for another worker from now on, or for none. */
  left?(worker: number): void;
}

/** Requests that a worker has. */
export const requestsOf = ({ waiting, running }: WorkerState): number => waiting + running;

/** The numbers of the workers that can be chosen. */
export function eligible(workers: readonly (WorkerState | undefined)[]): number[] {
  const numbers: number[] = [];
  for (let i = 0; i < workers.length; i++) if (workers[i] !== undefined) numbers.push(i);
  return numbers;
}

/** The number with the least cost; of several, one by chance. */
export function leastBy(numbers: readonly number[], random: Random, cost: (worker: number) => number): number {
  let best = numbers[0]!;
  let least = Number.POSITIVE_INFINITY;
  let ties = 0;
  for (const number of numbers) {
    const c = cost(number);
    if (c < least) {
      best = number;
      least = c;
      ties = 1;
    } else if (c === least && random() * ++ties < 1) best = number;
  }
  return best;
}
