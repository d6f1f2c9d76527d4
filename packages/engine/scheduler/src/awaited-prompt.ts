/**
 * A hand-off, as the engine that decodes sees it: another worker computes the prompt's first blocks, and this request waits for
 * them with its room for the whole prompt taken.
 *
 *      open ──room──▶ awaiting ──all there, or the end of patience──▶ over        the rest is computed here
 *        └──nothing to wait for──────────────────────────────────────▶ over
 */
import type { HandOffParams } from './types.ts';

/** Why a hand-off ended, besides what the connector says. */
export const ownEnds = {
  complete: 'complete',
  /** The engine holds all of it itself. */
  local: 'local',
  noSession: 'no session',
  /** Called off before it had room. */
  changed: 'changed',
  /** Somebody older needed the room. */
  preempted: 'preempted',
  /** The connector did not keep its own deadline. */
  expired: 'expired',
  /** The request ended first. */
  gone: 'gone',
} as const;

export class AwaitedPrompt {
  readonly stallMs: number;
  readonly deadlineMs: number;
  state: 'open' | 'awaiting' | 'over' = 'open';
  /** While it is open: when it was looked up last, nothing of it was missing here. */
  isLocal = false;
  /** The room is wanted back: when the connector has let go, the request may lose it. */
  isRevoked = false;
  /** From its room to its end. */
  elapsedUs = 0;
  endedUs = 0;
  /** That came by it. */
  loadedBlocks = 0;
  #blocks: number;
  #beganUs = 0;

  constructor({ blocks, stallMs, deadlineMs }: HandOffParams) {
    this.#blocks = blocks;
    this.stallMs = stallMs;
    this.deadlineMs = deadlineMs;
  }

  /** Of the prompt, from the first on, that another worker computes. */
  get blocks(): number {
    return this.#blocks;
  }

  /** Another number of blocks is computed elsewhere. False: it is over. */
  change(blocks: number): boolean {
    if (this.state === 'over') return false;
    this.#blocks = blocks;
    this.isLocal = false;
    return true;
  }

  begin(nowUs: number): void {
    this.state = 'awaiting';
    this.#beganUs = nowUs;
  }

  end(nowUs: number, loadedBlocks = 0): void {
    if (this.state === 'awaiting') this.elapsedUs = nowUs - this.#beganUs;
    this.state = 'over';
    this.endedUs = nowUs;
    this.loadedBlocks = loadedBlocks;
  }
}
