/**
 * Writing blocks of the arena to one lower tier, in the background, by the tier's policy:
 *
 *     through    at commit
 *     selective  at commit or a later use, when the tier's admission policy says so
 *     back       before the arena will evict it: at most `maxDirtyBytes` of the arena are not written, coldest go first
 *     none       never
 *
 * Invariants: at most `maxWriteDownBytes` wait; a block waits once; only what is being written is pinned, so that a slow
 * tier never keeps new blocks out of the arena. A block that does not fit, that is evicted while it waits and not made anew
 * (chains go from their tail, so what is left is still a prefix) or that the tier refuses is counted under its reason, and
 * tried again when it is used again. A tier that is out of service is waited for, for a minute at most: what is queued
 * stays there, and what it refused in those moments is tried once more, without a part of its tenant's quota until then; so
 * is what a part of it refused, sooner. Reads of the tier go first; a burst of commits is written when it is over
 * (burst.ts). Whatever a batch ends with, its pins go and the queue moves on.
 */
import { KvError } from '@kvtier/errors';
import type { AdmissionPolicy } from '@kvtier/eviction';
import type { HashKey, Namespace } from '@kvtier/identity';
import type { Clock, Log } from '@kvtier/runtime';
import type { WriteStatus } from '@kvtier/tiers';
import { Burst } from './burst.ts';
import type { Counters } from './counters.ts';
import type { Failpoint } from './failpoints.ts';
import type { StoreLimits } from './limits.ts';
import type { Pins } from './pins.ts';
import type { ArenaTop } from './ports.ts';
import type { Tenants } from './tenants.ts';
import type { TierGate } from './tier-gate.ts';

export type WritePolicy = 'through' | 'back' | 'selective' | 'none';

export interface WriteDownOptions {
  readonly gate: TierGate;
  readonly policy: WritePolicy;
  /** A burst of commits is over when so long nothing came; 0: nothing is held back. */
  readonly settleMs: number;
  readonly admission: AdmissionPolicy;
  readonly arena: ArenaTop;
  readonly pins: Pins;
  readonly clock: Clock;
  readonly log: Log;
  readonly limits: StoreLimits;
  readonly counters: Counters;
  readonly failpoint: Failpoint | undefined;
  /** The end of an object is over. */
  readonly isOver: (expiresS: number) => boolean;
  /** Who pays for a block. */
  readonly ownerOf: (namespace: Namespace, hash: HashKey) => number;
  readonly tenants: Tenants;
}

/** Blocks of the queue that one turn finds evicted and passes over; some milliseconds. */
const maxPassedOver = 2_048;
/** A block waits so long for a tier that is out; failovers and restarts take less, and what is out for longer may be out for days. */
const maxOutUs = 60e6;
/** And so long for a part that is out: some tiers learn by writes alone that it is back (S3's are refused until one is taken). */
const maxPartOutUs = 15e6;

interface Entry {
  readonly namespace: Namespace;
  readonly hash: HashKey;
  readonly payloadBytes: number;
  readonly tenant: number;
  /** It counts for its tenant. */
  isReserved: boolean;
  /** Where it was when we looked last: what is evicted and made anew is elsewhere. */
  slot: number;
  /** End of the object, when it is written. */
  expiresS: number;
  /** When it was queued, or refused by a tier that was out. */
  sinceUs: number;
  /** It was refused so. */
  isAgain: boolean;
}

export class WriteDown {
  readonly policy: WritePolicy;
  readonly #options: WriteDownOptions;
  readonly #burst: Burst;
  #queue: Entry[] = [];
  #head = 0;
  #bytes = 0;
  #inFlight = 0;
  #closed = false;
  /** Refused while the tier was out, as a whole or in part: to be tried once more. At most half of what may wait, or nothing else is tried. */
  #again: Entry[] = [];
  #againBytes = 0;
  /** When the tier was found out of service; undefined: it is there, as far as we know. */
  #outUs: number | undefined;
  /** Names of what waits or is being written. */
  readonly #pending = new Set<string>();
  /** Of 'back': not written yet, least recently used first. */
  readonly #dirty = new Map<string, Pick<Entry, 'namespace' | 'hash' | 'payloadBytes'>>();
  #dirtyBytes = 0;
  #onIdle: (() => void) | undefined;
  #cancelLater: (() => void) | undefined;
  /** A turn had no time to pass over more. */
  #cancelNextTurn: (() => void) | undefined;

  constructor(options: WriteDownOptions) {
    this.#options = options;
    this.policy = options.gate.tier.supports.writable ? options.policy : 'none';
    const { settleMs, clock, limits } = options;
    this.#burst = new Burst({ settleMs, heldBytes: limits.maxHeldBytes, clock, onOver: () => this.pump() });
  }

