/**
 * What is written to segments behind their objects: marks over the headers of removed ones, and footers. One worker for all
 * segments of a device; a segment that has much to write is written to once.
 *
 *     remove ──▶ marked in memory ──(gathered)──▶ worker: marks of one segment ──▶ its footer ──▶ the next segment
 *                                                     └── nothing of it is listed any more ──▶ it is emptied by one write
 *
 * Invariants: at most one call at a time, however many blocks are removed at once; what waits is bounded by what was listed; a
 * mark that is not written yet is kept with its segment (`erased`), also over an outage of the device. Where the file system has
 * no space for it, it is due until there is some.
 */

import { native } from '@kvtier/data-plane';
import { encodeHeader, type HashKey, headerBytes } from '@kvtier/identity';
import type { DeviceFiles } from './device-files.ts';
import type { DiskIndex } from './disk-index.ts';
import { noEntry } from './entry-table.ts';
import { isNoSpace, type Room } from './file-room.ts';
import { emptyRecords, encodeFooter, pageBytes, record } from './format.ts';
import type { DiskStep } from './options.ts';
import type { Segment } from './segment.ts';

/** Removals of so long are gathered. */
const gatherMs = 100;
/** Marks of one call. */
const maxMarks = 256;
/** A namespace that no engine has: marks a removed object, so that a walk over the headers can step over it. */
const erasedNamespace = new Uint8Array(32);
const noHash = '\0'.repeat(32) as HashKey;

export interface ChoresOptions {
  readonly index: DiskIndex;
  readonly files: DeviceFiles;
  /** For what is written into files that are there. */
  readonly room: Room;
  /** Nothing of a sealed segment is listed any more; it is not marked, but emptied. */
  readonly empty: (segment: Segment) => Promise<void>;
  readonly onFailure: (error: unknown) => void;
  readonly step: (step: DiskStep) => void;
}

export class SegmentChores {
  readonly #options: ChoresOptions;
  readonly #due = new Set<Segment>();
  #timer: NodeJS.Timeout | undefined;
  #working: Promise<void> | undefined;
  #stopped = false;
  /** For those of one call. */
  readonly #headers = Buffer.alloc(maxMarks * headerBytes);

  constructor(options: ChoresOptions) {
    this.#options = options;
  }

  get isBusy(): boolean {
    return this.#working !== undefined;
  }

  /** An object must not come back after a restart. */
  erase(segment: Segment, page: number, pages: number): void {
    if (segment.state === 'free') return;
    segment.erased.push(page, pages);
    this.eraseLater(segment);
  }

