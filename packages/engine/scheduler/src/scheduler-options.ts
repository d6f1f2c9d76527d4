/** What a scheduler is made of, and whom it tells. */
import type { PrefixCache } from '@kvtier/prefix-cache';
import type { Connector } from './connector.ts';
import type { AheadOptions } from './exports.ts';
import type { EngineRequest } from './request.ts';
import type { Clock } from './types.ts';

export interface SchedulerOptions {
  readonly kv: PrefixCache;
  readonly connector: Connector;
  readonly clock: Clock;
  readonly maxStepTokens: number;
  readonly maxSequences: number;
  readonly maxExportBlocks: number;
  /** Blocks of a prompt's computation that are offered together. */
  readonly exportGatherBlocks: number;
  /** Blocks go down when they are about to be reused, or have been hit twice; default: all, as they fill up. */
  readonly ahead?: AheadOptions | undefined;
  readonly matchDeadlineMs: number;
  readonly loadDeadlineMs: number;
  /** Some layers see only a window of the tokens before. Default: none. */
  readonly windows?: boolean;
  /** Blocks that a sequence of so many tokens holds at any one time, at most. Default: one per block of tokens. */
  readonly mostBlocks?: (tokens: number) => number;
  /** A step can import its request's blocks, layer by layer. Default: no. */
  readonly importsByLayer?: boolean | undefined;
  /** Something that may let a waiting request go on has happened. */
  readonly wake: () => void;
  /** This request has its room, held `localBlocks` itself, and waits for the rest of its hand-off, or computes it. From inside `schedule`. */
  readonly onHandOff: (request: EngineRequest, localBlocks: number) => void;
  /** More of what it waits for has come: it has the prompt's first `readyBlocks` blocks. Never from inside a call. */
  readonly onCame: (request: EngineRequest, localBlocks: number, readyBlocks: number) => void;
  /** More of a prompt that is computed for another worker lies in the tier. Never from inside a call. */
  readonly onReady: (request: EngineRequest, readyBlocks: number) => void;
  /** All of it is computed, offered and answered. undefined: there is no tier any more to give it to. */
  readonly onPrefilled: (request: EngineRequest, readyBlocks: number | undefined) => void;
}
