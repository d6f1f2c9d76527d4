/** What the choice asks of others, and no more: the registry's fleet and the KV index' feed are these, and tests have doubles. */
import type { Keys, Match } from '@kvtier/kv-index';
import type { Sent, Worker } from '@kvtier/registry';

/** What a request adds to a worker's load until its own word of it comes. */
export interface Share {
  /** As in the request that the worker gets: its word names it then. */
  readonly requestId: string;
  /** Prompt tokens that it has to compute. */
  readonly tokensAhead: number;
  /** KV blocks that it will hold. */
  readonly blocks: number;
  /** Seconds that it brings in blocks for. */
  readonly loadS: number;
  /** As soon as its prompt is computed something of its answer comes; else the first of it may be its end. */
  readonly tellsFirstToken?: boolean;
}

export interface Workers {
  /** By number; the same objects as long as the workers stay. */
  workers(): readonly (Worker | undefined)[];
  /** A worker came, went, or changed its state or facts. Returns what ends it. */
  onChange(listener: () => void): () => void;
  /** A worker told its load. Returns what ends it. */
  onLoad(listener: () => void): () => void;
  sent(number: number, share: Share): Sent;
}

/** What a worker has at hand of a prompt, and what more it can have brought. */
export interface Held extends Match {
  /** How many blocks more can be brought in from elsewhere, and from which medium (by the index' numbers); undefined: none. */
  readonly remoteBlocks?: number;
  readonly remoteMedium?: number;
  /** Nobody knows: there is no index to ask. */
  readonly isUnknown?: boolean;
}

export interface Holdings {
  /** Of one model's workers: one for each number, in their order. */
  match(model: string, keys: Keys, numbers: readonly number[]): readonly Held[];
  /** What some of these workers hold is not known but guessed. */
  guesses?(model: string, numbers: readonly number[]): boolean;
  /** The request goes to this worker: where its events are missing, that says what it will hold. */
  sent?(model: string, number: number, keys: Keys): void;
}
