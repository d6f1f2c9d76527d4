/** What the choice asks of others, and no more: the registry's fleet and the KV index' feed are these, and tests have doubles. */
import type { Keys, Match } from '@kvtier/kv-index';
import type { Sent, Worker } from '@kvtier/registry';

/** What a request adds to a worker's load until its own word of it comes. */
export interface Share {
  /** Prompt tokens that it has to compute. */
  readonly tokensAhead: number;
  /** KV blocks that it will hold. */
  readonly blocks: number;
  /** Seconds that it brings in blocks for. */
  readonly loadS: number;
}

export interface Workers {
  /** By number; the same objects as long as the workers stay. */
  workers(): readonly (Worker | undefined)[];
  /** A worker came, went, changed its state or told its load. Returns what ends it. */
  onChange(listener: () => void): () => void;
  sent(number: number, share: Share): Sent;
}

/** What can be brought to any worker from where it does not lie at hand: other hosts' nodes, shared tiers. */
export interface Elsewhere {
  /** Leading blocks. */
  readonly blocks: number;
  /** The slowest medium of these, by the index' numbers. */
  readonly medium: number;
}

export interface Holdings {
  /** One for each number, in their order. */
  match(keys: Keys, numbers: readonly number[]): readonly Match[];
  elsewhere?(keys: Keys): Elsewhere;
  /** The request goes to this worker: where its events are missing, that says what it will hold. */
  sent?(number: number, keys: Keys): void;
}
