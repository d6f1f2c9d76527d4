/**
 * ServerRecency, told to the servers in batches: before anything is reserved (which may evict), and soon after it was noted. Bounded;
 * what comes beyond is dropped and counted. Invariant: a block is used no later than its parent, so that chains shrink from their
 * tail (as the policies of `eviction` have it); across partitions, too. Times travel on the server's clock of
 * recency, which never goes back; its distance from ours is measured once a connection: among the uses of one node the order is exact.
 */
import type { HashKey, Namespace } from '@kvtier/identity';
import { fieldOf } from './directory.ts';
import { partitionOf } from './partitions.ts';
import type { RedisIndex } from './redis-index.ts';
import type { RedisService } from './service.ts';

const maxWaiting = 65_536;
const batchUses = 512;
/** Uses that are sent in one turn of the event loop: some 15 ms. */
const turnUses = 4096;
const flushMs = 100;

interface Use {
  readonly namespace: Namespace;
  readonly hash: HashKey;
  readonly usedUs: number;
}

/** `sent`: when all is on its way, in the order of its use; undefined: it is now. `known`: when the servers have said so, or refused. */
interface Flush {
  readonly sent: Promise<void> | undefined;
  readonly known: Promise<void>;
}

export class ServerRecency {
  readonly #index: RedisIndex;
  readonly #service: RedisService;
  /** By namespace and hash: the last use of each. */
  readonly #waiting = new Map<string, Use>();
  /** While some of it is still to be sent: who asks meanwhile waits for the same. */
  #flushing: Flush | undefined;
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

  /** Sends all that waits, a share of it in each turn. */
  flush(): Flush {
    clearTimeout(this.#timer);
    this.#timer = undefined;
    if (this.#flushing !== undefined) return this.#flushing;
    const answers: Promise<void>[] = [];
    const all = async (): Promise<void> => void (await Promise.all(answers));
    this.#sendSome(answers);
    if (this.#waiting.size === 0) return { sent: undefined, known: all() };
    const sent = (async () => {
      // What is used meanwhile keeps nobody waiting: it goes next time.
      for (let turns = Math.ceil(this.#waiting.size / turnUses); turns > 0; turns--) {
        await new Promise<void>((resolve) => void setImmediate(resolve));
        this.#sendSome(answers);
      }
      this.#flushing = undefined;
      if (this.#waiting.size > 0) this.#flushLater();
    })();
    this.#flushing = { sent, known: sent.then(all) };
    return this.#flushing;
  }

  /** The oldest of what waits: parents before their children. */
  #sendSome(answers: Promise<void>[]): void {
    const { directories, reachable } = this.#service;
    if (!reachable) this.#waiting.clear();
    const batches = directories.map((): { field: Buffer; usedUs: number }[] => []);
    let taken = 0;
    for (const [key, { namespace, hash, usedUs }] of this.#waiting) {
      if (++taken > turnUses) break;
      this.#waiting.delete(key);
      batches[partitionOf(hash, directories.length)]!.push({ field: fieldOf(namespace, hash), usedUs });
    }
    for (const [number, uses] of batches.entries()) {
      for (let at = 0; at < uses.length; at += batchUses) {
        const directory = directories[number]!;
        // Whoever stores in another partition waits for none of it.
        const told = directory.touch(uses.slice(at, at + batchUses));
        answers.push(told.catch((error: unknown) => this.#service.commandFailed(error, directory)));
      }
    }
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
    this.#flushLater();
  }

  #flushLater(): void {
    this.#timer ??= setTimeout(() => {
      this.flush();
    }, flushMs);
  }
}
