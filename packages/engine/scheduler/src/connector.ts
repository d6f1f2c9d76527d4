/**
 * What the scheduler sees of the tier. The law here is "never in the way": nothing below throws, and nothing waits
 * without a deadline. Whatever goes wrong looks like a shorter hit or a store that did not happen.
 *
 * Life of a request (after vLLM's KV connector API, made asynchronous throughout):
 *   match()  asked while the request waits; 'pending' at first, later 'known'; `onWake` of the constructor fires between
 *   load()   into blocks that the scheduler has allocated; one callback at the end with the count that may be used
 *   store()  as blocks fill up; the scheduler holds the blocks until the callback
 *   forget() when the request is gone
 */
import type { Buffer } from 'node:buffer';
import type { ArenaBlocks, StepResult } from '@kvtier/executor';

/** Tokens or blocks by the tier they came from, e.g. {arena: 12, disk: 40}. */
export type ByTier = Readonly<Record<string, number>>;

export type Match =
  | { readonly state: 'pending' }
  | {
      readonly state: 'known';
      /** Blocks to load. */
      readonly blocks: number;
      /** Blocks before them to compute meanwhile; default none. */
      readonly head?: number;
    };

export interface LoadResult {
  /** Blocks that are in the KV cache and verified in all groups that want them, from the first on, without a gap. */
  readonly loaded: number;
  readonly byTier: ByTier;
  readonly elapsedUs: number;
  /** Of an awaited load that came short: why; else ''. */
  readonly reason?: string;
}

/** A load of blocks that another engine computes meanwhile: what no tier holds yet is waited for. */
export interface AwaitedLoad {
  /** So long without another block, it ends with what is there. */
  readonly stallMs: number;
  /** So long after it began, it ends with what is there. */
  readonly deadlineMs: number;
  /** So many of its blocks, from the first on, have been copied. Never from inside a call; not of the last ones. */
  readonly onCame?: ((blocks: number) => void) | undefined;
}

/** A load whose blocks all lie in the arena, none of them copied yet. Exactly one of `import` and `decline` is called, once. */
export interface ArrivedLoad {
  readonly blocks: ArenaBlocks;
  /** The session that holds the slots is up: a step may import from them. */
  readonly live: boolean;
  /**
   * Runs the step that imports the blocks; the load has ended (`onDone`) when this settles, as the step does.
   * @throws KvError DISCONNECTED when not `live`; the step has not begun then
   */
  import(step: () => Promise<StepResult>): Promise<StepResult>;
  /** Copy them now, beside the steps. */
  decline(): void;
}

/** Of a store. */
export interface StoreOptions {
  /**
   * Called once, with `onReleased` or later, when it is known how many of the blocks the tier holds, in all groups that offer them, from
   * the first on, without a gap; `isBusy`: somebody else is writing the one behind them, or too much was on its way, so that it may be held
   * soon. `isLost`: a tier was there, and was not asked, as too much was on its way to it, or has not answered in time: it will be held if it
   * is offered again, and what was offered behind it will not be else.
   */
  readonly onSettled?: (heldBlocks: number, isBusy: boolean, isLost?: boolean) => void;
  /** Where the hashes depend on tokens alone: those of blocks first..end-1 of the chain, asked for within the call if somebody wants them. */
  readonly tokens?: (first: number, end: number) => Int32Array;
}

