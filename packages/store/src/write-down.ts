/**
 * Write-through of committed blocks to one lower tier, in the background.
 *
 * Invariants: at most `maxWriteDownBytes` wait; only what is being written is pinned, so that a slow disk never keeps new
 * blocks out of the arena. A block that does not fit, that is evicted while it waits (chains go from their tail, so what
 * is left is still a prefix) or that the tier refuses is counted under its reason. Reads of the tier go first. Whatever
 * a batch ends with, its pins go and the queue moves on.
 */
import { KvError } from '@kvtier/errors';
import type { HashKey, Namespace } from '@kvtier/identity';
import type { Tier, WriteStatus } from '@kvtier/tiers';
import type { Counters } from './counters.ts';
import type { Failpoint } from './failpoints.ts';
import type { StoreLimits } from './limits.ts';
import type { Pins } from './pins.ts';
import type { ArenaTop, Clock, Log } from './ports.ts';

export interface WriteDownOptions {
  readonly tier: Tier;
  readonly arena: ArenaTop;
  readonly pins: Pins;
  readonly clock: Clock;
  readonly log: Log;
  readonly limits: StoreLimits;
  readonly counters: Counters;
  readonly failpoint: Failpoint | undefined;
  /** Something is being loaded. */
  readonly hasDemand: () => boolean;
}

interface Entry {
  readonly namespace: Namespace;
  readonly hash: HashKey;
  readonly slot: number;
  readonly payloadBytes: number;
}

export class WriteDown {
  readonly #options: WriteDownOptions;
  #queue: Entry[] = [];
  #head = 0;
  #bytes = 0;
  #inFlight = 0;
  #closed = false;
  #onIdle: (() => void) | undefined;

  constructor(options: WriteDownOptions) {
    this.#options = options;
  }

  /** Payload bytes that wait or are being written. */
  get pendingBytes(): number {
    return this.#bytes;
  }

  /** The block has just been published in the arena. Returns false, counted, when it will not be written. */
  add(namespace: Namespace, hash: HashKey, payloadBytes: number): boolean {
    const { tier, arena, limits, counters } = this.#options;
    const refused = this.#closed
      ? 'closing'
      : this.#bytes + payloadBytes > limits.maxWriteDownBytes
        ? 'queue_full'
        : '';
    if (refused !== '') {
      counters.add(`writedown.${tier.name}.refused.${refused}`);
      return false;
    }
    this.#queue.push({ namespace, hash, slot: arena.get(namespace, hash)!.slot, payloadBytes });
    this.#bytes += payloadBytes;
    return true;
  }

  /** Start what may be started now. Called after `add`, and when loads have been served. */
  pump(): void {
    const { limits, hasDemand } = this.#options;
    while (this.#head < this.#queue.length) {
      if (this.#inFlight >= (hasDemand() && !this.#closed ? limits.writeDownsUnderDemand : limits.writeDownsIdle))
        return;
      const batch = this.#takeBatch();
      if (batch.length === 0) continue; // evicted, all of them
      this.#inFlight++;
      void this.#write(batch);
    }
    if (this.#inFlight === 0) this.#onIdle?.();
  }

  /** Write what is queued, for at most `closeDrainMs`; drop, counted, what is left. */
  async close(): Promise<void> {
    const { clock, limits, counters, tier, log } = this.#options;
    this.#closed = true;
    const drained = await new Promise<boolean>((resolve) => {
      const cancel = clock.after(limits.closeDrainMs, () => resolve(false));
      this.#onIdle = () => {
        cancel();
        resolve(true);
      };
      this.pump();
    });
    if (drained) return;
    const dropped = this.#queue.splice(this.#head);
    counters.add(`writedown.${tier.name}.refused.closing`, dropped.length);
    for (const { payloadBytes } of dropped) this.#bytes -= payloadBytes;
    log.warn({ tier: tier.name, blocks: dropped.length }, 'closing: blocks were not written down in time');
  }

  /** The next blocks of one namespace that are still there, pinned. */
  #takeBatch(): Entry[] {
    const { arena, pins, counters, tier } = this.#options;
    const { namespace } = this.#queue[this.#head]!;
    const batch: Entry[] = [];
    let bytes = 0;
    for (let entry = this.#queue[this.#head]; entry?.namespace.key === namespace.key; entry = this.#queue[this.#head]) {
      if (batch.length > 0 && bytes + entry.payloadBytes > this.#options.limits.writeDownBatchBytes) break;
      this.#head++;
      if (arena.get(namespace, entry.hash)?.slot !== entry.slot) {
        counters.add(`writedown.${tier.name}.refused.evicted`);
        this.#bytes -= entry.payloadBytes;
        continue;
      }
      pins.pin(namespace, entry.hash);
      batch.push(entry);
      bytes += entry.payloadBytes;
    }
    if (this.#head > 1024 && this.#head * 2 > this.#queue.length) {
      this.#queue = this.#queue.slice(this.#head);
      this.#head = 0;
    }
    return batch;
  }

  /** Never rejects. */
  async #write(batch: readonly Entry[]): Promise<void> {
    const { tier, counters, failpoint, log } = this.#options;
    let statuses: readonly WriteStatus[] = [];
    try {
      failpoint?.('store.writedown.before');
      statuses = await tier.write(batch[0]!.namespace, batch);
      failpoint?.('store.writedown.after');
    } catch (error) {
      log.error(
        { tier: tier.name, reason: KvError.from(error).message },
        'a write-down threw; its blocks count as failed',
      );
    }
    for (const [index, entry] of batch.entries()) {
      const status = statuses[index] ?? 'failed';
      counters.add(`writedown.${tier.name}.${status === 'refused' ? 'refused.tier' : status}`);
      this.#forget(entry);
    }
    this.#inFlight--;
    this.pump();
  }

  #forget(entry: Entry): void {
    this.#bytes -= entry.payloadBytes;
    this.#options.pins.unpin(entry.namespace, entry.hash);
  }
}
