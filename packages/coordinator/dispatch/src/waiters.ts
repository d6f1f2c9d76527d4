/**
 * Those that wait in one lane, and which of its workers each may have: a bit a worker, found once and kept. When workers change, only these
 * are asked about again, and not in one turn where many wait:
 *
 *     changes   3 · 17 · 3 · …      numbers of workers that are other ones than before, came or left
 *                   ▲    ▲
 *                   │    └ up to here this one knows      (each that waits has its place; it catches up when it is asked for)
 *                   └ up to here all know, and what is before it is forgotten
 */
import { Numbers } from './numbers.ts';
import type { Pending } from './pending.ts';

/** More are not kept: who is that far behind asks about all workers. */
const maxChanges = 1_024;
/** Of those that wait, so many are asked for between two looks at the time. */
const checkedAtOnce = 16;

export class Waiters {
  readonly #all = new Set<Pending>();
  /** Numbers of the lane's workers. */
  readonly #members = new Numbers();
  readonly #mayHave: (pending: Pending, number: number) => boolean;
  #numbers: readonly number[] = [];
  #changes: number[] = [];
  /** Changes before the first one that is kept; all that there were; and how many of them everybody knows. */
  #forgotten = 0;
  #checked = 0;
  #round: { readonly left: Iterator<Pending>; readonly until: number } | undefined;

  /** `mayHave`: of a worker of the lane. */
  constructor(mayHave: (pending: Pending, number: number) => boolean) {
    this.#mayHave = mayHave;
  }

  [Symbol.iterator](): Iterator<Pending> {
    return this.#all.values();
  }

  get size(): number {
    return this.#all.size;
  }

  add(pending: Pending): void {
    this.#all.add(pending);
  }

  delete(pending: Pending): void {
    this.#all.delete(pending);
  }

  /** The lane's workers from now on, and which of all workers are other ones than before, came or left. True: some of the lane's are. */
  become(numbers: readonly number[], changed: readonly number[]): boolean {
    const before = changed.map((number) => this.#members.has(number));
    this.#numbers = numbers;
    this.#members.clear();
    for (const number of numbers) this.#members.set(number, true);
    const its = changed.filter((number, i) => before[i] || this.#members.has(number));
    for (const number of its) this.#changes.push(number);
    if (this.#all.size === 0) this.#checked = this.#count;
    if (this.#all.size === 0 || this.#changes.length > maxChanges) this.#forget();
    return its.length > 0;
  }

  /** Everybody knows of every change. */
  get isChecked(): boolean {
    return this.#checked === this.#count;
  }

  /** The workers that it may have now. */
  allowedOf(pending: Pending): Numbers {
    const { allowed, checkedAt } = pending;
    if (checkedAt < this.#forgotten) {
      allowed.clear();
      for (const number of this.#numbers) if (this.#mayHave(pending, number)) allowed.set(number, true);
    } else
      for (let i = checkedAt - this.#forgotten; i < this.#changes.length; i++) {
        const number = this.#changes[i]!;
        allowed.set(number, this.#members.has(number) && this.#mayHave(pending, number));
      }
    pending.checkedAt = this.#count;
    return allowed;
  }

  /** Goes on telling those that wait of changes, until the time is over; these have nobody any more. */
  *lost(isOver: () => boolean): Generator<Pending, void> {
    let asked = 0;
    while (!this.isChecked) {
      this.#round ??= { left: this.#all.values(), until: this.#count };
      for (const { left, until } = this.#round; ; asked++) {
        if (asked > 0 && asked % checkedAtOnce === 0 && isOver()) return;
        const { value: pending, done } = left.next();
        if (done === true) {
          this.#checked = until;
          break;
        }
        if (this.allowedOf(pending).isEmpty) yield pending;
      }
      this.#round = undefined;
    }
    this.#forget();
  }

  #forget(): void {
    this.#forgotten = this.#count;
    this.#changes = [];
  }

  get #count(): number {
    return this.#forgotten + this.#changes.length;
  }
}
