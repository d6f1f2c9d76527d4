/**
 * Recovery: what the folder of segments holds, after a clean close (checkpoint) or a SIGKILL (footers, and a walk over
 * the object headers of segments that have none). Pure reading, apart from the removal of our own leftovers.
 *
 * Invariants: files that are not ours by name are left alone; nothing is listed that its header, generation and
 * checksums do not vouch for (payloads are verified at every read); a later generation wins over an earlier one.
 */
import { Buffer } from 'node:buffer';
import { closeSync, fstatSync, openSync, readdirSync, readFileSync, readSync, rmSync } from 'node:fs';
import { join } from 'node:path';
import { decodeHeader, type HashKey, headerBytes, slotBytesFor } from '@kvtier/identity';
import { decodeImage, decodeSegmentHeader, type IndexImage, imageBytesOf, pageBytes } from './format.ts';
import type { DiskLog } from './options.ts';

export const segmentName = (id: number): string => `segment-${String(id).padStart(8, '0')}.kvs`;
/** While a segment is being prepared. */
export const unfinishedSuffix = '.new';
export const checkpointName = 'checkpoint.kvc';

export interface RecoveredBlock {
  readonly namespace: Uint8Array;
  readonly hash: HashKey;
  readonly page: number;
  readonly pages: number;
  /** From a checkpoint; else the order of position counts. */
  readonly lastUse: number | undefined;
}

export interface RecoveredSegment {
  readonly id: number;
  readonly bytes: number;
  /** 0: its header is damaged; the file can be used again, its contents cannot. */
  readonly generation: number;
  readonly sealed: boolean;
  readonly tail: number;
  readonly blocks: readonly RecoveredBlock[];
}

/** All segments, by generation. A checkpoint is used up: it does not outlive the state that it describes. */
export function recoverSegments(dir: string, log: DiskLog): RecoveredSegment[] {
  const names = readdirSync(dir);
  for (const name of names) {
    if (/^(segment-\d{8}\.kvs|checkpoint\.kvc)\.new$/.test(name)) rmSync(join(dir, name));
  }
  const checkpoint = names.includes(checkpointName) ? takeCheckpoint(join(dir, checkpointName), log) : new Map();
  const segments: RecoveredSegment[] = [];
  for (const name of names) {
    const match = /^segment-(\d{8})\.kvs$/.exec(name);
    if (match === null) continue;
    const segment = recoverSegment(join(dir, name), Number(match[1]), checkpoint, log);
    if (segment !== undefined) segments.push(segment);
  }
  return segments.sort((a, b) => a.generation - b.generation || a.id - b.id);
}

interface Contents {
  readonly sealed: boolean;
  readonly tail: number;
  readonly blocks: RecoveredBlock[];
}
/** By `lifeOf` a segment: a checkpoint says nothing about a later generation. */
type Checkpoint = ReadonlyMap<string, Contents>;
const lifeOf = (id: number, generation: number): string => `${id}:${generation}`;

function takeCheckpoint(path: string, log: DiskLog): Checkpoint {
  const image = decodeImage('checkpoint', readFileSync(path));
  rmSync(path);
  if (image === undefined) log.warn({ path }, 'the checkpoint is damaged; the segments are read instead');
  return image === undefined ? new Map() : contentsOf(image, true);
}

function contentsOf(image: IndexImage, keepUse: boolean): Map<string, Contents> {
  const contents = image.segments.map(({ sealed, tail }): Contents => ({ sealed, tail, blocks: [] }));
  for (const { namespace: number, hash, page, pages, lastUse, segment } of image.records) {
    const namespace = image.namespaces[number];
    if (namespace === undefined) continue;
    const block = { namespace, hash: hash.toString('latin1') as HashKey, page, pages };
    contents[segment]?.blocks.push({ ...block, lastUse: keepUse ? lastUse : undefined });
  }
  return new Map(image.segments.map(({ id, generation }, number) => [lifeOf(id, generation), contents[number]!]));
}

/** undefined: the file was of no use and is gone. */
function recoverSegment(path: string, id: number, checkpoint: Checkpoint, log: DiskLog): RecoveredSegment | undefined {
  const fd = openSync(path, 'r');
  try {
    const bytes = fstatSync(fd).size;
    const header = decodeSegmentHeader(readAt(fd, 0, pageBytes));
    if (header === undefined || header.id !== id || header.bytes !== bytes) {
      log.warn({ path }, 'a segment is damaged (header or size); its blocks are lost and the file is made anew');
      rmSync(path);
      return undefined;
    }
    const { generation } = header;
    const life = lifeOf(id, generation);
    const known = checkpoint.get(life) ?? readFooter(fd, bytes, life) ?? { sealed: false, tail: pageBytes, blocks: [] };
    const inside = known.blocks.filter(
      ({ page, pages }) => page > 0 && pages > 0 && (page + pages) * pageBytes <= bytes,
    );
    if (known.sealed) return { id, bytes, generation, sealed: true, tail: known.tail, blocks: inside };
    const later = scan(fd, known.tail, bytes, generation);
    return { id, bytes, generation, sealed: false, tail: later.tail, blocks: [...inside, ...later.blocks] };
  } finally {
    closeSync(fd);
  }
}

function readFooter(fd: number, bytes: number, life: string): Contents | undefined {
  const footerBytes = imageBytesOf('footer', readAt(fd, bytes - pageBytes, pageBytes));
  if (footerBytes === undefined || footerBytes > bytes - pageBytes) return undefined;
  const image = decodeImage('footer', readAt(fd, bytes - footerBytes, footerBytes));
  return image === undefined ? undefined : contentsOf(image, false).get(life);
}

/** Walk the objects of an unsealed segment, up to the first header that is not of this generation. */
function scan(fd: number, from: number, bytes: number, generation: number): Pick<Contents, 'tail' | 'blocks'> {
  const blocks: RecoveredBlock[] = [];
  let at = from;
  while (at + headerBytes <= bytes) {
    const header = decodeHeader(readAt(fd, at, headerBytes));
    if ('error' in header || header.sequence !== generation) break;
    const objectBytes = slotBytesFor(header.payloadBytes);
    if (at + objectBytes > bytes) break;
    const removed = header.namespace.every((byte) => byte === 0);
    if (!removed) {
      const { namespace, hash } = header;
      blocks.push({ namespace, hash, page: at / pageBytes, pages: objectBytes / pageBytes, lastUse: undefined });
    }
    at += objectBytes;
  }
  return { blocks, tail: at };
}

function readAt(fd: number, position: number, bytes: number): Buffer {
  const out = Buffer.alloc(bytes);
  const count = readSync(fd, out, 0, bytes, position);
  return out.subarray(0, count);
}
