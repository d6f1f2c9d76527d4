/** One call at a virtual worker, and the tokens that it draws. */
import type { OnEvent } from '@kvtier/registry';
import type { GenerateRequest } from '@kvtier/wire/grpc';

/** One call at one worker. */
export interface CallAt<Worker> {
  readonly worker: Worker;
  readonly request: GenerateRequest;
  readonly onEvent: OnEvent;
  readonly end: (failure?: unknown) => void;
  /** It holds nothing any more, and listens to nobody: Node keeps what listens to a joined signal for ever. */
  readonly close: () => void;
  isOpen: boolean;
  /** It has its room. */
  hasRoom: boolean;
  /** The decode side's word of it; undefined: it has not said it. */
  local: number | undefined;
  /** Blocks that it has: computed, held or brought in. */
  blocks: number;
  /** Waits for blocks up to here; undefined: it waits for none. */
  awaited: number | undefined;
  /** A block is on its way to it. */
  isBringing: boolean;
  tokensLeft: number;
  answerLeft: number;
  hasToken: boolean;
  /** The step that runs computes some of it. */
  isInStep: boolean;
  /** As the prefill side drew it. */
  firstToken: number | undefined;
  /** The caller has a token of it. */
  hasGiven: boolean;
  stallAtMs: number;
  deadlineAtMs: number;
}

/** The token at this place of the sequence that this prompt begins. */
export const tokenAt = (prompt: number, place: number): number => (31 * prompt + 7 * place) % 1_000;
/** A prefill worker that computes otherwise than all others has drawn it. */
export const strayToken = 1_000_000;
