/**
 * A look at all workers, for who keeps something of them. Changes of one turn of the event loop are looked at together, in a later one: a
 * thousand workers may change in one, and each look is one at all of them. Invariant: who asks (`now`) sees the workers that there are.
 */
export class LateLook {
  readonly #look: () => void;
  readonly #stopListening: () => void;
  /** Something has changed, and is looked at then. */
  #soon: NodeJS.Immediate | undefined;

  /** `look` is called for changes from now on. */
  constructor(workers: { onChange(listener: () => void): () => void }, look: () => void) {
    this.#look = look;
    this.#stopListening = workers.onChange(() => {
      this.#soon ??= setImmediate(() => this.now());
    });
  }

  /** Looks now, where something has changed. To be called before what is kept is used. */
  now(): void {
    if (this.#soon === undefined) return;
    this.#forget();
    this.#look();
  }

  /** Nothing is looked at any more. */
  close(): void {
    this.#stopListening();
    this.#forget();
  }

  #forget(): void {
    clearImmediate(this.#soon);
    this.#soon = undefined;
  }
}
