/** Work of many streams in one event loop: each goes on by a slice, and one slice is done in a turn. */
export class Turns {
  readonly #waiting: (() => void)[] = [];
  #immediate: NodeJS.Immediate | undefined;

  /** Resolves in a turn that is the caller's alone. */
  next(): Promise<void> {
    return new Promise((resolve) => {
      this.#waiting.push(resolve);
      this.#immediate ??= setImmediate(this.#turn);
    });
  }

  readonly #turn = (): void => {
    this.#waiting.shift()?.();
    this.#immediate = this.#waiting.length > 0 ? setImmediate(this.#turn) : undefined;
  };
}
