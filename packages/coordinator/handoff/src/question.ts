/** What a hand-off is decided by: the request, the workers at this moment, the link between them, and the targets. */
import type { WorkerState } from '@kvtier/routing';

export type SplitMode = 'predicted' | 'always' | 'never';

/** Of a worker at this moment. `match` is what it has at hand of the prompt. */
export interface Side extends WorkerState {
  readonly number: number;
  readonly name: string;
  readonly role: 'prefill' | 'decode' | 'both';
  /** It takes requests. */
  readonly isReady: boolean;
  readonly revision: string;
  /** All that two workers must have in common to share blocks, as one text. */
  readonly identity: string;
  /** Of the cache node beside it; null: it has none. */
  readonly node: string | null;
  /** Prompts that it computes for others now. */
  readonly legs: number;
  /** Of those that wait there: whose prompt others compute. They have next to nothing to wait for there. */
  readonly awaiting: number;
  /** As it says, or as is usual. */
  readonly maxStepTokens: number;
  /** Of one sequence, prompt and answer together, that its pool holds; undefined: it does not say. */
  readonly maxTotalTokens: number | undefined;
  /** Of a step that computes prompts alone, besides its tokens; 0: not known. */
  readonly prefillStepS: number;
  /** Of what decoding leaves of a target between tokens, the share that prompts get there. */
  readonly pacingTrust: number;
}

export interface Question {
  readonly mode: SplitMode;
  readonly tokens: number;
  readonly blockTokens: number;
  /** Most tokens of the answer. */
  readonly maxTokens: number;
  readonly decode: Side;
  /** All other workers of the model. */
  readonly others: readonly Side[];
  /** Seconds since the request came. */
  readonly waitedS: number;
  /** Seconds: to the first token; between two tokens of those that run. */
  readonly ttftS: number;
  readonly itlS: number;
  /** Names of the nodes that the decode side's node fetches from; absent: it does not say, and may fetch from any. */
  readonly links?: ReadonlySet<string> | undefined;
  /** Blocks a second to the decode side from another node; 0: not measured, taken for as fast as need be, since only a try measures it. */
  readonly linkBlocksPerS: number;
  /** Blocks of other hand-offs that have still to come over it. */
  readonly pendingBlocks: number;
  /** The decode side waits so long for blocks, from when it has its room: what is there later is computed twice. */
  readonly deadlineS: number;
  /** Legs that one worker may have; legs that the coordinator may still begin. */
  readonly legsPerWorker: number;
  readonly legsLeft: number;
  /** Seconds that tokens came later than predicted, so far, of those that were predicted to take so long. */
  readonly late: Late;
}

export interface Late {
  aloneS(predictedS: number): number;
  splitS(predictedS: number): number;
  /** The pause behind a first token that the prefill side gives: nine in ten are no later. */
  pauseS(predictedS: number): number;
}
