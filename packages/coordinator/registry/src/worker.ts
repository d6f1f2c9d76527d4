/** A worker as the coordinator sees it: what discovery, its connection and its own word say of it. */
import type { WorkerRecord } from '@kvtier/config';

/**
 * joining: its connection or its facts are not there yet. ready: it takes requests. draining: it ends what it has.
 * silent: its connection is lost, or it does not answer; what it had is tried elsewhere. refused: it cannot be of this cluster (`why`).
 */
export type WorkerState = 'joining' | 'ready' | 'draining' | 'silent' | 'refused';

/**
 * What a worker of role `both` is for just now, for new requests alone: prefill for others, whole requests and decode, or both. The planner
 * says it; undefined: nobody has, and it takes whole requests.
 */
export type Leaning = 'prefill' | 'decode' | 'mixed';

/** Another name that a pod serves its model by. */
export interface OtherName {
  readonly name: string;
  /** A LoRA adapter's: the same tokens are other keys and values than the model's. */
  readonly isAdapter: boolean;
}

/** What does not change while a worker lives. */
export interface WorkerFacts {
  /** Served name. */
  readonly model: string;
  /** Of a pod: what else it answers to. */
  readonly otherNames?: readonly OtherName[];
  /** Content digest of the model's weights; empty: it does not say (openai). Two digests under one name are refused. */
  readonly modelDigest: string;
  /** Folder of tokenizer and chat template; empty: it does not say. */
  readonly modelDir: string;
  /** Of tokenizer and chat template in `modelDir`, as they lay there while it loaded; absent: it does not say. */
  readonly textDigest?: string | undefined;
  /** Of what says there what each token id means; absent: it does not say. */
  readonly tokenDigest?: string | undefined;
  readonly maxModelTokens: number;
  readonly vocabSize: number;
  readonly stopTokenIds: readonly number[];
  /** How its blocks are named: all workers of one model must agree to share an index. */
  readonly blockTokens: number;
  readonly hashAlgorithm: string;
  readonly hashSeed: string;
  readonly totalBlocks: number;
  /** Of a pod: data-parallel engines behind its address, each with blocks of its own; undefined: one, as far as it says. */
  readonly engines?: number | undefined;
  /** KV bytes of one block; 0: it does not say. */
  readonly blockBytes: number;
  /** Requests that it runs at most; undefined: it does not say. */
  readonly maxRunning: number | undefined;
  /** Tokens that it computes in one step at most; undefined: it does not say. */
  readonly maxStepTokens?: number | undefined;
  /** Tokens of one sequence that its pool holds at most, prompt and answer together; undefined: it does not say. */
  readonly maxTotalTokens?: number | undefined;
  /** First 16 hex digits of the namespace of each of its attention groups, as its cache node tells them; undefined: it does not say. */
  readonly namespaces: readonly string[] | undefined;
  /** Another one after each start of its process; empty: it does not say. */
  readonly bootEpoch: string;
}

/** As told last, with what was sent since added (`Fleet.sent`). Units as in `WorkerState` of @kvtier/routing. */
export interface WorkerLoad {
  readonly waiting: number;
  readonly running: number;
  readonly tokensAhead: number;
  /** Of these, those that the step computes which ran when it told; 0: none, or not known. */
  readonly stepTokens: number;
  /** When that step began, on our clock; of one that computes none, when tokens of the one before it came. 0: not known. */
  readonly stepBegunAtMs: number;
  readonly usedBlocks: number;
  readonly waitingBlocks: number;
  readonly freedBlocksPerS: number;
  readonly loadAheadS: number;
  readonly prefillTokensPerS: number;
  /** Of a step that computes prompts alone, besides its tokens; undefined or 0: not known. */
  readonly prefillStepS?: number;
  /** Of what decoding leaves of a target between tokens, the share that prompts get there; undefined or 0: it does not say. */
  readonly pacingTrust?: number;
  readonly stepS: number;
  readonly stepPerRequestS: number;
  /** By the KV index's media. */
  readonly loadBlocksPerS: readonly number[];
  /** When its own word of this came, on our clock (performance.now()); 0: never. */
  readonly toldAtMs: number;
}

export interface Worker {
  /** As routing policies number workers; of no other worker until this one has left. */
  readonly number: number;
  readonly record: WorkerRecord;
  readonly state: WorkerState;
  /** One line, of a worker that is silent, refused, or not reached yet. */
  readonly why: string | undefined;
  /** Known once it was ready. */
  readonly facts: WorkerFacts | undefined;
  readonly load: WorkerLoad;
  /** Where `load.prefillTokensPerS` is from: the worker's own requests, or what is usual for its model; undefined: nobody says. */
  readonly prefillRate?: 'measured' | 'assumed';
  readonly leaning?: Leaning | undefined;
  /** performance.now() since when it is joining or silent; undefined: it is neither, or is not to come back. */
  readonly awaySinceMs?: number | undefined;
}

/** One request's share of a worker's load, from being sent to its end. */
export interface Sent {
  /**
   * Its prompt is computed. `isTimed`: by this worker, just now, and all that it had for the request from being sent on was that prompt: so how long it
   * took says how fast the worker is. (A whole answer that comes at its end, or a prompt that another one computed, says nothing.)
   */
  firstToken(isTimed?: boolean): void;
  /** Once, however it ended. */
  ended(): void;
}