  /** Payload bytes that wait or are being written. */
  get pendingBytes(): number {
    return this.#bytes;
  }

  /** Payload bytes in the arena that are to be written before they are evicted. */
  get dirtyBytes(): number {
    return this.#dirtyBytes;
  }

  /** The block lies in the arena and not in the tier: it has just been made, or is used (again). */
  offer(namespace: Namespace, hash: HashKey, payloadBytes: number): void {
    const { admission, clock } = this.#options;
    if (this.policy === 'none' || this.#pending.has(namespace.key + hash)) return;
    if (this.policy === 'back') this.#soil(namespace, hash, payloadBytes);
    else if (this.policy === 'through' || admission.admit(namespace.key, hash, payloadBytes, clock.nowUs()))
      this.#add(namespace, hash, payloadBytes);
    else this.#options.counters.add(`writedown.${this.#options.gate.tier.name}.refused.admission`);
  }

  /** The block has come from a slower tier. */
  promote(namespace: Namespace, hash: HashKey, payloadBytes: number): void {
    const { counters, gate, admission, clock } = this.#options;
    if (this.policy === 'none' || this.#pending.has(namespace.key + hash)) return;
    if (this.policy === 'selective' && !admission.admit(namespace.key, hash, payloadBytes, clock.nowUs())) {
      counters.add(`writedown.${gate.tier.name}.refused.admission`);
    } else if (this.#add(namespace, hash, payloadBytes)) counters.add(`promotion.blocks.${gate.tier.name}`);
  }

  /** The block has left the arena. */
  gone(namespace: Namespace, hash: HashKey): void {
    if (this.#dirty.size === 0) return;
    if (this.#clean(namespace.key + hash)) this.#refuse('evicted');
  }

  /** Start what may be started now. Called after `offer`, and when reads have ended. */
  pump(): void {
    const { limits, gate } = this.#options;
    if (this.#burst.holds(this.#bytes - this.#againBytes) || this.#cancelNextTurn !== undefined) return;
    let passedOver = 0;
    while (this.#head < this.#queue.length) {
      if (passedOver >= maxPassedOver) {
        this.#pumpNextTurn();
        return;
      }
      const { state } = gate;
      if (!this.#closed && (state === 'open' || this.#outUs !== undefined)) {
        if (this.#giveUpFirst()) {
          passedOver++;
          continue;
        }
        this.#pumpLater(); // it waits; what is evicted meanwhile is counted
        break;
      }
      const slowly = (gate.busy && !this.#closed) || state === 'half_open';
      if (this.#inFlight >= (slowly ? limits.writeDownsUnderDemand : limits.writeDownsIdle)) return;
      const { batch, gone } = this.#takeBatch(maxPassedOver - passedOver);
      passedOver += gone;
      if (batch.length === 0) continue; // evicted, all of them
      this.#inFlight++;
      void this.#write(batch);
    }
    if (this.#inFlight === 0) this.#onIdle?.();
  }

  /** Write what is queued or dirty, for at most `closeDrainMs`; drop, counted, what is left. */
  async close(): Promise<void> {
    const { clock, limits, gate, log } = this.#options;
    this.#addDirty();
    this.#closed = true;
    this.#burst.end();
    this.#cancelLater?.();
    this.#tryAgain();
    const drained = await new Promise<boolean>((resolve) => {
      const cancel = clock.after(limits.closeDrainMs, () => resolve(false));
      this.#onIdle = () => {
        cancel();
        resolve(true);
      };
      this.pump();
    });
    if (drained) return;
    this.#cancelNextTurn?.();
    const dropped = this.#queue.splice(this.#head);
    this.#refuse('closing', dropped.length);
    for (const entry of dropped) this.#forget(entry);
    log.warn({ tier: gate.tier.name, blocks: dropped.length }, 'closing: blocks were not written down in time');
  }

  /** Nothing else may ever happen that would pump. */
  #pumpLater(): void {
    const { clock, limits } = this.#options;
    this.#cancelLater ??= clock.after(limits.breakerOpenMs, () => {
      this.#cancelLater = undefined;
      this.#lookAgain();
      this.pump();
    });
  }

  /** Whether the tier is out, as a whole or in part. */
  #isOut(): boolean {
    const { gate, clock } = this.#options;
    const { inService, outOfServiceReason } = gate.tier.stats();
    this.#outUs = inService ? undefined : (this.#outUs ?? clock.nowUs());
    return !inService || outOfServiceReason !== '';
  }

  /** A tier that was out may be back. Of one that is still out in part, what it refused is tried when its time is over. */
  #lookAgain(): void {
    const [first] = this.#again;
    if (this.#outUs === undefined && first === undefined) return;
    const isOut = this.#isOut();
    if (first === undefined) return;
    const mostUs = this.#outUs === undefined ? maxPartOutUs : maxOutUs;
    if (!isOut || this.#options.clock.nowUs() - first.sinceUs > mostUs) this.#tryAgain();
    else this.#pumpLater();
  }

  /** False: not a second time, or too many do. */
  #waitsAgain(entry: Entry): boolean {
    const { limits, clock } = this.#options;
    if (entry.isAgain || this.#againBytes + entry.payloadBytes > limits.maxWriteDownBytes / 2) return false;
    entry.isAgain = true;
    entry.sinceUs = clock.nowUs();
    // Or each that is refused would cost its tenant one that can be read.
    this.#settle(entry);
    this.#again.push(entry);
    this.#againBytes += entry.payloadBytes;
    this.#pumpLater();
    return true;
  }

  #tryAgain(): void {
    if (this.#again.length === 0) return;
    this.#queue = [...this.#again, ...this.#queue.slice(this.#head)];
    this.#head = 0;
    this.#again = [];
    this.#againBytes = 0;
  }

  /** The tier is out. False: the first of the queue waits on; true: it has waited for too long, or there is nothing left to write. */
  #giveUpFirst(): boolean {
    if (this.#outUs === undefined) return false;
    const entry = this.#queue[this.#head]!;
    const isTooLong = this.#options.clock.nowUs() - Math.max(entry.sinceUs, this.#outUs) > maxOutUs;
    const why = this.#whyNot(entry) || (isTooLong ? 'tier' : '');
    if (why === '') return false;
    this.#head++;
    this.#cutQueue();
    this.#refuse(why);
    this.#forget(entry);
    return true;
  }

  /** '': the block is there, or there again, and its end is not over. */
  #whyNot(entry: Entry): string {
    const { arena, isOver } = this.#options;
    const block = arena.get(entry.namespace, entry.hash);
    if (block === undefined || block.payloadBytes !== entry.payloadBytes) return 'evicted';
    entry.slot = block.slot;
    entry.expiresS = block.expiresS;
    return isOver(block.expiresS) ? 'expired' : '';
  }

  /** False: its tenant has no room for it. */
  #reserve(entry: Entry): boolean {
    const { tenants, gate } = this.#options;
    entry.isReserved ||= tenants.reserve(entry.tenant, gate.bit, entry.payloadBytes);
    return entry.isReserved;
  }

  #settle(entry: Entry): void {
    if (!entry.isReserved) return;
    entry.isReserved = false;
    this.#options.tenants.settle(entry.tenant, this.#options.gate.bit, entry.payloadBytes);
  }

  /** The queue goes on then; until then with nothing, whoever pumps. */
  #pumpNextTurn(): void {
    this.#cancelNextTurn = this.#options.clock.after(0, () => {
      this.#cancelNextTurn = undefined;
      this.pump();
    });
  }

  #refuse(reason: string, count = 1): void {
    this.#options.counters.add(`writedown.${this.#options.gate.tier.name}.refused.${reason}`, count);
  }

  /** Returns false, counted, when it will not be written. */
  #add(namespace: Namespace, hash: HashKey, payloadBytes: number): boolean {
    const { gate, arena, limits, ownerOf, clock } = this.#options;
    const { slot, expiresS } = arena.get(namespace, hash)!;
    const tenant = ownerOf(namespace, hash);
    const sinceUs = clock.nowUs();
    const traits = { isReserved: false, isAgain: false };
    const entry: Entry = { namespace, hash, slot, payloadBytes, tenant, expiresS, sinceUs, ...traits };
    const isFull = (): boolean => this.#bytes + payloadBytes > limits.maxWriteDownBytes;
    while (isFull() && this.#head < this.#queue.length && this.#giveUpFirst());
    const refused = this.#closed
      ? 'closing'
      : !gate.available
        ? 'breaker'
        : isFull()
          ? 'queue_full'
          : !this.#reserve(entry)
            ? 'quota'
            : '';
    if (refused !== '') {
      this.#refuse(refused);
      return false;
    }
    this.#burst.queued(this.#bytes === this.#againBytes);
    this.#queue.push(entry);
    this.#pending.add(namespace.key + hash);
    this.#bytes += payloadBytes;
    return true;
  }

  /** It is to be written before it goes; the coldest of those that are too many are written now. */
  #soil(namespace: Namespace, hash: HashKey, payloadBytes: number): void {
    const key = namespace.key + hash;
    this.#clean(key);
    this.#dirty.set(key, { namespace, hash, payloadBytes });
    this.#dirtyBytes += payloadBytes;
    for (const [oldest, entry] of this.#dirty) {
      if (this.#dirtyBytes <= this.#options.limits.maxDirtyBytes) return;
      this.#clean(oldest);
      this.#add(entry.namespace, entry.hash, entry.payloadBytes);
    }
  }

  /**
   * All that is dirty, hottest first, and before each block what precedes it in its chain: should there not be time for all of it, what is
   * written is what will be asked for, and can be found.
   */
  #addDirty(): void {
    for (const [hottest, { namespace }] of [...this.#dirty].reverse()) {
      const path: { readonly hash: HashKey; readonly payloadBytes: number }[] = [];
      for (let key = hottest, entry = this.#dirty.get(key); entry !== undefined; entry = this.#dirty.get(key)) {
        this.#clean(key);
        path.push(entry);
        key = namespace.key + (this.#options.arena.get(namespace, entry.hash)?.parent ?? '');
      }
      for (const { hash, payloadBytes } of path.reverse()) this.#add(namespace, hash, payloadBytes);
    }
  }

  #clean(key: string): boolean {
    const entry = this.#dirty.get(key);
    if (entry === undefined) return false;
    this.#dirty.delete(key);
    this.#dirtyBytes -= entry.payloadBytes;
    return true;
  }

  /** The next blocks of one namespace that are still there, pinned; of those that are `gone` it passes over `most`. */
  #takeBatch(most: number): { readonly batch: readonly Entry[]; readonly gone: number } {
    const { pins, limits } = this.#options;
    const { writeDownBatchBlocks, writeDownBatchBytes } = limits;
    const { namespace } = this.#queue[this.#head]!;
    const batch: Entry[] = [];
    let bytes = 0;
    let gone = 0;
    for (let entry = this.#queue[this.#head]; entry?.namespace.key === namespace.key; entry = this.#queue[this.#head]) {
      if (batch.length >= writeDownBatchBlocks || gone >= most) break;
      if (batch.length > 0 && bytes + entry.payloadBytes > writeDownBatchBytes) break;
      this.#head++;
      const why = this.#whyNot(entry) || (this.#reserve(entry) ? '' : 'quota');
      if (why !== '') {
        gone++;
        this.#refuse(why);
        this.#forget(entry);
        continue;
      }
      pins.pin(namespace, entry.hash);
      batch.push(entry);
      bytes += entry.payloadBytes;
    }
    this.#cutQueue();
    return { batch, gone };
  }

  /** What is in front of its head goes, now and then. */
  #cutQueue(): void {
    if (this.#head <= 1024 || this.#head * 2 <= this.#queue.length) return;
    this.#queue = this.#queue.slice(this.#head);
    this.#head = 0;
  }

  /** Never rejects. */
  async #write(batch: readonly Entry[]): Promise<void> {
    const { gate, counters, failpoint, log, pins, isOver } = this.#options;
    const { name } = gate.tier;
    let statuses: readonly WriteStatus[] = [];
    try {
      failpoint?.('store.writedown.before');
      statuses = await gate.tier.write(batch[0]!.namespace, batch);
      failpoint?.('store.writedown.after');
      if (statuses.some((status) => status !== 'refused')) gate.writeAnswered();
    } catch (error) {
      gate.writeFailed();
      log.error({ tier: name, reason: KvError.from(error).message }, 'a write-down threw; its blocks count as failed');
    }
    const isOut = statuses.includes('refused') && !this.#closed && this.#isOut();
    for (const [index, entry] of batch.entries()) {
      const status = statuses[index] ?? 'failed';
      if (status === 'refused' && isOut && this.#waitsAgain(entry)) {
        pins.unpin(entry.namespace, entry.hash);
        continue;
      }
      counters.add(`writedown.${name}.${status === 'refused' ? 'refused.tier' : status}`);
      // Its time ended on the way: it is the object that we have just made, whoever else uses the tier.
      if (status === 'stored' && isOver(entry.expiresS)) {
        counters.add(`expired.blocks.${name}`, gate.tier.remove(entry.namespace, [entry.hash], 'asked'));
      }
      this.#forget(entry);
      pins.unpin(entry.namespace, entry.hash);
    }
    this.#inFlight--;
    this.pump();
  }

  /** It does not wait any more. */
  #forget(entry: Entry): void {
    this.#bytes -= entry.payloadBytes;
    this.#pending.delete(entry.namespace.key + entry.hash);
    this.#settle(entry);
  }
}
