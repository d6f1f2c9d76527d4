/**
 * A simulated world for the engine: everything that would take time is an entry in a list, and a seeded choice decides
 * what happens next. No real time passes; timers fire only when nothing else can happen, or when asked. A run is a pure
 * function of its seed.
 */
import { setImmediate } from 'node:timers/promises';
import type { Clock } from '../types.ts';

export class EngineWorld {
  /** A number from 0 to `below` - 1. */
  readonly choose: (below: number) => number;
  readonly clock: Clock;
  #pending: (() => void)[] = [];
  #timers: { dueUs: number; call: () => void }[] = [];
  #nowUs = 0;

  constructor(seed: number) {
    this.choose = randomChoice(seed);
    this.clock = {
      nowUs: () => this.#nowUs,
      after: (delayMs, call) => {
        const timer = { dueUs: this.#nowUs + delayMs * 1000, call };
        this.#timers.push(timer);
        return () => {
          this.#timers = this.#timers.filter((other) => other !== timer);
        };
      },
    };
  }

  /** Something that will happen at some time. */
  later(call: () => void): void {
    this.#pending.push(call);
  }

  get pendingCount(): number {
    return this.#pending.length;
  }

  get timerCount(): number {
    return this.#timers.length;
  }

  /** Let one thing happen, and everything that follows from it at once. False when there was nothing. */
  async advance(): Promise<boolean> {
    await setImmediate(); // all microtasks, so that the engine's loop has reached its next wait
    const happening = this.#pending.splice(this.choose(this.#pending.length), 1)[0];
    if (!happening && this.#timers.length === 0) return false;
    this.#nowUs += 100;
    if (happening) happening();
    else this.fireNextTimer();
    await setImmediate();
    return true;
  }

  fireNextTimer(): void {
    this.#timers.sort((a, b) => a.dueUs - b.dueUs);
    const timer = this.#timers.shift();
    if (!timer) return;
    this.#nowUs = Math.max(this.#nowUs, timer.dueUs);
    timer.call();
  }

  /** Until `done`, at most `maxSteps` events. Throws when nothing can happen any more: that is a hang. */
  async until(done: () => boolean, maxSteps = 20_000): Promise<void> {
    for (let step = 0; step < maxSteps; step++) {
      await setImmediate();
      if (done()) return;
      if (!(await this.advance()) && !done()) throw new Error(`hang: nothing is left to happen after ${step} events`);
    }
    throw new Error(`no end after ${maxSteps} events`);
  }
}

/** mulberry32. */
function randomChoice(seed: number): (below: number) => number {
  let state = seed >>> 0;
  return (below) => {
    state = (state + 0x6d2b79f5) >>> 0;
    let z = Math.imul(state ^ (state >>> 15), state | 1);
    z ^= z + Math.imul(z ^ (z >>> 7), z | 61);
    return below === 0 ? 0 : ((z ^ (z >>> 14)) >>> 0) % below;
  };
}
