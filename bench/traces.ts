/**
 * Recorded request streams for replays: each request as the ids of its prompt's full blocks, where equal ids mean equal
 * chains. Reads `*.jsonl` and `*.jsonl.gz` of a folder; the formats are in test/fixtures/traces/README.md.
 */
import { readdirSync, readFileSync } from 'node:fs';
import { join } from 'node:path';
import { fileURLToPath } from 'node:url';
import { gunzipSync } from 'node:zlib';
import { KvError } from '@kvtier/errors';

export interface Trace {
  readonly name: string;
  /** Tokens that one id stands for. */
  readonly blockTokens: number;
  readonly requests: readonly Int32Array[];
  /** Of each request: when it came, ms; its prompt's and its answer's tokens. */
  readonly arrivalsMs: Float64Array;
  readonly inputTokens: Int32Array;
  readonly outputTokens: Int32Array;
  /** Distinct ids. */
  readonly uniqueBlocks: number;
}

/** Of some traces ids are hashes: numbers above 2^53 are read as what is written, or they would be one. */
type Id = number | string;

interface Line {
  readonly timestamp?: number | null;
  readonly output_length?: number | null;
  readonly input_length: number;
  readonly hash_ids: readonly Id[];
  readonly session?: number | string;
  readonly shared_prefix_blocks?: number;
}

/** Of a file: what one Map of JavaScript takes. */
const maxIds = 2 ** 24 - 1;
const maxBlockTokens = 65_536;

export const bundledTraces = fileURLToPath(new URL('../test/fixtures/traces', import.meta.url));

/** @throws KvError CONFIG: no such folder, or nothing in it; CORRUPT: a line that is none */
export function readTraces(folder: string): Trace[] {
  let files: string[];
  try {
    files = readdirSync(folder).filter((file) => /\.jsonl(\.gz)?$/.test(file));
  } catch (error) {
    throw new KvError('CONFIG', `${folder}: cannot be read (${(error as Error).message}); name a folder of traces`);
  }
  if (files.length === 0) throw new KvError('CONFIG', `${folder}: no *.jsonl or *.jsonl.gz; name a folder of traces`);
  return files.sort().map((file) => readTrace(join(folder, file), file.split(/[._]/)[0]!));
}

/** One file. @throws as `readTraces` */
export function readTrace(path: string, name: string): Trace {
  /** Ids as numbers from 0 on. */
  const numbers = new Map<Id, number>();
  const numberOf = (id: Id): number => {
    const known = numbers.get(id);
    if (known !== undefined) return known;
    if (numbers.size === maxIds)
      throw new KvError('CONFIG', `${path}: more than ${maxIds} distinct ids; take the first lines of it`);
    numbers.set(id, numbers.size);
    return numbers.size - 1;
  };
  const lastOf = new Map<number | string, Int32Array>();
  const read: {
    atMs: number;
    readonly inputTokens: number;
    readonly outputTokens: number;
    readonly ids: Int32Array;
  }[] = [];
  let number = 0;
  for (const line of linesOf(path)) {
    number++;
    if (line.trim() === '') continue;
    const parsed = parseLine(line, `${path}:${number}`);
    const { hash_ids, session, shared_prefix_blocks = 0, timestamp } = parsed;
    const shared = session === undefined ? [] : (lastOf.get(session)?.subarray(0, shared_prefix_blocks) ?? []);
    const ids = Int32Array.from([...shared, ...hash_ids.map(numberOf)]);
    if (session !== undefined) lastOf.set(session, ids);
    const [inputTokens, outputTokens] = [parsed.input_length, parsed.output_length ?? 1];
    read.push({ atMs: timestamp ?? 0, inputTokens, outputTokens, ids });
  }
  if (read.length === 0) throw new KvError('CORRUPT', `${path}: no request in it; name a folder of traces`);
  // Without times: one a second. Of several writers, lines may come a little out of order.
  if (read.every(({ atMs }) => atMs === read[0]!.atMs)) for (const [i, line] of read.entries()) line.atMs = 1_000 * i;
  read.sort((a, b) => a.atMs - b.atMs);
  return {
    name,
    blockTokens: blockTokensOf(read),
    requests: read.map(({ ids }) => ids),
    arrivalsMs: Float64Array.from(read, ({ atMs }) => atMs),
    inputTokens: Int32Array.from(read, ({ inputTokens }) => inputTokens),
    outputTokens: Int32Array.from(read, ({ outputTokens }) => outputTokens),
    uniqueBlocks: numbers.size,
  };
}

