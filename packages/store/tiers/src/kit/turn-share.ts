/**
 * What is told of tiers' reads and writes in one turn of the event loop. Each row that is told goes on at once: its load takes it further,
 * some 40 µs each. Of small blocks thousands may end together, and everything else would wait for all of them.
 *
 * Invariant: whoever asks comes in the order of asking; a turn ends with the one who takes the last of its `rowsPerTurn`.
 */
export const rowsPerTurn = 256;

export class TurnShare {
  #left = rowsPerTurn;
  readonly #waiting: { readonly rows: number; readonly go: () => void }[] = [];
  #turn: NodeJS.Immediate | undefined;

  /** undefined: go on; else resolves in a turn that has room. */
  take(rows: number): Promise<void> | undefined {
    this.#turn ??= setImmediate(() => this.#next());
    if (this.#waiting.length === 0 && this.#left > 0) {
      this.#left -= rows;
      return undefined;
    }
    return new Promise((go) => this.#waiting.push({ rows, go }));
  }

  #next(): void {
    this.#turn = undefined;
    this.#left = rowsPerTurn;
    if (this.#waiting.length === 0) return;
    this.#turn = setImmediate(() => this.#next());
    let told = 0;
    while (told < this.#waiting.length && this.#left > 0) {
      const { rows, go } = this.#waiting[told++]!;
      this.#left -= rows;
      go();
    }
    this.#waiting.splice(0, told);
  }
}
