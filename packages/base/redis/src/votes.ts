/**
 * Whether a connection to a master stands against what Sentinels say who are asked once it is made. One that says otherwise than the
 * others for good (an old configuration, a master that only it reaches, a name where they have an address) costs nobody a connection that
 * works; one that says otherwise than it said before is ahead of the others, and is believed alone. One that was away meanwhile may have
 * started anew as it was long ago, and be behind the others: it has one voice, and only those that are away themselves have none against it.
 */
export class Votes {
  readonly #ours: string;
  /** Sentinels that may still answer. */
  #missing: number;
  /** What each said last, by the name by which it was asked, and who it is: one may be known by two names. `undefined`: it has no voice. */
  readonly #answers = new Map<string, { readonly voter: string; readonly place: string | undefined }>();
  /** By name: nobody listens to them now. */
  readonly #away = new Set<string>();
  /** Places that somebody named who was not heard before. */
  readonly #unheard = new Set<string>();

  /** `ours`: the place that is connected. */
  constructor(ours: string, sentinels: number) {
    this.#ours = ours;
    this.#missing = sentinels;
  }

  /** A Sentinel's answer; `before`: what it had said; `wasAway`: in between. True: the connection is to be given up. */
  cast(sentinel: string, voter: string, place: string, before: string | undefined, wasAway = false): boolean {
    this.#away.delete(sentinel);
    if (!this.#answers.delete(sentinel) && this.#missing > 0) this.#missing--;
    this.#answers.set(sentinel, { voter, place });
    if (before === undefined) this.#unheard.add(place);
    const isChanged = before !== undefined && before !== place && place !== this.#ours;
    if (isChanged) for (const gone of this.#away) this.#silence(gone);
    return (isChanged && !wasAway) || this.#isOutvoted;
  }

  /** What a Sentinel said may be old by now, until it is asked again. */
  left(sentinel: string): void {
    this.#away.add(sentinel);
  }

  #silence(sentinel: string): void {
    const answer = this.#answers.get(sentinel);
    if (answer !== undefined) this.#answers.set(sentinel, { ...answer, place: undefined });
  }

  /** Nobody waits any longer for who has not answered. True: as of `cast`. */
  close(): boolean {
    this.#missing = 0;
    return this.#isOutvoted;
  }

  /** Who is missing may be for ours. As many against it as for it are enough only once: the next time they are known. */
  get #isOutvoted(): boolean {
    const places = new Map<string, string>();
    for (const { voter, place } of this.#answers.values()) if (place !== undefined) places.set(voter, place);
    const counts = new Map<string, number>();
    for (const place of places.values()) counts.set(place, (counts.get(place) ?? 0) + 1);
    const most = (counts.get(this.#ours) ?? 0) + this.#missing;
    return [...counts].some(
      ([place, count]) => place !== this.#ours && (count > most || (count === most && this.#unheard.has(place))),
    );
  }
}
