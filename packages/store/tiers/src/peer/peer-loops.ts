/**
 * The native peer data plane with callbacks: connections, fetches into slots, and the requests of peers. One per node, shared
 * by its `PeerTier` (what we fetch) and its `PeerServer` (what we send). Invariant: a fetch ends exactly once, and so does an
 * answer that lent a slot.
 *
 * Blocks may be small and many: they pass through here as rows of numbers, a batch at a time, without an object or a closure
 * for each block that is fetched.
 */
import type { Buffer } from 'node:buffer';
import { type ArenaHandle, native, type PeerHandle } from '@kvtier/data-plane';
import { invariant } from '@kvtier/errors';
import { Gathering } from './gathering.ts';

/** The same numbers in packages/base/data-plane/cc/peer_loops.h. */
const event = { fetched: 0, request: 1, sent: 2, up: 3, down: 4, refused: 5 } as const;
export const fetchResults = ['ready', 'missing', 'failed', 'corrupt'] as const;
export type FetchResult = (typeof fetchResults)[number];
export const ends = ['ended', 'unauthenticated', 'protocol', 'time limit', 'too many'] as const;
export type ConnectionEnd = (typeof ends)[number];
const identityBytes = 64;
/** Numbers in one row of what passes to and from native code. */
const [fetchNumbers, answerNumbers, eventNumbers] = [5, 5, 4];

/** Blocks to be fetched, as columns; an index names a block in all of them. */
export interface FetchBlocks {
  readonly slots: ArrayLike<number>;
  readonly slotBytes: ArrayLike<number>;
  /** On the clock of performance.now(). */
  readonly deadlinesMs: ArrayLike<number>;
  /** 64 bytes a block: namespace digest, hash zero padded. */
  readonly identities: Uint8Array;
}

/** Blocks that were asked for together; a fetch's tag is the batch's number and the position in it. */
interface Batch {
  readonly blocks: FetchBlocks;
  readonly indexes: readonly number[];
  readonly onDone: (index: number, result: FetchResult) => void;
  open: number;
}
/** Positions in one batch: what is left of 53 bits of a tag counts batches. */
export const maxBatchBlocks = 4096;

/** What a peer asks for: the object of this name, if it fits into `slotBytes`. */
export interface PeerRequest {
  readonly token: number;
  readonly connection: number;
  readonly slotBytes: number;
  /** latin1, as `Namespace.key`. */
  readonly namespaceKey: string;
  /** latin1, 32 characters: a hash of 16 bytes is zero padded. */
  readonly hash: string;
}

export interface ConnectionWatcher {
  onUp(): void;
  onDown(end: ConnectionEnd): void;
}

export interface PeerLoopsOptions {
  readonly arena: ArenaHandle;
  /** TLS 1.3 on data connections. */
  readonly tls: boolean;
  readonly threads: number;
  /** Data connections that peers may open. */
  readonly maxConnections: number;
  /** Beside them, those that have not proved themselves yet; one more takes the place of the oldest. */
  readonly maxStrangers?: number;
  readonly stallMs: number;
}

export class PeerLoops {
  readonly #handle: PeerHandle;
  readonly #batches = new Map<number, Batch>();
  readonly #gathering = new Gathering<FetchResult>((tag, result) => this.#fetched(tag, result));
  readonly #lent = new Map<number, () => void>();
  readonly #watchers = new Map<number, ConnectionWatcher>();
  /** Connections of peers that were ended because they broke the rules, by why. */
  readonly refused: Record<ConnectionEnd, number> = {
    ended: 0,
    unauthenticated: 0,
    protocol: 0,
    'time limit': 0,
    'too many': 0,
  };
  #onRequests: ((requests: readonly PeerRequest[]) => void) | undefined;
  /** Rows for native.peerAnswer, gathered for a turn. */
  #answers = new Float64Array(64 * answerNumbers);
  #answerCount = 0;
  #nextBatch = 1;
  #closed = false;

