/**
 * Bodies of requests as bytes: received piece by piece, counted, and never looked into (text-pool.ts does that elsewhere).
 *
 *   first `smallBytes` of any body ─► freely, up to `smallTotalBytes` of all together
 *   what is larger                 ─► takes one of `places`; the others wait, and are not read meanwhile
 *
 * Invariants: the bytes held, of bodies that arrive, of those that are being understood and of those that may have to be once more, are
 * at most `places * maxBytes + smallTotalBytes` (twice that with the copies of the last), whatever the number of connections; a large body costs the event loop one piece
 * (64 KiB) a turn. A place is waited for and held for bounded times.
 */
import type { IncomingMessage } from 'node:http';
import { setImmediate } from 'node:timers/promises';
import { KvError } from '@kvtier/errors';
import { HttpError } from './errors.ts';
import { ownBound } from './own-bound.ts';

export interface BodyLimits {
  /** Of one body. */
  readonly maxBytes: number;
  readonly smallBytes: number;
  readonly smallTotalBytes: number;
  /** Large bodies at a time. */
  readonly places: number;
  /** For a place. */
  readonly waitMs: number;
  /** For the rest of a body that has a place. */
  readonly receiveMs: number;
}

interface Waiting {
  readonly begin: () => void;
}

const nothing = new ArrayBuffer(0);

/** The bytes of one body, counted until they are given back. */
export class Body {
  #bytes: ArrayBuffer;
  readonly #onRelease: () => void;
  /** Somebody works on them. */
  #isInUse = false;
  #isKept = true;
  #released = false;

  constructor(bytes: ArrayBuffer, onRelease: () => void) {
    this.#bytes = bytes;
    this.#onRelease = onRelease;
  }

  /** They may be used. */
  get isKept(): boolean {
    return this.#isKept && !this.#isInUse;
  }