/** Line by line: a whole file may be longer than a string can be. */
function* linesOf(path: string): Generator<string> {
  let bytes: Buffer;
  try {
    bytes = readFileSync(path);
    if (bytes[0] === 0x1f && bytes[1] === 0x8b) bytes = gunzipSync(bytes);
  } catch (error) {
    const why = (error as Error).message;
    throw new KvError('CONFIG', `${path}: cannot be read (${why}); name a trace, gzipped or not`);
  }
  // Some editors write a mark of the byte order first.
  let from = bytes.subarray(0, 3).equals(byteOrderMark) ? 3 : 0;
  while (from < bytes.length) {
    const end = bytes.indexOf(0x0a, from);
    yield bytes.toString('utf8', from, end < 0 ? bytes.length : end);
    from = end < 0 ? bytes.length : end + 1;
  }
}
const byteOrderMark = Buffer.from([0xef, 0xbb, 0xbf]);

/**
 * The size by which most requests have as many ids as blocks, the last one begun or left out: a power of two where one explains as good as
 * as many as any does, since almost all are; of equals, the smallest.
 */
function blockTokensOf(
  requests: readonly { readonly inputTokens: number; readonly ids: { readonly length: number } }[],
): number {
  // n ids: tokens ÷ (n + 1) < size < tokens ÷ (n − 1). Counted where a range begins and where it has ended.
  const changes = new Int32Array(maxBlockTokens + 2);
  for (const { inputTokens, ids } of requests) {
    if (ids.length === 0) continue;
    const least = Math.floor(inputTokens / (ids.length + 1)) + 1;
    const most = ids.length === 1 ? maxBlockTokens : Math.ceil(inputTokens / (ids.length - 1)) - 1;
    if (least > maxBlockTokens || most < least) continue;
    changes[least]!++;
    changes[Math.min(most, maxBlockTokens) + 1]!--;
  }
  let explained = 0;
  const most = { any: 0, power: 0 };
  const best = { any: 1, power: 1 };
  for (let size = 1; size <= maxBlockTokens; size++) {
    explained += changes[size]!;
    if (explained > most.any) [most.any, best.any] = [explained, size];
    const isPower = (size & (size - 1)) === 0;
    if (isPower && explained > most.power) [most.power, best.power] = [explained, size];
  }
  return most.power >= asGood * most.any ? best.power : best.any;
}
/** Of the requests that the best size explains. */
const asGood = 0.98;

/** Whole numbers of so many digits may be above 2^53. */
const longNumber = /(?<![\w".])-?\d{16,}(?![\w".])/g;
const withWholeIds = (line: string): string => line.replace(/\[[^\]]*\]/g, (ids) => ids.replace(longNumber, '"$&"'));

function parseLine(line: string, where: string): Line {
  try {
    const parsed = JSON.parse(withWholeIds(line)) as Line;
    const { hash_ids, input_length, output_length, timestamp, shared_prefix_blocks = 0 } = parsed;
    const counts = [input_length, output_length ?? 1, shared_prefix_blocks];
    const isSound = counts.every((count) => Number.isInteger(count) && count >= 0 && count < 2 ** 31);
    if (isSound && Number.isFinite(timestamp ?? 0) && Array.isArray(hash_ids) && hash_ids.every(isId)) return parsed;
  } catch {}
  throw new KvError('CORRUPT', `${where}: not a line of a trace; see test/fixtures/traces/README.md`);
}

const isId = (id: unknown): boolean => (typeof id === 'string' ? id !== '' : Number.isFinite(id));
