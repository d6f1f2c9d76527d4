/** One time limit for a row of waits. */
export class Patience {
  readonly #endMs: number;

  constructor(limitMs: number) {
    this.#endMs = performance.now() + limitMs;
  }

  get isOver(): boolean {
    return performance.now() >= this.#endMs;
  }

  async wait(work: Promise<unknown> | undefined): Promise<void> {
    if (work === undefined) return;
    let timer: NodeJS.Timeout | undefined;
    const end = new Promise<void>((resolve) => {
      timer = setTimeout(resolve, Math.max(1, this.#endMs - performance.now()));
    });
    await Promise.race([work, end]);
    clearTimeout(timer);
  }
}