  /**
   * While they are kept. `work` may move them elsewhere. They count until what it returned has settled; `keeps`: it gets a copy, and they
   * count until they were used without that, or dropped.
   */
  async use<T>(work: (bytes: ArrayBuffer) => Promise<T>, keeps = false): Promise<T> {
    this.#isInUse = true;
    this.#isKept = keeps;
    try {
      return await work(keeps ? this.#bytes.slice(0) : this.#bytes);
    } finally {
      this.#isInUse = false;
      if (!this.#isKept) this.#release();
    }
  }

  /** Nobody wants them any more, after the use that may be under way. */
  drop(): void {
    this.#isKept = false;
    if (!this.#isInUse) this.#release();
  }

  #release(): void {
    if (!this.#released) this.#onRelease();
    this.#released = true;
    this.#bytes = nothing; // its request is known for as long as its answer takes
  }
}

export class Bodies {
  readonly #limits: BodyLimits;
  readonly #waiting: Waiting[] = [];
  #smallBytes = 0;
  #placesTaken = 0;

  constructor(limits: BodyLimits) {
    this.#limits = limits;
  }

  /**
   * The body of `request`. @throws HttpError 413 (too large), 408 (too slow), KvError BUSY (too many at once), CANCELLED (the
   * client left)
   */
  async receive(request: IncomingMessage): Promise<Body> {
    const { maxBytes, smallBytes } = this.#limits;
    const told = request.headers['content-length'];
    const declared = told === undefined ? undefined : Number(told); // Node's parser has checked it
    if (declared !== undefined && declared > maxBytes) throw tooLarge(maxBytes);
    const holding = new Holding(this);
    try {
      const bytes = new Growing(Math.min(declared ?? 4_096, smallBytes), maxBytes);
      let deadline: Deadline | undefined;
      const pieces = request.iterator({ destroyOnReturn: false }) as AsyncIterableIterator<Buffer>;
      try {
        for (;;) {
          const next = await (deadline ? deadline.race(pieces.next()) : pieces.next());
          if (next.done) break;
          if (!deadline && bytes.length + next.value.length > smallBytes) {
            await holding.takePlace(request, this.#limits.waitMs);
            deadline = new Deadline(this.#limits.receiveMs);
            if (declared !== undefined) bytes.reserve(declared);
          }
          if (!deadline) holding.addSmall(next.value.length);
          bytes.push(next.value);
          if (deadline) await setImmediate(); // else a fast client has many pieces in one turn
        }
      } finally {
        deadline?.clear();
      }
      return new Body(bytes.take(), () => holding.release());
    } catch (error) {
      holding.release();
      const left = (error as NodeJS.ErrnoException).code === 'ECONNRESET';
      throw left ? new KvError('CANCELLED', 'the client left in the middle of its body') : error;
    }
  }

  /** @throws KvError BUSY */
  addSmall(bytes: number): void {
    if (this.#smallBytes + bytes > this.#limits.smallTotalBytes) throw busy();
    this.#smallBytes += bytes;
  }

  removeSmall(bytes: number): void {
    this.#smallBytes -= bytes;
  }

  /** First come, first served. @throws KvError BUSY, CANCELLED */
  async takePlace(request: IncomingMessage, waitMs: number): Promise<void> {
    if (this.#placesTaken < this.#limits.places) {
      this.#placesTaken++;
      return;
    }
    await new Promise<void>((resolve, reject) => {
      const end = (settle: () => void): void => {
        clearTimeout(timer);
        request.off('close', onClose);
        const at = this.#waiting.indexOf(waiting);
        if (at !== -1) this.#waiting.splice(at, 1);
        settle();
      };
      const onClose = (): void => end(() => reject(new KvError('CANCELLED', 'the client left')));
      const timer = setTimeout(() => end(() => reject(busy())), waitMs);
      const waiting: Waiting = { begin: () => end(resolve) };
      request.once('close', onClose);
      this.#waiting.push(waiting);
    });
  }

  /** To the one who has waited longest. */
  givePlace(): void {
    const next = this.#waiting[0];
    if (next) next.begin();
    else this.#placesTaken--;
  }
}

/** What one body holds of the common limits. */
class Holding {
  readonly #bodies: Bodies;
  #smallBytes = 0;
  #hasPlace = false;

  constructor(bodies: Bodies) {
    this.#bodies = bodies;
  }

  addSmall(bytes: number): void {
    this.#bodies.addSmall(bytes);
    this.#smallBytes += bytes;
  }

  async takePlace(request: IncomingMessage, waitMs: number): Promise<void> {
    await this.#bodies.takePlace(request, waitMs);
    this.#hasPlace = true;
  }

  release(): void {
    this.#bodies.removeSmall(this.#smallBytes);
    this.#smallBytes = 0;
    if (this.#hasPlace) this.#bodies.givePlace();
    this.#hasPlace = false;
  }
}

/** Bytes that arrive one after another, in memory of their own that can move to another thread. */
class Growing {
  readonly #maxBytes: number;
  #buffer: Buffer;
  length = 0;

  constructor(bytes: number, maxBytes: number) {
    this.#buffer = Buffer.allocUnsafeSlow(bytes);
    this.#maxBytes = maxBytes;
  }

  /** @throws HttpError 413 */
  push(piece: Buffer): void {
    const length = this.length + piece.length;
    if (length > this.#maxBytes) throw tooLarge(this.#maxBytes);
    if (length > this.#buffer.length) this.reserve(Math.min(this.#maxBytes, Math.max(length, 2 * this.#buffer.length)));
    piece.copy(this.#buffer, this.length);
    this.length = length;
  }

  reserve(bytes: number): void {
    const larger = Buffer.allocUnsafeSlow(bytes);
    this.#buffer.copy(larger, 0, 0, this.length);
    this.#buffer = larger;
  }

  /** Exactly the bytes that came. */
  take(): ArrayBuffer {
    const { buffer } = this.#buffer;
    return (this.length === buffer.byteLength ? buffer : buffer.slice(0, this.length)) as ArrayBuffer;
  }
}

class Deadline {
  readonly #expired: Promise<never>;
  readonly #timer: NodeJS.Timeout;

  constructor(ms: number) {
    let expire = (_: Error): void => {};
    this.#expired = new Promise<never>((_, reject) => (expire = reject));
    this.#expired.catch(() => {}); // nobody may be waiting when it comes
    const why = new HttpError(408, `The body did not arrive within ${ms / 1_000} s.`, { code: 'body_too_slow' });
    this.#timer = setTimeout(() => expire(why), ms);
  }

  race<T>(promise: Promise<T>): Promise<T> {
    return Promise.race([promise, this.#expired]);
  }

  clear(): void {
    clearTimeout(this.#timer);
  }
}

/** What the JSON parser of the API server left in `request`. @throws HttpError 400 without a body */
export function bodyOf({ body }: { readonly body: unknown }): Body {
  if (body instanceof Body) return body;
  throw new HttpError(400, 'The body must be a JSON object.', { code: 'invalid_json' });
}

const tooLarge = (maxBytes: number): HttpError =>
  new HttpError(413, `The body is larger than ${maxBytes} bytes.`, { code: 'request_too_large' });

const busy = (): KvError => ownBound('too many large bodies arrive at once');
