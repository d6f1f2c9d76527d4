/**
 * ServerRecency, told to the servers in batches: before anything is reserved (which may evict), and soon after it was noted. Bounded;
 * what comes beyond is dropped and counted. Invariant: a block is used no later than its parent, so that chains shrink from their
 * tail (as the policies of `eviction` have it); across partitions, too. Times travel on the server's clock of
 * recency, which never goes back; its distance from ours is measured once a connection: among the uses of one node the order is exact.
 */
import type { HashKey, Namespace } from '@kvtier/identity';
import { fieldOf } from './directory.ts';
import type { RedisIndex } from './redis-index.ts';
import { partitionOf, type RedisService } from './service.ts';

const maxWaiting = 65_536;
const batchUses = 512;
const flushMs = 100;

interface Use {
  readonly namespace: Namespace;
  readonly hash: HashKey;
  readonly usedUs: number;
}

export class ServerRecency {
  readonly #index: RedisIndex;
  readonly #service: RedisService;
  /** By namespace and hash: the last use of each. */
  #waiting = new Map<string, Use>();
  #timer: NodeJS.Timeout | undefined;
  #lastUs = 0;
  dropped = 0;

  constructor(index: RedisIndex, service: RedisService) {
    this.#index = index;
    this.#service = service;
  }

  /** Chain order: the first is the most recent. */
  touch(namespace: Namespace, hashes: readonly HashKey[]): void {
    const firstUs = this.#next(hashes.length);
    for (const [i, hash] of hashes.entries()) {
      const entry = this.#index.get(namespace, hash);
      if (entry === undefined) continue;
      entry.usedUs = firstUs - i;
      this.#note({ namespace, hash, usedUs: entry.usedUs });
    }
  }

  /** The uses to write down for new blocks: just before that of the parent, if that is known; else now. Chain order. */
  usesOf(namespace: Namespace, blocks: readonly { hash: HashKey; parent: HashKey | undefined }[]): number[] {
    const firstUs = this.#next(blocks.length);
    const uses = new Map<HashKey, number>();
    return blocks.map(({ hash, parent }, i) => {
      const parentUs =
        parent === undefined ? undefined : (uses.get(parent) ?? this.#index.get(namespace, parent)?.usedUs);
      const usedUs = parentUs ? Math.min(firstUs - i, parentUs - 1) : firstUs - i;
      uses.set(hash, usedUs);
      return usedUs;
    });
  }

  /** Sends all that waits, in this turn; resolves when the servers know. */
  async flush(): Promise<void> {
    clearTimeout(this.#timer);
    this.#timer = undefined;
    if (this.#waiting.size === 0) return;
    const waiting = this.#waiting;
    this.#waiting = new Map();
    const { directories } = this.#service;
    if (!this.#service.reachable) return;
    const batches = directories.map((): { field: Buffer; usedUs: number }[] => []);
    for (const { namespace, hash, usedUs } of waiting.values()) {
      const use = { field: fieldOf(namespace, hash), usedUs };
      batches[partitionOf(hash, directories.length)]!.push(use);
    }
    const sent: Promise<void>[] = [];
    for (const [number, uses] of batches.entries()) {
      for (let at = 0; at < uses.length; at += batchUses) {
        sent.push(directories[number]!.touch(uses.slice(at, at + batchUses)));
      }
    }
    await Promise.all(sent);
  }

  /** The first of `count` times, each a microsecond before the one before it, and all later than any given so far. */
  #next(count: number): number {
    this.#lastUs = Math.max(performance.now() * 1000, this.#lastUs + count);
    return this.#lastUs;
  }

  #note(use: Use): void {
    const key = use.namespace.key + use.hash;
    if (this.#waiting.size >= maxWaiting && !this.#waiting.has(key)) {
      this.dropped++;
      return;
    }
    this.#waiting.set(key, use);
    this.#timer ??= setTimeout(() => {
      this.flush().catch((error: unknown) => this.#service.commandFailed(error));
    }, flushMs);
  }
}
