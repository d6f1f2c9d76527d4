/**
 * Reinsertion: before a segment is recycled, what was used since it was written is carried over into the open one.
 *
 * Invariants: at most `reinsertionShare` of the segment is carried over; it never waits for another segment (which might
 * wait for this one): what does not fit at once is left behind; slots on loan go back.
 */
import { headerBytes } from '@kvtier/identity';
import type { ReadStatus } from '../tier.ts';
import type { Appender, WriteJob } from './appender.ts';
import { type DiskIo, identitiesOf, placeOf } from './disk-io.ts';
import { pageBytes } from './format.ts';
import type { ArenaSlots } from './options.ts';
import { type DiskEntry, reinsertionShare, type Segment } from './segment.ts';

const batchBytes = 8 << 20;

export interface ReinsertionParts {
  readonly slots: ArenaSlots;
  readonly io: DiskIo;
  readonly appender: Appender;
  /** What a verified read ended with; damaged blocks are forgotten there. */
  readonly onRead: (entry: DiskEntry, result: number) => ReadStatus;
}

export async function reinsertHot(segment: Segment, parts: ReinsertionParts): Promise<void> {
  let budgetBytes = segment.bytes * reinsertionShare;
  const hot = segment.entries.filter((entry) => entry.listed && entry.hot);
  // Most recent first: parents are touched after their children, so a chain is cut at its end.
  hot.sort((a, b) => b.lastUse - a.lastUse);
  for (let from = 0; from < hot.length; ) {
    const batch: DiskEntry[] = [];
    let bytes = 0;
    while (from < hot.length && (batch.length === 0 || bytes < batchBytes)) {
      const entry = hot[from++]!;
      bytes += entry.pages * pageBytes;
      if (bytes > budgetBytes) return;
      batch.push(entry);
    }
    budgetBytes -= bytes;
    if (!(await carryOver(batch, parts))) return;
  }
}

/** False: stop, there is no place for more. */
async function carryOver(batch: readonly DiskEntry[], parts: ReinsertionParts): Promise<boolean> {
  const { slots, appender } = parts;
  const loans: { entry: DiskEntry; slot: number }[] = [];
  for (const entry of batch) {
    const slot = slots.allocate(entry.namespace, entry.pages * pageBytes - headerBytes);
    if (slot === undefined) break;
    loans.push({ entry, slot });
  }
  try {
    const ready = await Promise.all(loans.map(({ entry, slot }) => readOne(entry, slot, parts)));
    const ends: Promise<boolean>[] = [];
    const jobs: WriteJob[] = [];
    for (const [i, { entry, slot }] of loans.entries()) {
      if (!ready[i] || !entry.listed) continue;
      const { namespace, hash, lastUse } = entry;
      const job = { namespace, hash, slot, bytes: entry.pages * pageBytes, lastUse, wanted: () => entry.listed };
      ends.push(new Promise((resolve) => jobs.push({ ...job, onDone: resolve })));
    }
    const taken = appender.appendNow(jobs);
    await Promise.all(ends.slice(0, taken));
    return taken === batch.length;
  } finally {
    for (const { slot } of loans) slots.free(slot);
  }
}

function readOne(entry: DiskEntry, slot: number, parts: ReinsertionParts): Promise<boolean> {
  return new Promise((resolve) => {
    entry.segment.uses++;
    const onDone = (result: number): void => {
      entry.segment.release();
      resolve(parts.onRead(entry, result) === 'ready');
    };
    parts.io.read([{ ...placeOf(entry), slot, onDone }], identitiesOf(entry.namespace, [entry.hash]));
  });
}
