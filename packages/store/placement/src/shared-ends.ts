/**
 * Times that end: one timer for all whose time ends in the same millisecond, however many are put there and taken away.
 * Invariant: an end has a timer while it has members, and until it has come.
 */
import type { Clock } from '@kvtier/runtime';

export interface End<T> {
  /** Of the clock, a whole millisecond. */
  readonly atMs: number;
  readonly members: Set<T>;
  readonly cancel: () => void;
}

export class SharedEnds<T> {
  readonly #clock: Clock;
  readonly #onEnd: (members: ReadonlySet<T>) => void;
  readonly #ends = new Map<number, End<T>>();

  /** `onEnd`: whoever leaves an end that has come is not among its members any more. */
  constructor(clock: Clock, onEnd: (members: ReadonlySet<T>) => void) {
    this.#clock = clock;
    this.#onEnd = onEnd;
  }

  join(member: T, atMs: number): End<T> {
    const end = this.#ends.get(atMs) ?? this.#make(atMs);
    end.members.add(member);
    return end;
  }

  leave(member: T, end: End<T>): void {
    end.members.delete(member);
    if (end.members.size > 0 || this.#ends.get(end.atMs) !== end) return;
    end.cancel();
    this.#ends.delete(end.atMs);
  }

  #make(atMs: number): End<T> {
    const cancel = this.#clock.after(atMs - this.#clock.nowUs() / 1000, () => {
      this.#ends.delete(atMs);
      this.#onEnd(end.members);
    });
    const end: End<T> = { atMs, members: new Set(), cancel };
    this.#ends.set(atMs, end);
    return end;
  }
}
