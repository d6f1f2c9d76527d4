/**
 * Blocks of the arena of which an engine says that their bytes were wrong. It may be right; or its own memory is sick, and what it
 * says of blocks that others use is worth nothing. So the node looks for itself, off the event loop.
 *
 * Invariants: a block that is not sound leaves the arena; one that is stays. Below the arena nothing is removed: each tier verifies
 * what it reads, whenever it reads it. At most `maxVerifiedBlocks` are looked at at a time; what is more leaves the arena unseen.
 */
import { KvError } from '@kvtier/errors';
import type { HashKey, Namespace } from '@kvtier/identity';
import type { Log } from '@kvtier/runtime';
import type { Counters } from './counters.ts';
import type { StoreLimits } from './limits.ts';
import type { Pins } from './pins.ts';
import type { ArenaTop, VerifyBlocks } from './ports.ts';

export interface SuspectsOptions {
  readonly arena: ArenaTop;
  readonly pins: Pins;
  readonly verify: VerifyBlocks;
  readonly log: Log;
  readonly limits: StoreLimits;
  readonly counters: Counters;
}

export class Suspects {
  readonly #options: SuspectsOptions;
  #blocks = 0;
  readonly #open = new Map<Promise<void>, { readonly namespace: Namespace; readonly hashes: ReadonlySet<HashKey> }>();

  constructor(options: SuspectsOptions) {
    this.#options = options;
  }

  /** These are to be looked at; each name once. */
  add(namespace: Namespace, hashes: readonly HashKey[]): void {
    const { arena, pins, limits, counters } = this.#options;
    counters.add('release.corrupt', hashes.length);
    const listed = hashes.filter((hash) => arena.get(namespace, hash) !== undefined);
    const seen = listed.slice(0, Math.max(0, limits.maxVerifiedBlocks - this.#blocks));
    const unseen = listed.slice(seen.length);
    counters.add('release.corrupt.unseen', unseen.length);
    pins.remove(namespace, unseen, 'corrupt');
    if (seen.length === 0) return;
    this.#blocks += seen.length;
    for (const hash of seen) pins.pin(namespace, hash);
    const look: Promise<void> = this.#look(namespace, seen).finally(() => {
      this.#blocks -= seen.length;
      this.#open.delete(look);
    });
    this.#open.set(look, { namespace, hashes: new Set(seen) });
  }

  /** Resolves when it is known which of these are sound; undefined: none of them is being looked at. */
  settled(namespace: Namespace, hashes: readonly HashKey[]): Promise<unknown> | undefined {
    if (this.#open.size === 0) return undefined;
    const looks = [...this.#open].filter(
      ([, of]) => of.namespace === namespace && hashes.some((hash) => of.hashes.has(hash)),
    );
    return looks.length === 0 ? undefined : Promise.all(looks.map(([look]) => look));
  }

  /** Resolves when nothing is being looked at. */
  async close(): Promise<void> {
    await Promise.all(this.#open.keys());
  }

  /** Never rejects. */
  async #look(namespace: Namespace, hashes: readonly HashKey[]): Promise<void> {
    const { arena, pins, verify, log, counters } = this.#options;
    const blocks = hashes.map((hash) => ({ hash, ...arena.get(namespace, hash)! }));
    let sound: readonly boolean[] = [];
    try {
      sound = await verify(namespace, blocks);
    } catch (error) {
      log.error({ reason: KvError.from(error).message }, 'blocks of the arena could not be verified; they are dropped');
    }
    const wrong = hashes.filter((_, at) => sound[at] !== true);
    pins.remove(namespace, wrong, 'corrupt');
    for (const hash of hashes) pins.unpin(namespace, hash);
    const unfounded = hashes.length - wrong.length;
    counters.add('release.corrupt.found', wrong.length);
    counters.add('release.corrupt.unfounded', unfounded);
    if (unfounded > 0)
      log.warn(
        { blocks: unfounded },
        'an engine found wrong bytes in blocks that are sound here; look at its memory and its GPU',
      );
  }
}
