/**
 * What a node gives to its peers from the tier below its arena: each block is read into a slot that is lent to the read and to the sendings of
 * it. Invariants: one read serves all who ask for the block meanwhile; bytes of lent slots are bounded, and who finds none free waits in a
 * line; a slot goes back when the last byte of it went out.
 */
import { type ArenaHandle, native } from '@kvtier/data-plane';
import { decodeHeader, type HashKey, headerBytes, type Namespace } from '@kvtier/identity';
import type { ArenaTier } from '../arena/arena-tier.ts';
import type { ReadStatus, Tier } from '../kit/tier.ts';
import { LendingLine } from './lending-line.ts';
import type { PeerRequest } from './peer-loops.ts';

/** A block from below in a slot of its own. One read serves all who ask for it meanwhile, and the slot all who are sent it. */
interface Lending {
  readonly slot: number;
  readonly slotBytes: number;
  /** 0: it has not come yet. */
  objectBytes: number;
  /** Who waits for it. */
  readonly waiting: PeerRequest[];
  /** The read, and each sending. */
  users: number;
}

export interface ReadsBelowOptions {
  readonly arena: ArenaHandle;
  readonly slots: ArenaTier;
  readonly below: Tier | undefined;
  /** Bytes of slots that may be lent; one block may be at any time. */
  readonly maxLentBytes: number;
  /** This node reads the block from below itself: fulfilled when that has ended. undefined: it does not. */
  readonly arriving?: ((namespace: Namespace, hash: HashKey) => Promise<void> | undefined) | undefined;
  readonly send: (request: PeerRequest, slot: number, objectBytes: number, onSent: () => void) => void;
  readonly decline: (request: PeerRequest, why: 'missing' | 'failed') => void;
  /** Their block may be in the arena by now. `hasWaited`: they stand before those in the line. */
  readonly serveAnew: (requests: readonly PeerRequest[], hasWaited: boolean) => void;
}

export class ReadsBelow {
  readonly #options: ReadsBelowOptions;
  /** By namespace and hash. */
  readonly #lendings = new Map<string, Lending>();
  readonly #line: LendingLine;
  #lentBytes = 0;
  /** Slots came back in this turn: the line is looked at once, at its end, so that what is read together is asked for together. */
  #lineIsDue = false;

  constructor(options: ReadsBelowOptions) {
    this.#options = options;
    this.#line = new LendingLine((request) => options.decline(request, 'failed'));
  }

  /** Nobody waits any more; reads end within their tier's limit. */
  end(): void {
    this.#line.end();
  }

