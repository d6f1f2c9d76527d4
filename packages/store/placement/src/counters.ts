/** Named event counts. Every refusal has a name of its own; names are constants of the code, so the map is bounded. */
export class Counters {
  readonly #counts = new Map<string, number>();

  add(name: string, count = 1): void {
    if (count !== 0) this.#counts.set(name, (this.#counts.get(name) ?? 0) + count);
  }

  get(name: string): number {
    return this.#counts.get(name) ?? 0;
  }

  snapshot(): Record<string, number> {
    return Object.fromEntries([...this.#counts].sort(([a], [b]) => (a < b ? -1 : 1)));
  }
}