export interface Connector {
  /** A cache node is attached right now. */
  readonly attached: boolean;
  /** Of the cache node's boot: where it is another than before, the node has started anew. Absent, or undefined: it is not known. */
  readonly epoch?: bigint | undefined;
  /** Blocks of stores whose copy or confirmation is outstanding: they may be let go already, and cannot be found yet. */
  readonly storingBlocks: number;
  /** Blocks that a store may offer now: of more, the last ones are left out. Absent: any number. */
  readonly storeRoom?: number;
  /**
   * How many blocks of the chain, beyond the first `localBlocks` that the engine holds itself, should be loaded. The
   * planner has already weighed the time to load them against the time to compute them. Ask again while 'pending'.
   * @param hashes all full-block hashes of the request, packed, in chain order
   * @param isIdle nothing else is computed here: the head of what is held may be, while the rest is loaded
   */
  match(requestId: string, hashes: Buffer, localBlocks: number, isIdle?: boolean): Match;
  /**
   * The request still waits for its turn: where what is known of it is old it is asked for anew, and answers meanwhile. Nothing happens
   * where nothing is known yet, or peers alone hold it and are clearly slower than computing. Absent: what is known stays so.
   */
  renew?(requestId: string, hashes: Buffer): void;
  /**
   * Bring blocks of the chain, from block `firstBlock` on, into the KV cache.
   * @param blockIds row-major [attention group][block]; 0 where a group's window does not reach, at the front of its row
   * `onDone` is called exactly once, never from inside this call, at the latest shortly after the deadline; the block
   * ids belong to the connector until then. `onArrived`, of a model of one attention group: all of it lies in the arena; true
   * when the caller means to import it with a step, and decides at once when the next one is put together.
   * `awaited`: it is not weighed against computing, and ends by its own deadlines, or by `endLoad`. `hasHead`: blocks before these are
   * computed still, and nobody waits for the load.
   */
  load(
    requestId: string,
    hashes: Buffer,
    firstBlock: number,
    blockIds: Int32Array,
    onDone: (result: LoadResult) => void,
    onArrived?: (load: ArrivedLoad) => boolean,
    awaited?: AwaitedLoad,
    hasHead?: () => boolean,
  ): void;
  /**
   * The request's awaited load ends as soon as its first `blocks` blocks are there; 0: now, with what is there. The last word
   * counts. Any other load heeds 0 alone: its request is gone, and it ends as soon as nothing is copied. Nothing happens where there is no
   * load. It never calls back from inside this call.
   */
  endLoad(requestId: string, blocks: number): void;
  /**
   * Offer full, computed blocks of one chain to the tier: blocks `firstBlock`.. of `hashes`, ids laid out as in `load`,
   * 0 where a group does not offer a block. `onReleased` is called
   * exactly once, never from inside this call, when their bytes are no longer needed.
   */
  store(hashes: Buffer, firstBlock: number, blockIds: Int32Array, onReleased: () => void, options?: StoreOptions): void;
  /**
   * A request with this chain waits in the queue: what lower tiers hold from block `firstBlock` on may be brought into the arena
   * meanwhile, behind all loads. A hint; nothing answers, and blocks of groups with a window stay where they are. Once per
   * request; `forget` ends it.
   */
  prefetch(requestId: string, hashes: Buffer, firstBlock: number): void;
  /** The request ended or was aborted: a match in flight is dropped, a prefetch is cancelled. A load in flight still calls back. */
  forget(requestId: string): void;
  /**
   * How fast this engine computes, for the planner: called after each step that only prefilled. `positions`: how many each of its tokens
   * looked at, itself included, together. `ofHead`: it computed the head of a hit, and the rest was being loaded.
   */
  observePrefill(tokens: number, positions: number, elapsedUs: number, ofHead?: boolean): void;
  close(): Promise<void>;
}

/** The connector of an engine that runs without a tier. */
export const noConnector: Connector = {
  attached: false,
  storingBlocks: 0,
  match: () => ({ state: 'known', blocks: 0 }),
  load: (_id, _hashes, _first, _blocks, onDone) =>
    queueMicrotask(() => onDone({ loaded: 0, byTier: {}, elapsedUs: 0 })),
  endLoad: () => {},
  store: (_hashes, _first, _blocks, onReleased, options) =>
    queueMicrotask(() => {
      onReleased();
      options?.onSettled?.(0, false);
    }),
  prefetch: () => {},
  forget: () => {},
  observePrefill: () => {},
  close: async () => {},
};
