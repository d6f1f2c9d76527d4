/**
 * One lower tier as the store sees it: how fast it is, whether it answers, and how much of it each priority may use now.
 *
 *     demand ──────▶ the tier's whole share of `maxFetchBytes`
 *     prefetch ────▶ half of that; one batch while there is demand
 *     write-down ──▶ `writeDownsIdle` writes; `writeDownsUnderDemand` while something is read
 *
 * Invariants: a lower priority takes what a higher one leaves, but always gets its one batch, so it is slowed down and never
 * starved; no tier can use up the share of another, so one that hangs does not keep the others from being read.
 */

import type { Clock } from '@kvtier/runtime';
import type { Tier } from '@kvtier/tiers';
import { Breaker, type BreakerState } from './breaker.ts';
import type { StoreLimits } from './limits.ts';
import { RateMeter } from './rate.ts';

export type ReadPriority = 'demand' | 'prefetch';

/** Believed of a lower tier until it has been measured: a middling NVMe drive. */
const firstGuess = { bytesPerUs: 1000, latencyUs: 300 };

/** What a read came to, for `TierGate.ended`. */
export interface ReadOutcome {
  readonly startUs: number;
  readonly readyBytes: number;
  readonly failedCount: number;
}

export class TierGate {
  readonly tier: Tier;
  /** Its bit in the index; 0 is the arena. */
  readonly bit: number;
  /** Hears when the breaker opens. */
  onOpened: (reason: string) => void = () => {};
  readonly #clock: Clock;
  readonly #limits: StoreLimits;
  readonly #shareBytes: number;
  readonly #rate = new RateMeter(firstGuess);
  readonly #breaker: Breaker;
  /** A read opened it, or kept it open. */
  #readOpened = false;
  readonly #runningUs: () => number;
  /** Start times of the reads in flight, oldest first, and by the clock that runs while we do. */
  readonly #reads = new Map<number, number>();
  readonly #bytes = { demand: 0, prefetch: 0 };

  /** @param shares how many tiers share `maxFetchBytes` @param runningUs as of `StoreOptions` */
  constructor(
    tier: Tier,
    bit: number,
    shares: number,
    clock: Clock,
    limits: StoreLimits,
    runningUs: () => number = () => clock.nowUs(),
  ) {
    this.#runningUs = runningUs;
    this.tier = tier;
    this.bit = bit;
    this.#clock = clock;
    this.#limits = limits;
    this.#shareBytes = Math.floor(limits.maxFetchBytes / shares);
    this.#breaker = new Breaker(limits);
  }

  get inFlightBytes(): number {
    return this.#bytes.demand + this.#bytes.prefetch;
  }

  get busy(): boolean {
    return this.inFlightBytes > 0;
  }

  get opened(): number {
    return this.#breaker.opened;
  }

  /** A read that has not been answered for too long counts as an open breaker, until it is. */
  get state(): BreakerState {
    return this.#isStuck ? 'open' : this.#breaker.state(this.#clock.nowUs());
  }

  /** Why it is not closed. */
  get reason(): string {
    return this.#isStuck ? 'stuck' : this.#breaker.reason;
  }

  /** May be asked now. */
  get available(): boolean {
    return this.state !== 'open';
  }

  /** Whether a read of so many bytes more may start now. One block may always start when nothing is in flight. */
  mayRead(bytes: number, priority: ReadPriority): boolean {
    const { demand, prefetch } = this.#bytes;
    if (demand + prefetch === 0) return true;
    if (this.state !== 'closed') return false; // one read finds out
    if (demand + prefetch + bytes > this.#shareBytes) return priority === 'demand' && demand === 0;
    if (priority === 'demand') return true;
    const mostBytes = demand > 0 ? this.#limits.fetchBatchBytes : this.#shareBytes / 2;
    return prefetch === 0 || prefetch + bytes <= mostBytes;
  }

  began(bytes: number, priority: ReadPriority): void {
    this.#bytes[priority] += bytes;
  }

  /** Of one block that `began` counted. */
  settled(bytes: number, priority: ReadPriority): void {
    this.#bytes[priority] -= bytes;
  }

  /** A read is on its way; give what comes back to `ended`. */
  readStarted(): number {
    let startUs = this.#clock.nowUs();
    while (this.#reads.has(startUs)) startUs += 0.001;
    this.#reads.set(startUs, this.#runningUs());
    this.#rate.start(startUs);
    return startUs;
  }

  ended({ startUs, readyBytes, failedCount }: ReadOutcome): void {
    const nowUs = this.#clock.nowUs();
    const tookUs = this.#runningUs() - this.#reads.get(startUs)!;
    this.#reads.delete(startUs);
    this.#rate.end(nowUs, startUs, readyBytes);
    const failed = readyBytes === 0 && failedCount > 0;
    // It answers, but no plan can count on it: as good as a failure. Whoever is late to take its answer in is not the tier.
    const isSlow = tookUs > this.#limits.slowReadMs * 1000;
    if (failed || isSlow) {
      if (this.#failed(nowUs, failed ? 'failed' : 'slow')) this.#readOpened = true;
      return;
    }
    this.#breaker.succeeded();
    this.#readOpened = false;
  }

  /** A write threw: that is the tier's failure, a refusal is not. */
  writeFailed(): void {
    this.#failed(this.#clock.nowUs(), 'failed');
  }

  /** A write came to something: good enough for a probe, but where a read opened it, as a tier may throttle these alone. */
  writeAnswered(): void {
    if (!this.#readOpened && this.state === 'half_open') this.#breaker.succeeded();
  }

  estimateUs(bytes: number): number {
    return this.#rate.estimateUs(bytes, this.inFlightBytes, this.#clock.nowUs());
  }

  get bytesPerUs(): number {
    return this.#rate.bytesPerUs;
  }

  /** Returns true when this opened it. */
  #failed(nowUs: number, reason: string): boolean {
    if (!this.#breaker.failed(nowUs, reason)) return false;
    this.onOpened(reason);
    return true;
  }

  get #isStuck(): boolean {
    const oldest = this.#reads.keys().next();
    return !oldest.done && this.#clock.nowUs() - oldest.value > this.#limits.stuckReadMs * 1000;
  }
}
