/**
 * The last batches that were published, for those who missed them. A ring, in the order of sequence numbers, which may
 * have holes. Bounded twice: by count (vLLM's `buffer_steps`) and by bytes; the oldest go first.
 */
import { invariant } from '@kvtier/errors';

export interface Published {
  readonly seq: number;
  readonly topic: string;
  readonly payload: Uint8Array;
}

/** As it is replayed: publishers before July 2026 do not repeat the topic. */
export interface Replayed extends Omit<Published, 'topic'> {
  readonly topic: string | undefined;
}

export class ReplayBuffer {
  readonly #ring: (Published | undefined)[];
  readonly #maxBytes: number;
  #head = 0;
  #count = 0;
  #bytes = 0;

  constructor(maxBatches: number, maxBytes: number) {
    this.#ring = new Array<Published | undefined>(maxBatches);
    this.#maxBytes = maxBytes;
  }

  get count(): number {
    return this.#count;
  }

  get bytes(): number {
    return this.#bytes;
  }

  /** A batch that is larger than the whole budget is not kept, nor what came before it: there would be a hole. */
  push(batch: Published): void {
    const last = this.#count > 0 ? this.#at(this.#count - 1).seq : -1;
    invariant(batch.seq > last, () => `batch ${batch.seq} after ${last}`);
    while (
      this.#count > 0 &&
      (this.#count === this.#ring.length || this.#bytes + batch.payload.length > this.#maxBytes)
    ) {
      this.#bytes -= this.#at(0).payload.length;
      this.#ring[this.#head] = undefined;
      this.#head = (this.#head + 1) % this.#ring.length;
      this.#count--;
    }
    if (this.#ring.length === 0 || batch.payload.length > this.#maxBytes) return;
    this.#ring[(this.#head + this.#count) % this.#ring.length] = batch;
    this.#count++;
    this.#bytes += batch.payload.length;
  }

  /** The first batch with this sequence number or a later one. */
  firstFrom(seq: number): Published | undefined {
    let low = 0;
    let high = this.#count;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (this.#at(middle).seq < seq) low = middle + 1;
      else high = middle;
    }
    return low < this.#count ? this.#at(low) : undefined;
  }

  #at(index: number): Published {
    return this.#ring[(this.#head + index) % this.#ring.length]!;
  }
}
