/** Workers and requests, as tests of the queue in front of the workers have them. */
import { maxMedia } from '@kvtier/kv-index';
import type { RoutedRequest, WorkerState } from '../index.ts';

/** A worker of 1,000 tokens a second, with so many ahead, which holds the first `held` blocks of a prompt. */
export function stateOf(tokensAhead: number, held = 0, waiting = 0): WorkerState {
  const byMedium = new Int32Array(maxMedia);
  byMedium[0] = held;
  return {
    waiting,
    running: 0,
    tokensAhead,
    usedBlocks: 0,
    totalBlocks: 10_000,
    waitingBlocks: 0,
    freedBlocksPerS: 0,
    loadAheadS: 0,
    prefillTokensPerS: 1000,
    stepS: 0.01,
    stepPerRequestS: 0,
    loadBlocksPerS: [],
    match: { blocks: held, byMedium },
    remoteBlocks: 0,
    remoteMedium: 3,
  };
}

/** For one token, of a prompt that nobody knows. */
export const requestOf = (tokens = 100): RoutedRequest => ({
  tokens,
  maxTokens: 1,
  blockTokens: 16,
  keys: new Int32Array(0),
  session: '',
});
