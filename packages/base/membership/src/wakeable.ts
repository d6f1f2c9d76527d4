/** A pause that can be ended early; one waits at a time. */
export class Wakeable {
  #end: (() => void) | undefined;
  /** Asked to end while nobody waited: the next one does not wait. */
  #isAsked = false;

  async wait(ms: number): Promise<void> {
    if (!this.#isAsked && ms > 0) {
      await new Promise<void>((resolve) => {
        const timer = setTimeout(resolve, ms);
        this.#end = () => {
          clearTimeout(timer);
          resolve();
        };
      });
    }
    this.#end = undefined;
    this.#isAsked = false;
  }

  end(): void {
    this.#isAsked = true;
    this.#end?.();
  }
}
