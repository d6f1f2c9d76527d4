/**
 * What a coordinator knows of its requests at one worker and the worker's last word does not: those that it has not counted yet, those
 * that run since, those that are over since. Requests are counted from the moment of the choice, so that of a hundred choices in one
 * millisecond the second one knows of the first.
 *
 * Each request has a number that travels with it; the worker's load names the numbers that its figures count from now on (`taken`), that
 * they count as running (`begun`), and that they count no more (`ended`), each in the first message of which that is true. So it is known
 * of each request how the last word counts it, and its own events say how it stands: the sums here are the differences. Whatever
 * order events and words come in, a request that stands still is counted once, and one whose end was heard is not counted.
 *
 * All sums are of whole numbers: at rest they are 0, not nearly. `waiting` and `running` are below 0 where the worker's word counts
 * what is over.
 */
export interface Share {
  /** As in the request that `Fleet.generate` is given: the worker's word names it then. undefined: counted until its first token. */
  readonly requestId?: string | undefined;
  /** Prompt tokens that the worker will have to compute. */
  readonly tokensAhead: number;
  /** KV blocks that it will hold at most. */
  readonly blocks: number;
  /** Seconds of loading. */
  readonly loadS: number;
  /** As soon as its prompt is computed something of its answer comes; else the first of it may be its end. */
  readonly tellsFirstToken?: boolean;
}

/** One request, from the choice until nothing counts it. */
export interface Entry {
  readonly number: number;
  readonly requestId: string | undefined;
  readonly tokensAhead: number;
  readonly blocks: number;
  readonly loadUs: number;
  /** How it stands. */
  is: 'waiting' | 'running' | 'over';
  /** How the worker's last word counts it. */
  told: 'not' | 'waiting' | 'running';
  /** Whoever sent it still has it. */
  isOpen: boolean;
}

/** Of a worker's word: numbers of our requests. */
export interface Names {
  readonly taken: readonly number[];
  readonly begun: readonly number[];
  readonly ended: readonly number[];
}

/** A worker names an end in its next word. One that has not after so many of them does not count the request, or names none at all. */
const mostWords = 64;

export class SentLedger {
  /** Those that are open, and those that the worker may still count, by number. */
  readonly #entries = new Map<number, Entry>();
  readonly #byRequest = new Map<string, Entry>();
  /** Not open any more, and the word with which each is forgotten, in that order. */
  readonly #left = new Map<Entry, number>();
  #words = 0;
  #last = 0;
  #open = 0;
  #waiting = 0;
  #running = 0;
  #tokensAhead = 0;
  #blocks = 0;
  #loadUs = 0;

  /** Requests without their first token, beyond those of the worker's word. */
  get waiting(): number {
    return this.#waiting;
  }

  /** Requests whose answer has begun, beyond those of the worker's word. */
  get running(): number {
    return this.#running;
  }

  get tokensAhead(): number {
    return this.#tokensAhead;
  }

  get blocks(): number {
    return this.#blocks;
  }

  get loadAheadS(): number {
    return this.#loadUs / 1e6;
  }

  /** Requests that were sent and have not ended. */
  get open(): number {
    return this.#open;
  }

  /** Requests that have ended here, and that the worker may still count. */
  get left(): number {
    return this.#left.size;
  }

  send({ requestId, tokensAhead, blocks, loadS }: Share): Entry {
    this.#last = this.#last === 0xffff_ffff ? 1 : this.#last + 1;
    const entry: Entry = {
      number: this.#last,
      requestId,
      tokensAhead: whole(tokensAhead),
      blocks: whole(blocks),
      loadUs: whole(loadS * 1e6),
      is: 'waiting',
      told: 'not',
      isOpen: true,
    };
    this.#entries.set(entry.number, entry);
    if (requestId !== undefined) this.#byRequest.set(requestId, entry);
    this.#open++;
    this.#count(entry, 1);
    return entry;
  }

  /** The number that this request travels with; undefined: nobody counts it. */
  numberOf(requestId: string): number | undefined {
    return this.#byRequest.get(requestId)?.number;
  }

  /** A word of the worker. `isFirst`: of a new stream, which names all that is there. */
  hear({ taken, begun, ended }: Names, isFirst: boolean): void {
    if (isFirst) for (const entry of [...this.#entries.values()]) this.#untold(entry);
    for (const number of taken) this.#told(number, (entry) => entry.told === 'not', 'waiting');
    for (const number of begun) this.#told(number, (entry) => entry.told === 'waiting', 'running');
    for (const number of ended) {
      const entry = this.#entries.get(number);
      if (entry === undefined) continue;
      this.#set(entry, 'over', 'not');
      if (!entry.isOpen) this.#forget(entry);
    }
    this.#words++;
    for (const [entry, word] of this.#left) {
      if (word > this.#words) break;
      this.#forget(entry);
    }
  }

  /** The worker gave its first token: its prompt is computed. One without a name counts no more: nothing would end that. */
  begun(entry: Entry): void {
    if (entry.is !== 'waiting') return;
    this.#set(entry, entry.requestId === undefined ? 'over' : 'running', entry.told);
  }

  /** The worker gave its last event. */
  over(number: number): void {
    const entry = this.#entries.get(number);
    if (entry !== undefined) this.#set(entry, 'over', entry.told);
  }

  /** Nobody waits for it any more; unless it is over, the worker may have it for a while. Again is of no effect. */
  ended(entry: Entry): void {
    if (!entry.isOpen) return;
    entry.isOpen = false;
    this.#open--;
    if (entry.requestId !== undefined && this.#byRequest.get(entry.requestId) === entry)
      this.#byRequest.delete(entry.requestId);
    // On its way it may come to nothing; of one without a name the worker says nothing.
    const isKnown = entry.requestId !== undefined && (entry.told !== 'not' || entry.is === 'over');
    if (isKnown) this.#left.set(entry, this.#words + mostWords);
    else this.#forget(entry);
  }

  #told(number: number, fits: (entry: Entry) => boolean, told: Entry['told']): void {
    const entry = this.#entries.get(number);
    if (entry !== undefined && fits(entry)) this.#set(entry, entry.is, told);
  }

  /** The new stream has not named it: it is on its way there, or it is gone. */
  #untold(entry: Entry): void {
    if (!entry.isOpen && entry.is !== 'over') this.#forget(entry);
    else this.#set(entry, entry.is, 'not');
  }

  #set(entry: Entry, is: Entry['is'], told: Entry['told']): void {
    this.#count(entry, -1);
    entry.is = is;
    entry.told = told;
    this.#count(entry, 1);
  }

  #forget(entry: Entry): void {
    this.#count(entry, -1);
    entry.is = 'over';
    entry.told = 'not';
    this.#entries.delete(entry.number);
    this.#left.delete(entry);
  }

  /** The difference that it makes to the worker's word. */
  #count({ is, told, tokensAhead, blocks, loadUs }: Entry, sign: 1 | -1): void {
    // The worker's word may be ahead of the events.
    const runs = is === 'running' || (is === 'waiting' && told === 'running');
    const waits = is === 'waiting' && !runs;
    this.#waiting += sign * (Number(waits) - Number(told === 'waiting'));
    this.#running += sign * (Number(runs) - Number(told === 'running'));
    if (told !== 'not') return;
    if (waits) {
      this.#tokensAhead += sign * tokensAhead;
      this.#loadUs += sign * loadUs;
    }
    if (is !== 'over') this.#blocks += sign * blocks;
  }
}

/** Of a caller's estimate: never negative, never NaN. */
const whole = (value: number): number => (value > 0 && Number.isFinite(value) ? Math.round(value) : 0);