  /** Fulfilled when their reads have ended. A hash of 16 bytes travels zero padded: `nameOf` is the one by which it is known. */
  async serve(
    namespace: Namespace,
    wanted: readonly { request: PeerRequest; nameOf: (known: (key: HashKey) => boolean) => HashKey }[],
    hasWaited: boolean,
  ): Promise<void> {
    const { below, arriving, decline, serveAnew } = this.#options;
    const reading: { hash: HashKey; slot: number; lending: Lending }[] = [];
    for (const { request, nameOf } of wanted) {
      const name = nameOf((key) => below?.lookup(namespace, [key]) === 1);
      const slotBytes = this.#bytesBelow(namespace, name, request.slotBytes);
      const own = arriving?.(namespace, name);
      const lending = this.#lendings.get(namespace.key + name);
      // Nothing is read that is known to be larger; the size of the slot is a stranger's word (`Tier.read`).
      if (slotBytes === undefined || slotBytes > request.slotBytes) decline(request, 'missing');
      else if (own !== undefined) void own.then(() => serveAnew([request], false));
      else if (lending !== undefined) this.#lendTo(request, namespace, name, lending);
      else if (!this.#mayLend(slotBytes) || (this.#line.length > 0 && !hasWaited)) {
        if (!this.#line.add(request, slotBytes)) decline(request, 'failed');
      } else {
        const lent = this.#lend(namespace, name, slotBytes);
        if (lent === undefined) decline(request, 'failed');
        else {
          lent.waiting.push(request);
          reading.push({ hash: name, slot: lent.slot, lending: lent });
        }
      }
    }
    if (below === undefined || reading.length === 0) return;
    const ended = (index: number, status: ReadStatus): void => {
      const { hash, lending } = reading[index]!;
      this.#arrived(namespace, hash, lending, status);
    };
    await below.read(namespace, reading, ended, 'guessed');
  }

  /** Reads it for nobody: a tier verifies what it reads, and forgets what is corrupt. One that is being read is being verified. */
  async verify(namespace: Namespace, hash: HashKey, onCorrupt: () => void): Promise<void> {
    const { below } = this.#options;
    const slotBytes = below?.objectBytes?.(namespace, hash);
    if (below === undefined || slotBytes === undefined || this.#lendings.has(namespace.key + hash)) return;
    const lending = this.#mayLend(slotBytes) ? this.#lend(namespace, hash, slotBytes) : undefined;
    if (lending === undefined) return;
    const ended = (_: number, status: ReadStatus): void => {
      if (status === 'corrupt') onCorrupt();
      this.#arrived(namespace, hash, lending, status);
    };
    await below.read(namespace, [{ hash, slot: lending.slot }], ended, 'guessed');
  }

  /** The read has ended. */
  #arrived(namespace: Namespace, hash: HashKey, lending: Lending, status: ReadStatus): void {
    const { arena, decline } = this.#options;
    const bytes = status === 'ready' ? native.arenaRead(arena, lending.slot, headerBytes) : undefined;
    const header = bytes === undefined ? undefined : decodeHeader(bytes);
    const requests = lending.waiting.splice(0);
    if (header === undefined || 'error' in header) {
      for (const request of requests) decline(request, status === 'failed' ? 'failed' : 'missing');
    } else {
      lending.objectBytes = headerBytes + header.payloadBytes;
      for (const request of requests) this.#lendTo(request, namespace, hash, lending);
    }
    this.#giveBack(namespace, hash, lending);
  }

  #lendTo(request: PeerRequest, namespace: Namespace, hash: HashKey, lending: Lending): void {
    const { slot, objectBytes, waiting } = lending;
    if (objectBytes === 0) waiting.push(request);
    else if (objectBytes > request.slotBytes) this.#options.decline(request, 'missing');
    else {
      lending.users++;
      this.#options.send(request, slot, objectBytes, () => this.#giveBack(namespace, hash, lending));
    }
  }

  /** Bytes of slot for a read from below; undefined: it is not there, or fits into no slot. */
  #bytesBelow(namespace: Namespace, hash: HashKey, otherwise: number): number | undefined {
    const { slots, below } = this.#options;
    if (below === undefined || below.lookup(namespace, [hash]) === 0) return undefined;
    const bytes = below.objectBytes?.(namespace, hash, otherwise) ?? otherwise;
    if (bytes < 2 * headerBytes || bytes - headerBytes > slots.maxPayloadBytes) return undefined;
    return bytes;
  }

  /** However small the arena, one block at a time may be lent. */
  #mayLend(slotBytes: number): boolean {
    return this.#lentBytes === 0 || this.#lentBytes + slotBytes <= this.#options.maxLentBytes;
  }

  /** undefined: the arena is full of what is used. */
  #lend(namespace: Namespace, hash: HashKey, slotBytes: number): Lending | undefined {
    const slot = this.#options.slots.allocate(namespace, slotBytes - headerBytes);
    if (slot === undefined) return undefined;
    this.#lentBytes += slotBytes;
    const lending = { slot, slotBytes, objectBytes: 0, waiting: [], users: 1 };
    this.#lendings.set(namespace.key + hash, lending);
    return lending;
  }

  #giveBack(namespace: Namespace, hash: HashKey, lending: Lending): void {
    if (--lending.users > 0) return;
    this.#lendings.delete(namespace.key + hash);
    this.#lentBytes -= lending.slotBytes;
    this.#options.slots.free(lending.slot);
    if (this.#line.length > 0) this.#serveLineSoon();
  }

  #serveLineSoon(): void {
    if (this.#lineIsDue) return;
    this.#lineIsDue = true;
    setImmediate(() => {
      this.#lineIsDue = false;
      const requests = this.#line.take(this.#options.maxLentBytes - this.#lentBytes, this.#lentBytes === 0);
      if (requests.length === 0) return;
      this.#options.serveAnew(requests, true);
      // Of some no slot was needed: they are in the arena by now, are being read, or are gone.
      if (this.#line.length > 0) this.#serveLineSoon();
    });
  }
}
