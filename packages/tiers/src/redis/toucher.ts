/**
 * Recency, told to the servers in batches: before anything is reserved (which may evict), and soon after it was noted. Bounded;
 * what comes beyond is dropped and counted. Parents come after their children in every batch, so that they leave last.
 */
import type { HashKey, Namespace } from '@kvtier/identity';
import type { BlockIndex } from './block-index.ts';
import { fieldOf } from './directory.ts';
import { partitionOf, type RedisService } from './service.ts';

const maxWaiting = 65_536;
const batchFields = 512;
const flushMs = 100;
/** An ancestor is told that often at most while its descendants are written. */
const ancestorMs = 2000;
const maxAncestors = 8192;

export class Toucher {
  readonly #index: BlockIndex;
  readonly #service: RedisService;
  /** By namespace and hash; in the order to be told. */
  #waiting = new Map<string, { readonly namespace: Namespace; readonly hash: HashKey }>();
  #timer: NodeJS.Timeout | undefined;
  dropped = 0;

  constructor(index: BlockIndex, service: RedisService) {
    this.#index = index;
    this.#service = service;
  }

  /** Chain order. */
  touch(namespace: Namespace, hashes: readonly HashKey[]): void {
    const nowMs = performance.now();
    for (let at = hashes.length - 1; at >= 0; at--) {
      const hash = hashes[at]!;
      const entry = this.#index.get(namespace, hash);
      if (entry === undefined) continue;
      entry.toldMs = nowMs;
      this.#note(namespace, hash);
    }
  }

  /** A block was stored: those before it in its chain are used, too. */
  touchAncestors(namespace: Namespace, parent: HashKey | undefined): void {
    const nowMs = performance.now();
    let next = parent;
    for (let count = 0; next !== undefined && count < maxAncestors; count++) {
      const entry = this.#index.get(namespace, next);
      if (entry === undefined || nowMs - entry.toldMs < ancestorMs) return;
      entry.toldMs = nowMs;
      this.#note(namespace, next);
      next = entry.parent;
    }
  }

  /** Sends all that waits, in this turn; resolves when the servers know. */
  async flush(): Promise<void> {
    clearTimeout(this.#timer);
    this.#timer = undefined;
    if (this.#waiting.size === 0) return;
    const waiting = this.#waiting;
    this.#waiting = new Map();
    const { directories } = this.#service;
    if (!this.#service.reachable || directories.length === 0) return;
    const batches = directories.map((): Buffer[] => []);
    for (const { namespace, hash } of waiting.values()) {
      batches[partitionOf(hash, directories.length)]!.push(fieldOf(namespace, hash));
    }
    const sent: Promise<void>[] = [];
    for (const [number, fields] of batches.entries()) {
      for (let at = 0; at < fields.length; at += batchFields) {
        sent.push(directories[number]!.touch(fields.slice(at, at + batchFields)));
      }
    }
    await Promise.all(sent);
  }

  #note(namespace: Namespace, hash: HashKey): void {
    const key = namespace.key + hash;
    this.#waiting.delete(key);
    if (this.#waiting.size >= maxWaiting) {
      this.dropped++;
      return;
    }
    this.#waiting.set(key, { namespace, hash });
    this.#timer ??= setTimeout(() => {
      this.flush().catch((error: unknown) => this.#service.commandFailed(error));
    }, flushMs);
  }
}