  /** What `erased` of it names is to be marked. */
  eraseLater(segment: Segment): void {
    this.#due.add(segment);
    if (this.#working === undefined && !this.#stopped) this.#workIn(gatherMs);
  }

  /** Write a footer, soon. */
  foot(segment: Segment): void {
    segment.needsFooter = true;
    this.#due.add(segment);
    this.#work();
  }

  /** All that is due is written before this resolves, as far as there is space for it. */
  async settle(): Promise<void> {
    while (this.#due.size > 0 && !this.#stopped) {
      this.#work();
      if (this.#working === undefined) return;
      await this.#working;
    }
    await this.#working;
  }

  /** Nothing new is begun. */
  stop(): void {
    this.#stopped = true;
    clearTimeout(this.#timer);
  }

  #work(): void {
    clearTimeout(this.#timer);
    this.#timer = undefined;
    if (this.#stopped) return;
    const { waitMs } = this.#options.room;
    if (this.#working === undefined && waitMs > 0) {
      this.#workIn(waitMs);
      return;
    }
    this.#working ??= this.#all()
      .catch((error: unknown) => this.#options.onFailure(error))
      .finally(() => {
        this.#working = undefined;
        if (this.#due.size > 0) this.#work();
      });
  }

  #workIn(ms: number): void {
    this.#timer ??= setTimeout(() => this.#work(), ms).unref();
  }

  /** A segment that becomes due again meanwhile has its turn after the others. */
  async #all(): Promise<void> {
    for (const segment of this.#due) {
      this.#due.delete(segment);
      if (this.#stopped) return;
      try {
        await this.#attend(segment);
      } catch (error) {
        if (!isNoSpace(error)) throw error;
        this.#options.room.told(true);
        this.#due.add(segment);
        return;
      }
    }
  }

  async #attend(segment: Segment): Promise<void> {
    if (segment.state === 'sealed' && segment.listedCount === 0 && segment.erased.length > 0) {
      await this.#options.empty(segment);
      return;
    }
    segment.uses++;
    try {
      while (segment.erased.length > 0 && isLive(segment)) {
        await this.#mark(segment);
        segment.needsFooter ||= segment.hasFooter;
        if (this.#stopped) return;
      }
      if (segment.needsFooter && isLive(segment)) await this.writeFooter(segment);
    } finally {
      segment.release();
    }
  }

  async #mark(segment: Segment): Promise<void> {
    const pairs = segment.erased.slice(0, 2 * maxMarks);
    const count = pairs.length / 2;
    const positions = Float64Array.from({ length: count }, (_, i) => pairs[2 * i]! * pageBytes);
    const fields = { namespace: erasedNamespace, hash: noHash, parent: null, tokenCount: 0, payloadChecksum: 0n };
    await this.#options.files.run((files) => {
      const bytes = this.#headers.subarray(0, count * headerBytes);
      for (let i = 0; i < count; i++) {
        const payloadBytes = pairs[2 * i + 1]! * pageBytes - headerBytes;
        bytes.set(encodeHeader({ ...fields, payloadBytes, sequence: segment.generation }), i * headerBytes);
      }
      // Whole pages: a part of one would have to be read first.
      return native.fileWrite(files, segment.path, positions, bytes, pageBytes);
    });
    segment.erased.splice(0, pairs.length);
  }

  /** Of what is listed now. */
  async writeFooter(segment: Segment): Promise<void> {
    const { files, index, step } = this.#options;
    segment.uses++;
    try {
      segment.needsFooter = false;
      const sealing = segment.state === 'sealed';
      const footer = footerOf(index, segment);
      if (sealing) step('disk.seal.before');
      const position = Float64Array.of(segment.bytes - footer.length);
      await files.run((handle) => native.fileWrite(handle, segment.path, position, footer));
      segment.hasFooter = true;
      if (sealing) step('disk.seal.after');
    } catch (error) {
      segment.needsFooter = true;
      throw error;
    } finally {
      segment.release();
    }
  }
}

/** Its file holds what the index says, and will go on to. */
const isLive = ({ state }: Segment): boolean => state === 'open' || state === 'full' || state === 'sealed';

/** All before the last listed block is written, so a walk may begin behind it. */
function footerOf(index: DiskIndex, segment: Segment): Buffer {
  const { table } = index;
  const numbers = new Map<number, number>();
  const digests: Uint8Array[] = [];
  const records = emptyRecords(segment.listedCount);
  const { words, doubles } = records;
  let at = 0;
  for (const entry of index.listedOf(segment)) {
    const inIndex = table.namespace(entry);
    let number = numbers.get(inIndex);
    if (number === undefined) {
      number = numbers.size;
      numbers.set(inIndex, number);
      digests.push(index.namespaceOf(entry).digest);
    }
    const hashBytes = table.copyHash(entry, words, at);
    words[at + record.page] = table.page(entry);
    words[at + record.pages] = table.pages(entry);
    words[at + record.namespace] = number;
    words[at + record.kind] = hashBytes | (table.isHot(entry) ? record.hotBit : 0);
    doubles[at / 2 + record.lastUse] = table.lastUse(entry);
    words[at + record.expires] = table.expiresS(entry);
    at += record.words;
  }
  const { id, generation, last } = segment;
  const sealed = segment.state === 'sealed';
  const end = last === noEntry ? pageBytes : (table.page(last) + table.pages(last)) * pageBytes;
  return encodeFooter({ id, generation, sealed, tail: sealed ? segment.tail : end }, digests, records);
}