  constructor(options: PeerLoopsOptions) {
    const { arena, tls, threads, maxConnections, maxStrangers = 256, stallMs } = options;
    this.#handle = native.peerOpen(arena, { threads, tls, maxConnections, maxStrangers, stallMs }, (rows, identities) =>
      this.#deliver(rows, identities),
    );
  }

  /** Listen for peers' data connections; returns the port. KvError-to-be IO when the address cannot be had. */
  listen(host: string, port: number, onRequests: (requests: readonly PeerRequest[]) => void): number {
    this.#onRequests = onRequests;
    return native.peerListen(this.#handle, host, port);
  }

  allow(session: Uint8Array, key: Uint8Array): void {
    if (!this.#closed) native.peerAllow(this.#handle, session, key);
  }

  revoke(session: Uint8Array): void {
    if (!this.#closed) native.peerRevoke(this.#handle, session);
  }

  connect(host: string, port: number, session: Uint8Array, key: Uint8Array, watcher: ConnectionWatcher): number {
    const connection = native.peerConnect(this.#handle, host, port, session, key);
    this.#watchers.set(connection, watcher);
    return connection;
  }

  disconnect(connection: number): void {
    if (!this.#closed) native.peerDisconnect(this.#handle, connection);
  }

  /**
   * Bring the blocks of these indexes, at most `maxBatchBlocks`; `onDone` is called once for each, for those of one `blocks` together as
   * gathering.ts has it. Keeps `indexes`.
   */
  fetch(
    connection: number,
    blocks: FetchBlocks,
    indexes: readonly number[],
    onDone: (index: number, result: FetchResult) => void,
  ): void {
    invariant(indexes.length <= maxBatchBlocks, 'peer: too many blocks in one batch');
    const rows = new Float64Array(indexes.length * fetchNumbers);
    const batch = this.#nextBatch++;
    const nowMs = performance.now();
    let at = 0;
    for (let position = 0; position < indexes.length; position++) {
      const index = indexes[position]!;
      rows[at++] = batch * maxBatchBlocks + position;
      rows[at++] = blocks.slots[index]!;
      rows[at++] = blocks.slotBytes[index]!;
      rows[at++] = Math.max(1, Math.ceil(blocks.deadlinesMs[index]! - nowMs));
      rows[at++] = index;
    }
    native.peerFetch(this.#handle, connection, rows, blocks.identities);
    this.#batches.set(batch, { blocks, indexes, onDone, open: indexes.length });
    this.#gathering.asked(blocks, indexes.length);
  }

  /** Send what lies in `slot`; `onSent` gives the slot back, whatever became of it. */
  send(request: PeerRequest, slot: number, objectBytes: number, onSent: () => void): void {
    if (this.#closed) {
      onSent();
      return;
    }
    this.#lent.set(request.token, onSent);
    this.#answer(request.token, request.connection, 0, slot, objectBytes);
  }

  decline(request: PeerRequest, why: 'missing' | 'failed'): void {
    if (this.#closed) return;
    const status = why === 'missing' ? 1 : 2;
    this.#answer(request.token, request.connection, status, 0, 0);
  }

  async close(): Promise<void> {
    if (this.#closed) return;
    this.#closed = true;
    await native.peerClose(this.#handle);
    this.#gathering.flush();
    invariant(this.#batches.size === 0, 'peer: a fetch never ended');
  }

  #answer(token: number, connection: number, status: number, slot: number, objectBytes: number): void {
    if (this.#answerCount === 0) queueMicrotask(() => this.#flush());
    let at = this.#answerCount++ * answerNumbers;
    if (at === this.#answers.length) {
      const larger = new Float64Array(2 * at);
      larger.set(this.#answers);
      this.#answers = larger;
    }
    const rows = this.#answers;
    rows[at++] = token;
    rows[at++] = connection;
    rows[at++] = status;
    rows[at++] = slot;
    rows[at] = objectBytes;
  }

  #flush(): void {
    const rows = this.#answers.subarray(0, this.#answerCount * answerNumbers);
    this.#answerCount = 0;
    if (!this.#closed) native.peerAnswer(this.#handle, rows);
    else for (let at = 0; at < rows.length; at += answerNumbers) this.#giveBack(rows[at]!);
  }

  #giveBack(token: number): void {
    const onSent = this.#lent.get(token);
    this.#lent.delete(token);
    onSent?.();
  }

  #came(tag: number, result: FetchResult): void {
    const batch = this.#batches.get(Math.floor(tag / maxBatchBlocks));
    invariant(batch !== undefined, 'peer: a fetch ended twice');
    this.#gathering.came(batch.blocks, tag, result, result === 'ready');
  }

  #fetched(tag: number, result: FetchResult): void {
    const position = tag % maxBatchBlocks;
    const number = (tag - position) / maxBatchBlocks;
    const batch = this.#batches.get(number);
    invariant(batch !== undefined, 'peer: a fetch ended twice');
    if (--batch.open === 0) this.#batches.delete(number);
    batch.onDone(batch.indexes[position]!, result);
  }

  #deliver(rows: Float64Array, identities: Buffer): void {
    const requests: PeerRequest[] = [];
    const names = identities.length === 0 ? '' : identities.toString('latin1');
    let namespaceKey = names.slice(0, identityBytes / 2);
    for (let at = 0; at < rows.length; at += eventNumbers) {
      const kind = rows[at]!;
      const first = rows[at + 1]!;
      const second = rows[at + 2]!;
      if (kind === event.fetched) this.#came(first, fetchResults[second]!);
      else if (kind === event.request) {
        const begin = requests.length * identityBytes;
        // Requests of one read come together, and a string for each would be garbage.
        if (!names.startsWith(namespaceKey, begin)) namespaceKey = names.slice(begin, begin + identityBytes / 2);
        const hash = names.slice(begin + identityBytes / 2, begin + identityBytes);
        requests.push({ token: first, connection: second, slotBytes: rows[at + 3]!, namespaceKey, hash });
      } else if (kind === event.sent) {
        invariant(this.#lent.has(first), 'peer: a slot was given back twice');
        this.#giveBack(first);
      } else if (kind === event.up) this.#watchers.get(first)?.onUp();
      else if (kind === event.down) {
        const watcher = this.#watchers.get(first);
        this.#watchers.delete(first);
        watcher?.onDown(ends[second]!);
      } else this.refused[ends[second]!]++;
    }
    this.#gathering.turnOver();
    if (requests.length > 0 && !this.#closed) this.#onRequests?.(requests);
  }
}
