/**
 * Whether a connection to a master stands against what Sentinels say who are asked once it is made. One that says otherwise than the
 * others for good (an old configuration, a master that only it reaches, a name where they have an address) costs nobody a connection that
 * works; one that says otherwise than it said before is ahead of the others, and is believed alone.
 */
export class Votes {
  readonly #ours: string;
  /** Sentinels that may still answer. */
  #missing: number;
  /** What each said last, by the name by which it was asked, and who it is: one may be known by two names. */
  readonly #answers = new Map<string, { readonly voter: string; readonly place: string }>();
  /** Places that somebody named who was not heard before. */
  readonly #unheard = new Set<string>();

  /** `ours`: the place that is connected. */
  constructor(ours: string, sentinels: number) {
    this.#ours = ours;
    this.#missing = sentinels;
  }

  /** A Sentinel's answer; `before`: what it had said. True: the connection is to be given up. */
  cast(sentinel: string, voter: string, place: string, before: string | undefined): boolean {
    if (!this.#answers.delete(sentinel) && this.#missing > 0) this.#missing--;
    this.#answers.set(sentinel, { voter, place });
    if (before === undefined) this.#unheard.add(place);
    const isNews = before !== undefined && before !== place && place !== this.#ours;
    return isNews || this.#isOutvoted;
  }

  /** Nobody waits any longer for who has not answered. True: as of `cast`. */
  close(): boolean {
    this.#missing = 0;
    return this.#isOutvoted;
  }

  /** Who is missing may be for ours. As many against it as for it are enough only once: the next time they are known. */
  get #isOutvoted(): boolean {
    const places = new Map([...this.#answers.values()].map(({ voter, place }) => [voter, place]));
    const counts = new Map<string, number>();
    for (const place of places.values()) counts.set(place, (counts.get(place) ?? 0) + 1);
    const most = (counts.get(this.#ours) ?? 0) + this.#missing;
    return [...counts].some(
      ([place, count]) => place !== this.#ours && (count > most || (count === most && this.#unheard.has(place))),
    );
  }
}
