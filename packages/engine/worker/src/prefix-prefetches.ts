/**
 * Prefixes that a coordinator expects this worker to be asked for: their blocks are brought into its cache node's arena, behind all that
 * requests wait for. Nothing is computed, and nothing of the engine is held.
 *
 * Nobody says when the blocks of one are there, so each counts until its deadline. Where there are too many, the oldest gives way: what it
 * was to bring is there most likely, and a newer guess is the better one.
 *
 * Invariants: at most `maxOpen` at once; each is called off at its deadline, whatever has become of it.
 */
import { KvError } from '@kvtier/errors';
import { type ChainHasher, SequenceHashes } from '@kvtier/identity';
import type { Connector } from '@kvtier/scheduler';

/** What of the connector it uses. */
export type Bringing = Pick<Connector, 'attached' | 'prefetch' | 'forget'>;

export interface PrefixPrefetchesOptions {
  readonly connector: Bringing;
  readonly hasher: ChainHasher;
  readonly vocabSize: number;
  readonly maxTokens: number;
  readonly maxOpen?: number;
}

export interface PrefetchAsked {
  readonly promptTokenIds: readonly number[];
  readonly cacheSalt: string;
  readonly deadlineMs: number;
}

const longestMs = 600_000;

export class PrefixPrefetches {
  readonly #options: PrefixPrefetchesOptions;
  readonly #maxOpen: number;
  /** By the connector's name for each, what calls it off. */
  readonly #open = new Map<string, NodeJS.Timeout>();
  #count = 0;

  constructor(options: PrefixPrefetchesOptions) {
    this.#options = options;
    this.#maxOpen = options.maxOpen ?? 16;
  }

  get open(): number {
    return this.#open.size;
  }

  /** How many blocks the node was asked for; 0: there is none. @throws KvError REQUEST */
  begin({ promptTokenIds, cacheSalt, deadlineMs }: PrefetchAsked): number {
    const { connector, hasher, vocabSize, maxTokens } = this.#options;
    const count = promptTokenIds.length;
    if (count > maxTokens)
      throw new KvError('REQUEST', `prefetch: ${count} tokens; at most ${maxTokens} fit into this worker`);
    if (!(deadlineMs >= 1 && deadlineMs <= longestMs))
      throw new KvError('REQUEST', `prefetch: deadlineMs is ${deadlineMs}; use 1 to ${longestMs} ms`);
    for (const id of promptTokenIds)
      if (id >= vocabSize) throw new KvError('REQUEST', `prefetch: token ${id} is not in the vocabulary`);
    if (!connector.attached) return 0;
    const hashes = new SequenceHashes(hasher, cacheSalt ? { cacheSalt } : {});
    hashes.append(Uint32Array.from(promptTokenIds));
    if (hashes.blockCount === 0) return 0;
    if (this.#open.size >= this.#maxOpen) this.#end(this.#open.keys().next().value!);
    const name = `prefetch#${this.#count++}`;
    connector.prefetch(name, hashes.packed, 0);
    this.#open.set(
      name,
      setTimeout(() => this.#end(name), deadlineMs),
    );
    return hashes.blockCount;
  }

  close(): void {
    for (const name of [...this.#open.keys()]) this.#end(name);
  }

  #end(name: string): void {
    clearTimeout(this.#open.get(name));
    this.#open.delete(name);
    this.#options.connector.forget(name);
  }
}
