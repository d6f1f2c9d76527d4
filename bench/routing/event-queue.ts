/** Events of a simulation in the order of their times; of equal times, the one that was added first. A binary heap. */
export class EventQueue<T> {
  readonly #times: number[] = [];
  readonly #orders: number[] = [];
  readonly #items: T[] = [];
  #added = 0;

  get size(): number {
    return this.#items.length;
  }

  add(time: number, item: T): void {
    let at = this.#items.length;
    const order = this.#added++;
    while (at > 0) {
      const up = (at - 1) >>> 1;
      if (!this.#before(time, order, up)) break;
      this.#move(up, at);
      at = up;
    }
    this.#put(at, time, order, item);
  }

  /** The next event; there must be one. */
  take(): { readonly time: number; readonly item: T } {
    const next = { time: this.#times[0]!, item: this.#items[0]! };
    const time = this.#times.pop()!;
    const order = this.#orders.pop()!;
    const item = this.#items.pop()!;
    const { length } = this.#items;
    if (length === 0) return next;
    let at = 0;
    for (;;) {
      let down = 2 * at + 1;
      if (down >= length) break;
      if (down + 1 < length && this.#before(this.#times[down + 1]!, this.#orders[down + 1]!, down)) down++;
      if (this.#before(time, order, down)) break;
      this.#move(down, at);
      at = down;
    }
    this.#put(at, time, order, item);
    return next;
  }

  #before(time: number, order: number, at: number): boolean {
    return time < this.#times[at]! || (time === this.#times[at]! && order < this.#orders[at]!);
  }

  #move(from: number, to: number): void {
    this.#put(to, this.#times[from]!, this.#orders[from]!, this.#items[from]!);
  }

  #put(at: number, time: number, order: number, item: T): void {
    this.#times[at] = time;
    this.#orders[at] = order;
    this.#items[at] = item;
  }
}
