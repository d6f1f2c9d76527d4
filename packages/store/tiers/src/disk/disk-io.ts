/**
 * The native I/O queue with callbacks and deadlines: batches of objects between segments and arena slots. Tags are slots of
 * a table; a row completes exactly once.
 *
 * A row that the device does not end in time completes with `timedOut`, and its slot is put on hold with the arena until the
 * device does let go: nobody else gets that memory while the kernel may still write there.
 *
 * Of small blocks thousands end at once, or a few at a time many times in one turn of the event loop, and each means work for who
 * waits for it: no more than `rowsPerTurn` are told before the next turn, and for no longer than `turnMs`; the rest in the next ones,
 * in their order.
 */
import { Buffer } from 'node:buffer';
import { type ArenaHandle, type IoHandle, native } from '@kvtier/data-plane';
import { invariant } from '@kvtier/errors';
import type { HashKey, Namespace } from '@kvtier/identity';
import type { DeviceFiles } from './device-files.ts';
import type { ArenaSlots, IoSettings } from './options.ts';

export const identityBytes = 64;
/** Result of a verified read whose bytes are not the object that was asked for (-EBADMSG). */
export const badMessage = -74;
/** Result of a verified read of a sound object that a newer program wrote (-EPROTONOSUPPORT). */
export const foreignObject = -93;
/** Result of a row that was given up (-ETIMEDOUT). */
export const timedOut = -110;

/** What one means to a load, and the reads that take its place. Promises that go on then take as long once more. */
const rowsPerTurn = 256;
const turnMs = 5;

export interface ObjectRow {
  readonly file: number;
  readonly offset: number;
  readonly slot: number;
  readonly bytes: number;
  /** Bytes moved, or a negative errno, `badMessage`, `foreignObject` and `timedOut` among them. */
  readonly onDone: (result: number) => void;
}

interface InFlight {
  readonly onDone: (result: number) => void;
  readonly slot: number;
  readonly startMs: number;
  isGivenUp: boolean;
}

/** 64 bytes a block: namespace digest, hash zero padded. */
export function identitiesOf(namespace: Namespace, hashes: readonly HashKey[]): Buffer {
  const out = Buffer.alloc(hashes.length * identityBytes);
  for (let i = 0; i < hashes.length; i++) {
    out.set(namespace.digest, i * identityBytes);
    out.write(hashes[i]!, i * identityBytes + 32, 'latin1');
  }
  return out;
}

export class DiskIo {
  /** For tests that make the device fail (`native.ioFault`). */
  readonly handle: IoHandle;
  readonly #slots: ArenaSlots;
  readonly #rows: (InFlight | undefined)[] = [];
  readonly #freeTags: number[] = [];
  readonly #nowMs: () => number;
  #count = 0;
  /** Rows that have ended and are still to be told, from `#toldNext` on. */
  #ended: { readonly tag: number; readonly result: number }[] = [];
  #toldNext = 0;
  #turn: NodeJS.Immediate | undefined;

  /** `nowMs`: the clock by which rows are late. */
  constructor(arena: ArenaHandle, slots: ArenaSlots, settings: IoSettings, nowMs: () => number) {
    this.#slots = slots;
    this.#nowMs = nowMs;
    this.handle = native.ioOpen(arena, settings, (tags, results) => this.#complete(tags, results));
  }

  get backend(): { backend: 'io_uring' | 'threads'; reason: string } {
    return native.ioBackend(this.handle);
  }

  /** Rows that the device has not ended, those that were given up included. */
  get inFlightCount(): number {
    return this.#count;
  }

  openFile(files: DeviceFiles, path: string): Promise<number> {
    return files.run((handle) => native.ioTakeFile(this.handle, handle, path));
  }

  closeFile(files: DeviceFiles, file: number): void {
    native.ioCloseFile(this.handle, file, files.handle);
  }

  /** Read objects and verify them against `identities`. */
  read(rows: readonly ObjectRow[], identities: Buffer): void {
    this.#submit(2, rows, identities);
  }

  /** Write objects, each stamped with its segment's generation. */
  write(rows: readonly ObjectRow[], generations: readonly number[]): void {
    const stamps = Buffer.alloc(rows.length * identityBytes);
    for (let i = 0; i < rows.length; i++) stamps.writeBigUInt64LE(BigInt(generations[i]!), i * identityBytes);
    this.#submit(3, rows, stamps);
  }

  /** Give up rows that began before `sinceMs` (of this clock); returns how many. */
  giveUp(sinceMs: number): number {
    if (this.#count === 0) return 0;
    const late = this.#rows.filter((row) => row !== undefined && !row.isGivenUp && row.startMs < sinceMs);
    for (const row of late) {
      row!.isGivenUp = true;
      this.#slots.hold(row!.slot);
    }
    for (const row of late) row!.onDone(timedOut);
    return late.length;
  }

  /** Waits for what is in flight. When something hangs, the queue is left behind instead, until the process ends. */
  async close(): Promise<void> {
    this.#tell(Number.POSITIVE_INFINITY, Number.POSITIVE_INFINITY);
    if (this.#count > 0) native.ioAbandon(this.handle);
    else await native.ioClose(this.handle);
  }

  #submit(kind: number, rows: readonly ObjectRow[], identities: Buffer): void {
    const numbers = new Float64Array(rows.length * 6);
    const startMs = this.#nowMs();
    for (let i = 0; i < rows.length; i++) {
      const { file, offset, slot, bytes, onDone } = rows[i]!;
      const tag = this.#freeTags.pop() ?? this.#rows.length;
      this.#rows[tag] = { onDone, slot, startMs, isGivenUp: false };
      const at = i * 6;
      numbers[at] = tag;
      numbers[at + 1] = kind;
      numbers[at + 2] = file;
      numbers[at + 3] = offset;
      numbers[at + 4] = slot;
      numbers[at + 5] = bytes;
    }
    this.#count += rows.length;
    native.ioSubmit(this.handle, numbers, identities);
  }

  #complete(tags: Float64Array, results: Float64Array): void {
    for (let i = 0; i < tags.length; i++) this.#ended.push({ tag: tags[i]!, result: results[i]! });
    if (this.#turn === undefined) this.#share();
  }

  /** Tells this turn's share; what ends from now on waits for the next. */
  #share(): void {
    this.#tell(rowsPerTurn, performance.now() + turnMs);
    this.#turn = setImmediate(() => {
      this.#turn = undefined;
      if (this.#ended.length > 0) this.#share();
    });
  }

  #tell(most: number, untilMs: number): void {
    const end = Math.min(this.#ended.length, this.#toldNext + most);
    while (this.#toldNext < end) {
      const { tag, result } = this.#ended[this.#toldNext++]!;
      const row = this.#rows[tag];
      invariant(row !== undefined, 'disk: a row completed twice');
      this.#rows[tag] = undefined;
      this.#freeTags.push(tag);
      this.#count--;
      if (row.isGivenUp) this.#slots.release(row.slot);
      else row.onDone(result);
      if (performance.now() >= untilMs) break;
    }
    if (this.#toldNext < this.#ended.length) return;
    this.#ended = [];
    this.#toldNext = 0;
  }
}
