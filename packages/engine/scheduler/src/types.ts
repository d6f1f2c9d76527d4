/** What goes into the engine and what comes out; the same words as proto/kvtier/v1/engine.proto. */
import type { KvError } from '@kvtier/errors';

export interface GenerateRequest {
  /** Unique among the requests in the engine. */
  readonly requestId: string;
  readonly promptTokenIds: Int32Array | Uint32Array;
  /** Tokens to generate at most, ≥ 1. */
  readonly maxTokens: number;
  /** 0 = greedy. */
  readonly temperature: number;
  /** 0 = off. */
  readonly topK: number;
  /** 1 = off. */
  readonly topP: number;
  /** Same seed, same prompt: same tokens. undefined: a random one. */
  readonly seed?: bigint | undefined;
  readonly ignoreEos?: boolean;
  readonly stopTokenIds?: readonly number[];
  /** Requests share blocks only with requests of the same salt. */
  readonly cacheSalt?: string;
  readonly loraName?: string;
  /** 'full': KV events tell the blocks of its hits too. Of hashed blocks; the radix tree has no such events. */
  readonly kvCacheReportMode?: string | undefined;
  /** Compute the prompt's first blocks for another worker, and give them to the tier; maxTokens may be 0 unless it draws. */
  readonly prefillOnly?: PrefillOnlyParams | undefined;
  /** Another worker computes the prompt's first blocks: wait for them, and compute the rest. */
  readonly handOff?: HandOffParams | undefined;
  /** The most that should be between two tokens of its answer (pacing.ts); undefined or 0: nothing is asked for. */
  readonly betweenMs?: number | undefined;
}

export interface PrefillOnlyParams {
  /** Whole blocks of the prompt, from the first on; ≥ 1. */
  readonly blocks: number;
  /** Of one step at most; undefined or 0: as many as fit. */
  readonly stepBlocks?: number | undefined;
  /** The whole prompt is computed, and the token behind it drawn and told; the answer goes on at the other worker. */
  readonly draws?: boolean | undefined;
}

export interface HandOffParams {
  /** Whole blocks of the prompt, from the first on; ≥ 1. */
  readonly blocks: number;
  /** So long without another block, the wait ends. */
  readonly stallMs: number;
  /** So long after the request has its room, the wait ends. */
  readonly deadlineMs: number;
}

/** Where the prompt's cached tokens came from. `engine` = the engine's own block pool. */
export interface CacheUse {
  readonly promptTokens: number;
  readonly cachedTokens: number;
  /** Sums to cachedTokens. */
  readonly tokensByTier: Readonly<Record<string, number>>;
  /** Waiting for room and for the tier's answer. */
  readonly queueUs: number;
  readonly loadUs: number;
  /** From the first step to the first token. */
  readonly prefillUs: number;
  /** Of the cached tokens, those that came by a hand-off; this and the next two only of requests that had one. */
  readonly handedTokens?: number;
  /** From the request's room to the end of its hand-off. */
  readonly handOffUs?: number;
  /** From the end of the hand-off to the first token. */
  readonly tailUs?: number;
}

/** Of a hand-off; each side says its own. */
export interface HandOffState {
  /** Decode: blocks that the engine held itself, and needs from nobody. */
  readonly localBlocks: number;
  /** Of the prompt, from the first on. Prefill: that the tier holds now. Decode: that have come here, once some have. */
  readonly readyBlocks: number;
}

/** '' while the request runs. A stop token that ends the request is among the token ids, as in vLLM. */
/** 'prefilled': of a request that computes for another worker; the answer is not over with it. */
export type FinishReason = '' | 'stop' | 'length' | 'abort' | 'prefilled';

export interface Output {
  /** New since the last output. */
  readonly tokenIds: readonly number[];
  readonly finishReason: FinishReason;
  /** With the first token, or with 'prefilled'. */
  readonly cache?: CacheUse;
  /** Decode: when the request has its room, and whenever more have come. Prefill: whenever more lie in the tier, and with the end. */
  readonly handOff?: HandOffState;
  /** Ends the request. */
  readonly error?: KvError;
}

/** Called in order, from the engine's loop; what it throws aborts its own request and nothing else. */
export type OnOutput = (output: Output) => void;

export interface EngineLimits {
  /** Tokens computed per step. */
  readonly maxStepTokens: number;
  /** Requests that run at the same time, and as many that load. */
  readonly maxSequences: number;
  /** Requests that wait; more are refused with BUSY. */
  readonly maxWaiting: number;
  /** Share of the block pool that exports in flight may hold; default 0.5. */
  readonly exportShare?: number;
  /**
   * Full blocks of a prompt that wait for each other to be exported, until its first token; default 512, and never more than half
   * of what exports may hold. 1: none waits.
   */
  readonly exportGatherBlocks?: number;
  /** A tier that has not said by then what it holds holds nothing; default 2000. */
  readonly matchDeadlineMs?: number;
  /** A load that has not ended by then is given up: the connector has broken its own deadline. Default 30000. */
  readonly loadDeadlineMs?: number;
}

export interface EngineStats {
  readonly waiting: number;
  readonly running: number;
  readonly loading: number;
  readonly blockCount: number;
  readonly freeBlocks: number;
  readonly cachedBlocks: number;
  /** Blocks held by exports in flight. */
  readonly exportBlocks: number;
  readonly steps: number;
  readonly failedSteps: number;
  readonly prefillTokens: number;
  readonly decodeTokens: number;
  /** Prompt tokens at first admission, and how many of them were in the engine's pool or loaded. */
  readonly promptTokens: number;
  readonly hitTokens: number;
  readonly loadedTokens: number;
  readonly loads: number;
  /** Loads that brought less than they set out to. */
  readonly shortLoads: number;
  /** Loads that a step imported, layer by layer. */
  readonly layeredLoads: number;
  /** Loads beside which the head of the hit was computed. */
  readonly headLoads: number;
  readonly expiredMatches: number;
  readonly expiredLoads: number;
  /** Full blocks that were offered to the tier and that it holds, as it has said. */
  readonly exportedBlocks: number;
  /** Full blocks that it does not hold: never offered, because exports held their share of the pool, or not taken. */
  readonly skippedExportBlocks: number;
  readonly preemptions: number;
  /** Requests that drew no token over blocks that were there already, and computed all of their tokens themselves then. */
  readonly begunAnew: number;
  /** Requests that waited, or were to wait, for blocks that another worker computes; those that wait now. */
  readonly handOffs: number;
  readonly awaiting: number;
  /** How hand-offs ended, by reason. */
  readonly handOffEnds: Readonly<Record<string, number>>;
  /** Tokens that came by hand-offs. */
  readonly handedTokens: number;
  /** Requests that were computed for other workers, and their blocks that the tier held in the end. */
  readonly prefills: number;
  readonly prefilledBlocks: number;
  readonly finished: number;
  readonly aborted: number;
  readonly failed: number;
}

/** Time as an argument: tests have their own. */
export interface Clock {
  nowUs(): number;
  /** Call once after a delay; returns the cancellation. */
  after(delayMs: number, call: () => void): () => void;
}

export const systemClock: Clock = {
  nowUs: () => performance.now() * 1000,
  after: (delayMs, call) => {
    const timer = setTimeout(call, delayMs);
    timer.unref(); // a guard must not keep the process alive
    return () => clearTimeout(timer);
  },
};
