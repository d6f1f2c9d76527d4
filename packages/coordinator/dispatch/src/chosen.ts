/** What was chosen, why, and what the request adds to its worker's load. */
import type { Worker } from '@kvtier/registry';
import { type Assignment, costOf, type WorkerState } from '@kvtier/routing';
import type { Choice } from './choice.ts';
import type { Pending } from './pending.ts';
import type { Held, Share } from './ports.ts';

/** What has to be told of it. */
interface Told {
  firstToken(isTimed: boolean): void;
  /** `hasFirstToken`: its prompt was computed. */
  ended(answerTokens: number | undefined, hasFirstToken: boolean): void;
}

export class Chosen implements Choice {
  readonly worker: Worker;
  readonly policy: string;
  readonly why: string;
  readonly firstTokenS: number;
  readonly match: Held;
  readonly isGuessed: boolean;
  readonly share: Share;
  readonly #told: Told;
  #hasFirstToken = false;
  #hasEnded = false;

  constructor(
    worker: Worker,
    by: { readonly policy: string; readonly isGuessed: boolean },
    pending: Pending,
    state: WorkerState,
    share: Share,
    told: Told,
  ) {
    this.worker = worker;
    this.policy = by.policy;
    this.isGuessed = by.isGuessed;
    const { remoteBlocks, remoteMedium } = state;
    this.match = { ...state.match, remoteBlocks, remoteMedium };
    this.share = share;
    this.firstTokenS = costOf(pending, state, 0, 0, 1);
    this.why = whyOf(pending, state, share);
    this.#told = told;
  }

  firstToken(isTimed = false): void {
    if (this.#hasFirstToken || this.#hasEnded) return;
    this.#hasFirstToken = true;
    this.#told.firstToken(isTimed);
  }

  ended(answerTokens?: number): void {
    if (this.#hasEnded) return;
    this.#hasEnded = true;
    this.#told.ended(answerTokens, this.#hasFirstToken);
  }
}

/** `held`: as the queue in front of the workers expects it to be. */
export function shareOf(
  pending: Pending,
  state: WorkerState,
  { match, remoteBlocks, remoteMedium }: Assignment<Pending>['held'] = state,
): Share {
  const { loadBlocksPerS, prefillTokensPerS } = state;
  const computeS = pending.blockTokens / prefillTokensPerS;
  let loadS = 0;
  for (let medium = 1; medium < match.byMedium.length; medium++)
    if (loadBlocksPerS[medium]! > 0) loadS += match.byMedium[medium]! / loadBlocksPerS[medium]!;
  let blocks = match.blocks;
  if (remoteBlocks > 0 && loadBlocksPerS[remoteMedium]! * computeS > 1) {
    blocks += remoteBlocks;
    loadS += remoteBlocks / loadBlocksPerS[remoteMedium]!;
  }
  const { id, isStreamed } = pending.request;
  return {
    requestId: id,
    tokensAhead: Math.max(pending.tokens - blocks * pending.blockTokens, 1),
    blocks: Math.ceil((pending.tokens + pending.maxTokens) / pending.blockTokens),
    loadS,
    ...(isStreamed === true && { tellsFirstToken: true }),
  };
}

/** Printable ASCII, for a header. */
function whyOf(pending: Pending, state: WorkerState, share: Share): string {
  const aheadMs = Math.max(state.tokensAhead / state.prefillTokensPerS, state.loadAheadS) * 1000;
  return (
    `ahead ${aheadMs.toFixed(0)} ms, ${state.waiting} waiting, ${state.running} running, ` +
    `computes ${share.tokensAhead} of ${pending.tokens} tokens`
  );
}
