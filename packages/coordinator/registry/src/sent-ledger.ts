/**
 * What a coordinator has sent to one worker and the worker's own word does not include yet. Requests are counted from the moment of
 * the choice, so that of a hundred choices in one millisecond the second one knows of the first.
 *
 * Each request has a number that travels with it; the worker's load names the numbers that it includes (`taken`), in the same
 * message as the figures that include them. So a request counts here until the first message that names it, or until it ends:
 * never twice, never not at all, whatever order its messages and those of the load come in.
 *
 * All sums are of whole numbers: at rest they are 0, not nearly.
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
}

/** One request, from the choice to its end. */
export interface Entry {
  readonly number: number;
  readonly requestId: string | undefined;
  readonly tokensAhead: number;
  readonly blocks: number;
  readonly loadUs: number;
  /** How it counts here: as one that waits, as one whose answer has begun, or not any more. */
  counts: 'waiting' | 'running' | undefined;
}

export class SentLedger {
  /** Not ended, by number. */
  readonly #entries = new Map<number, Entry>();
  readonly #byRequest = new Map<string, Entry>();
  #last = 0;
  #waiting = 0;
  #running = 0;
  #tokensAhead = 0;
  #blocks = 0;
  #loadUs = 0;

  /** Requests that the worker's word does not include. */
  get waiting(): number {
    return this.#waiting;
  }

  /** Requests whose answer has begun, and that the worker's word does not include all the same. */
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
    return this.#entries.size;
  }

  send({ requestId, tokensAhead, blocks, loadS }: Share): Entry {
    this.#last = this.#last === 0xffff_ffff ? 1 : this.#last + 1;
    const entry: Entry = {
      number: this.#last,
      requestId,
      tokensAhead: whole(tokensAhead),
      blocks: whole(blocks),
      loadUs: whole(loadS * 1e6),
      counts: 'waiting',
    };
    this.#entries.set(entry.number, entry);
    if (requestId !== undefined) this.#byRequest.set(requestId, entry);
    this.#waiting++;
    this.#tokensAhead += entry.tokensAhead;
    this.#blocks += entry.blocks;
    this.#loadUs += entry.loadUs;
    return entry;
  }

  /** The number that this request travels with; undefined: nobody counts it. */
  numberOf(requestId: string): number | undefined {
    return this.#byRequest.get(requestId)?.number;
  }

  /** The worker's figures include this request from now on. */
  taken(number: number): void {
    const entry = this.#entries.get(number);
    if (entry) this.#uncount(entry);
  }

  /** The worker gave its first token: its prompt is computed. One without a name counts no more: nothing would end that. */
  begun(entry: Entry): void {
    if (entry.counts !== 'waiting') return;
    if (entry.requestId === undefined) {
      this.#uncount(entry);
      return;
    }
    entry.counts = 'running';
    this.#waiting--;
    this.#running++;
    this.#tokensAhead -= entry.tokensAhead;
    this.#loadUs -= entry.loadUs;
  }

  /** However it ended; again is of no effect. */
  ended(entry: Entry): void {
    this.#uncount(entry);
    this.#entries.delete(entry.number);
    if (entry.requestId !== undefined && this.#byRequest.get(entry.requestId) === entry)
      this.#byRequest.delete(entry.requestId);
  }

  #uncount(entry: Entry): void {
    if (entry.counts === 'waiting') {
      this.#waiting--;
      this.#tokensAhead -= entry.tokensAhead;
      this.#loadUs -= entry.loadUs;
    } else if (entry.counts === 'running') this.#running--;
    else return;
    entry.counts = undefined;
    this.#blocks -= entry.blocks;
  }
}

/** Of a caller's estimate: never negative, never NaN. */
const whole = (value: number): number => (value > 0 && Number.isFinite(value) ? Math.round(value) : 0);
