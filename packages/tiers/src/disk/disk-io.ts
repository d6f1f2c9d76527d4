/**
 * The native I/O engine with promises: batches of objects between segments and arena slots. Tags are slots of a table
 * of callbacks; a row completes exactly once.
 */
import { Buffer } from 'node:buffer';
import { invariant } from '@kvtier/errors';
import type { HashKey, Namespace } from '@kvtier/identity';
import { type ArenaHandle, type IoHandle, native } from '@kvtier/native';
import { pageBytes } from './format.ts';
import type { DiskEntry } from './segment.ts';

export const identityBytes = 64;
/** Result of a verified read whose bytes are not the object that was asked for. */
export const badMessage = -74;

export interface IoSettings {
  readonly backend: 'auto' | 'io_uring' | 'threads';
  /** System I/Os in flight. */
  readonly depth: number;
  /** Bytes of one system I/O, about. */
  readonly ioBytes: number;
}

export interface ObjectRow {
  readonly file: number;
  readonly offset: number;
  readonly slot: number;
  readonly bytes: number;
  /** Bytes moved, or a negative errno, or `badMessage`. */
  readonly onDone: (result: number) => void;
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

/** Where an entry's object lies. */
export function placeOf(entry: DiskEntry): Pick<ObjectRow, 'file' | 'offset' | 'bytes'> {
  return { file: entry.segment.file, offset: entry.page * pageBytes, bytes: entry.pages * pageBytes };
}

export class DiskIo {
  readonly #io: IoHandle;
  readonly #callbacks: (((result: number) => void) | undefined)[] = [];
  readonly #freeTags: number[] = [];

  constructor(arena: ArenaHandle, settings: IoSettings) {
    this.#io = native.ioOpen(arena, settings, (tags, results) => this.#complete(tags, results));
  }

  get backend(): { backend: 'io_uring' | 'threads'; reason: string } {
    return native.ioBackend(this.#io);
  }

  openFile(path: string): number {
    return native.ioOpenFile(this.#io, path, { create: false, bytes: 0 });
  }

  closeFile(file: number): void {
    native.ioCloseFile(this.#io, file);
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

  close(): Promise<void> {
    return native.ioClose(this.#io);
  }

  #submit(kind: number, rows: readonly ObjectRow[], identities: Buffer): void {
    const numbers = new Float64Array(rows.length * 6);
    for (let i = 0; i < rows.length; i++) {
      const { file, offset, slot, bytes, onDone } = rows[i]!;
      const tag = this.#freeTags.pop() ?? this.#callbacks.length;
      this.#callbacks[tag] = onDone;
      const at = i * 6;
      numbers[at] = tag;
      numbers[at + 1] = kind;
      numbers[at + 2] = file;
      numbers[at + 3] = offset;
      numbers[at + 4] = slot;
      numbers[at + 5] = bytes;
    }
    native.ioSubmit(this.#io, numbers, identities);
  }

  #complete(tags: Float64Array, results: Float64Array): void {
    for (let i = 0; i < tags.length; i++) {
      const tag = tags[i]!;
      const onDone = this.#callbacks[tag];
      invariant(onDone !== undefined, 'disk: a row completed twice');
      this.#callbacks[tag] = undefined;
      this.#freeTags.push(tag);
      onDone(results[i]!);
    }
  }
}
