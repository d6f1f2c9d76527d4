/**
 * Reinsertion: before a segment is recycled, what was used since it was written is carried over into the open one.
 *
 * Invariants: at most `reinsertionShare` of the segment is carried over; it never waits for another segment (which might
 * wait for this one): what does not fit at once is left behind; slots on loan go back.
 */
import type { ReadStatus } from '../kit/tier.ts';
import type { Appender, WriteJob } from './appender.ts';
import type { DiskIndex } from './disk-index.ts';
import { type DiskIo, identitiesOf } from './disk-io.ts';
import type { EntryNumber } from './entry-table.ts';
import { pageBytes } from './format.ts';
import type { ArenaSlots } from './options.ts';
import { reinsertionShare, type Segment } from './segment.ts';

const batchBytes = 8 << 20;

export interface ReinsertionParts {
  readonly slots: ArenaSlots;
  readonly index: DiskIndex;
  readonly io: DiskIo;
  readonly appender: Appender;
  /** What a verified read ended with; damaged blocks are forgotten there. */
  readonly onRead: (entry: EntryNumber, result: number) => ReadStatus;
}

export async function reinsertHot(segment: Segment, parts: ReinsertionParts): Promise<void> {
  let budgetBytes = segment.bytes * reinsertionShare;
  const { table } = parts.index;
  const hot = [...parts.index.listedOf(segment)].filter((entry) => table.isHot(entry));
  // Most recent first: parents are touched after their children, so a chain is cut at its end.
  hot.sort((a, b) => table.lastUse(b) - table.lastUse(a));
  for (let from = 0; from < hot.length; ) {
    const batch: EntryNumber[] = [];
    let bytes = 0;
    while (from < hot.length && (batch.length === 0 || bytes < batchBytes)) {
      const entry = hot[from++]!;
      bytes += table.pages(entry) * pageBytes;
      if (bytes > budgetBytes) return;
      batch.push(entry);
    }
    budgetBytes -= bytes;
    if (!(await carryOver(batch, parts))) return;
  }
}

/** False: stop, there is no place for more. */
async function carryOver(batch: readonly EntryNumber[], parts: ReinsertionParts): Promise<boolean> {
  const { slots, appender, index } = parts;
  const { table } = index;
  const loans: { entry: EntryNumber; slot: number }[] = [];
  let isShort = false;
  for (const entry of batch) {
    if (!table.isListed(entry)) continue;
    const slot = slots.lend(index.namespaceOf(entry), table.pages(entry) * pageBytes);
    isShort = slot === undefined;
    if (slot === undefined) break;
    loans.push({ entry, slot });
  }
  try {
    const ready = await Promise.all(loans.map(({ entry, slot }) => readOne(entry, slot, parts)));
    const ends: Promise<boolean>[] = [];
    const jobs: WriteJob[] = [];
    for (const [i, { entry, slot }] of loans.entries()) {
      if (!ready[i] || !table.isListed(entry)) continue;
      const [namespace, hash, lastUse] = [index.namespaceOf(entry), table.hash(entry), table.lastUse(entry)];
      const wanted = (): boolean => table.isListed(entry);
      const bytes = table.pages(entry) * pageBytes;
      const expiresS = table.expiresS(entry);
      const job = { namespace, hash, slot, bytes, lastUse, expiresS, wanted };
      ends.push(new Promise((resolve) => jobs.push({ ...job, onDone: resolve })));
    }
    const taken = appender.appendNow(jobs);
    await Promise.all(ends.slice(0, taken));
    return taken === jobs.length && !isShort;
  } finally {
    for (const { slot } of loans) slots.free(slot);
  }
}

function readOne(entry: EntryNumber, slot: number, parts: ReinsertionParts): Promise<boolean> {
  return new Promise((resolve) => {
    const { index } = parts;
    const segment = index.segmentOf(entry);
    segment.uses++;
    const onDone = (result: number): void => {
      segment.release();
      resolve(parts.onRead(entry, result) === 'ready');
    };
    const [offset, bytes] = [index.table.page(entry) * pageBytes, index.table.pages(entry) * pageBytes];
    const identities = identitiesOf(index.namespaceOf(entry), [index.table.hash(entry)]);
    parts.io.read([{ file: segment.file, offset, bytes, slot, onDone }], identities);
  });
}
