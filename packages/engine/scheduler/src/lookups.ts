/**
 * What the tier holds of a waiting request: asked while it waits, as often as its turn comes, and given up at a deadline.
 * Asking costs no time; the answer may be still out.
 */
import type { Connector } from './connector.ts';
import type { EngineRequest } from './request.ts';
import type { Clock } from './types.ts';

export interface LookupsOptions {
  readonly connector: Connector;
  readonly clock: Clock;
  readonly deadlineMs: number;
  /** A request that waits for an answer waits no longer. */
  readonly wake: () => void;
}

/** What should come from the tier. */
export interface ToLoad {
  /** Blocks before those that are loaded, to be computed meanwhile. */
  readonly head: number;
  readonly blocks: number;
}

const nothing: ToLoad = { head: 0, blocks: 0 };

export class Lookups {
  readonly #options: LookupsOptions;
  #expiredCount = 0;

  constructor(options: LookupsOptions) {
    this.#options = options;
  }

  /** Requests whose answer did not come in time. */
  get expiredCount(): number {
    return this.#expiredCount;
  }

  /** Of the chain's blocks `localBlocks`..`end`-1, which should come from the tier. `isIdle`: nothing else is computed here. */
  blocksToLoad(request: EngineRequest, localBlocks: number, end: number, isIdle: boolean): ToLoad | 'pending' {
    const { connector, clock, deadlineMs, wake } = this.#options;
    const missing = end - localBlocks;
    if (!request.mayLoad || missing <= 0 || !connector.attached) return nothing;
    const hashes = hashesOf(request, end);
    const match = connector.match(request.id, hashes, localBlocks, isIdle);
    if (match.state === 'known') {
      request.cancelMatchDeadline?.();
      request.cancelMatchDeadline = undefined;
      const head = Math.min(match.head ?? 0, missing);
      return { head, blocks: Math.min(match.blocks, missing - head) };
    }
    request.cancelMatchDeadline ??= clock.after(deadlineMs, () => {
      request.cancelMatchDeadline = undefined;
      // A request deep in the queue is not asked again until its turn comes: perhaps the answer is there.
      if (connector.match(request.id, hashes, localBlocks).state === 'pending') {
        request.mayLoad = false;
        this.#expiredCount++;
        connector.forget(request.id);
      }
      wake();
    });
    return 'pending';
  }

  /** Its turn has not come yet: what is known of its chain's first `end` blocks is asked for anew, if that is old. */
  renew(request: EngineRequest, end: number): void {
    const { connector } = this.#options;
    if (request.mayLoad && end > 0 && connector.attached) connector.renew?.(request.id, hashesOf(request, end));
  }
}

/** Of the chain's first `end` blocks. */
function hashesOf({ hashes: { packed, blockCount } }: EngineRequest, end: number): Buffer {
  return packed.subarray(0, (packed.length / blockCount) * end);
}
