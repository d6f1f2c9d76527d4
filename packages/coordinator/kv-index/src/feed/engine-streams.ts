/**
 * The streams of one worker. Several data-parallel engines behind one address publish each for itself, and none tells of the others' blocks:
 * each is followed into a listing of its own, so that what is lost of one is forgotten of that one alone.
 *
 * Invariant: its events tell what it holds when those of every engine do.
 */
import type { FollowedStream, Problem } from './followed-stream.ts';
import { addBreaks, type Breaks, noBreaks } from './totals.ts';

/** What is asked of somebody's streams, one or several. */
export type Heard = Pick<
  FollowedStream,
  'heardS' | 'lagS' | 'problem' | 'silenceRemedy' | 'joiningS' | 'breaks' | 'close'
>;

export class EngineStreams implements Heard {
  readonly #streams: readonly [FollowedStream, ...FollowedStream[]];

  constructor(streams: readonly [FollowedStream, ...FollowedStream[]]) {
    this.#streams = streams;
  }

  get heardS(): number {
    return Math.max(...this.#streams.map(({ heardS }) => heardS));
  }

  get lagS(): number {
    return Math.max(...this.#streams.map(({ lagS }) => lagS));
  }

  get problem(): Problem | undefined {
    return this.#doubted?.problem;
  }

  get silenceRemedy(): string {
    return this.#streams[0].silenceRemedy;
  }

  /** Of the one that `problem` is of. */
  get joiningS(): number | undefined {
    return (this.#doubted ?? this.#streams[0]).joiningS;
  }

  get breaks(): Readonly<Breaks> {
    const breaks = noBreaks();
    for (const stream of this.#streams) addBreaks(breaks, stream.breaks);
    return breaks;
  }

  close(): void {
    for (const stream of this.#streams) stream.close();
  }

  get #doubted(): FollowedStream | undefined {
    return this.#streams.find(({ problem }) => problem !== undefined);
  }
}
