/**
 * What a device's folder holds, taken over by a new life of it: segments into its pool, their blocks into the index, as recently used as
 * its checkpoint says.
 *
 * Invariant: nothing is listed that was removed before, or that could not be read in this life of its segment.
 */
import { join } from 'node:path';
import { native } from '@kvtier/data-plane';
import { type Namespace, namespaceFromDigest } from '@kvtier/identity';
import type { DeviceFiles } from './device-files.ts';
import type { DiskIndex } from './disk-index.ts';
import { noEntry } from './entry-table.ts';
import { pageBytes, type SegmentUses } from './format.ts';
import type { DiskTierOptions } from './options.ts';
import { type FoundBlock, findSegments, readCheckpoint, recoverContents, segmentName } from './recovery.ts';
import type { Segment } from './segment.ts';
import type { SegmentPool } from './segment-pool.ts';

export interface ContentsParts {
  readonly dir: string;
  readonly files: DeviceFiles;
  readonly index: DiskIndex;
  readonly limitBytes: number;
  readonly metadataBytes: number;
  readonly log: DiskTierOptions['log'];
  /** By the life of its segment (`lifeOf`), what was removed and is not marked on the device: page and pages of each. */
  readonly erased: ReadonlyMap<string, readonly number[]>;
  /** Removed as well: the namespace's key and the hash of each. Grows while the folder is listed. */
  readonly removed: ReadonlySet<string>;
  /** A block there could not be read: `placeOf`. */
  readonly badPlaces: ReadonlySet<string>;
}

type LifeOf = Pick<Segment, 'id' | 'generation'>;
export const lifeOf = ({ id, generation }: LifeOf): string => `${id}:${generation}`;
export const placeOf = (segment: LifeOf, page: number): string => `${lifeOf(segment)}:${page}`;

/** The segment that goes on to be written, and the bytes of all. `newPool`: called when the folder has been read. */
export async function takeOver(
  parts: ContentsParts,
  newPool: () => SegmentPool,
): Promise<{ readonly pool: SegmentPool; readonly open: Segment | undefined; readonly bytes: number }> {
  const { dir, files, index, limitBytes, metadataBytes, log, erased } = parts;
  const checkpoint = await readCheckpoint(dir, files, metadataBytes, log);
  const all = await findSegments(dir, files, log);
  let bytes = all.reduce((sum, segment) => sum + segment.bytes, 0);
  let excess = 0;
  // The budget has shrunk: the oldest segments go.
  for (; bytes > limitBytes; excess++) {
    const path = join(dir, segmentName(all[excess]!.id));
    await files.run((handle) => native.fileRemove(handle, path));
    bytes -= all[excess]!.bytes;
  }
  const pool = newPool();
  if (checkpoint !== undefined) index.advance(checkpoint.tick);
  const known = new Map(checkpoint?.segments.map((uses) => [lifeOf(uses), uses]));
  let open: Segment | undefined;
  const ranks = new Map<Segment, number>();
  const due: [Segment, readonly number[], boolean][] = [];
  for (const found of all.slice(excess)) {
    const segment = await pool.adopt(found);
    if (found.generation === 0) continue;
    const uses = known.get(lifeOf(found));
    const gone = [...(erased.get(lifeOf(found)) ?? [])];
    const { sealed, hasFooter, tail, hasBad } = await list(parts, segment, uses, checkpoint?.tick ?? 0, gone);
    if (!sealed && tail === pageBytes) {
      pool.setFree(segment);
      continue;
    }
    ranks.set(segment, uses?.rank ?? Number.POSITIVE_INFINITY);
    segment.tail = Math.max(segment.tail, tail);
    segment.hasFooter = hasFooter;
    // A footer leaves out what could not be read: a mark would have to be written there. None, where no footer could be read either.
    const needsFooter = hasBad && (hasFooter || !sealed);
    if (gone.length > 0 || needsFooter) due.push([segment, gone, needsFooter]);
    open = sealed || hasBad ? undefined : segment; // only the latest one goes on
  }
  if (open !== undefined) open.state = 'open';
  for (const [segment] of [...ranks].sort(
    ([a, rankA], [b, rankB]) => compare(rankA, rankB) || a.generation - b.generation,
  )) {
    pool.track(segment);
  }
  for (const each of due) pool.eraseAgain(...each); // which may empty it: the policy knows it by now
  return { pool, open, bytes };
}

/** Adds to `gone` what it finds of removed names. `hasBad`: it has passed over what could not be read. */
async function list(
  { dir, files, index, removed, badPlaces }: ContentsParts,
  segment: Segment,
  known: SegmentUses | undefined,
  tick: number,
  gone: number[],
) {
  const gonePages = new Set(gone.filter((_, at) => at % 2 === 0));
  const namespaces = new Map<Uint8Array, Namespace>();
  const uses = known?.uses ?? new Uint32Array(0);
  let at = 0;
  let digest: Uint8Array | undefined;
  let namespace: Namespace | undefined;
  let hasBad = false;
  const contents = await recoverContents(dir, files, segment, (block) => {
    const { page, pages } = block;
    if (gonePages.has(page)) return;
    if (badPlaces.size > 0 && badPlaces.has(placeOf(segment, page))) {
      hasBad = true;
      return;
    }
    if (namespace === undefined || block.namespace !== digest) {
      digest = block.namespace;
      namespace = namespaces.get(digest) ?? namespaceFromDigest(digest);
      if (namespaces.size < 64) namespaces.set(digest, namespace);
    }
    if (removed.size > 0 && removed.has(namespace.key + hashOf(block))) {
      gone.push(page, pages);
      return;
    }
    while (at < uses.length && uses[at]! < page) at += 2;
    const use = uses[at] === page ? uses[at + 1] : undefined;
    segment.recovered(namespace.key, (page + pages) * pageBytes);
    const lastUse = use === undefined ? block.lastUse : Math.max(0, tick - Math.floor(use / 2));
    const entry = index.restore(namespace, block, segment, lastUse);
    if (entry === noEntry) return;
    if (block.hot || (use !== undefined && use % 2 === 1)) index.table.setHot(entry);
  });
  return { ...contents, hasBad };
}

const hashOf = ({ words, at, hashBytes }: FoundBlock): string =>
  Buffer.from(words.buffer, words.byteOffset + 4 * at, hashBytes).toString('latin1');

const compare = (a: number, b: number): number => (a === b ? 0 : a < b ? -1 : 1);
