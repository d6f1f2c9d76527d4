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

interface Line {
  readonly timestamp?: number;
  readonly output_length?: number;
  readonly input_length: number;
  readonly hash_ids: readonly number[];
  readonly session?: number | string;
  readonly shared_prefix_blocks?: number;
}

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
  const bytes = readFileSync(path);
  const text = (path.endsWith('.gz') ? gunzipSync(bytes) : bytes).toString();
  /** Ids as numbers from 0 on: of some traces they are hashes. */
  const numbers = new Map<number, number>();
  const lastOf = new Map<number | string, Int32Array>();
  const read = text
    .split('\n')
    .filter((line) => line.trim() !== '')
    .map((line, i) => {
      const { hash_ids, session, shared_prefix_blocks = 0, ...rest } = parseLine(line, `${path}:${i + 1}`);
      const shared = session === undefined ? [] : (lastOf.get(session)?.subarray(0, shared_prefix_blocks) ?? []);
      for (const id of hash_ids) if (!numbers.has(id)) numbers.set(id, numbers.size);
      const ids = Int32Array.from([...shared, ...hash_ids.map((id) => numbers.get(id)!)]);
      if (session !== undefined) lastOf.set(session, ids);
      return { ...rest, ids };
    });
  if (read.length === 0) throw new KvError('CORRUPT', `${path}: no request in it; name a folder of traces`);
  // Of several writers, lines may come a little out of order. Without times: one a second.
  const isTimed = read.some(({ timestamp }) => timestamp !== read[0]!.timestamp);
  const timed = read.map((line, i) => ({ ...line, atMs: isTimed ? (line.timestamp ?? 0) : 1_000 * i }));
  timed.sort((a, b) => a.atMs - b.atMs);
  return {
    name,
    blockTokens: blockTokensOf(read.map(({ input_length, ids }) => [input_length, ids.length])),
    requests: timed.map(({ ids }) => ids),
    arrivalsMs: Float64Array.from(timed, ({ atMs }) => atMs),
    inputTokens: Int32Array.from(timed, ({ input_length }) => input_length),
    outputTokens: Int32Array.from(timed, ({ output_length = 1 }) => output_length),
    uniqueBlocks: numbers.size,
  };
}

/** The power of two by which most requests have as many ids as blocks, the last one begun or left out; of equals, the smallest. */
function blockTokensOf(requests: readonly (readonly [tokens: number, ids: number])[]): number {
  let best = 1;
  let most = 0;
  for (let blockTokens = 1; blockTokens <= 65_536; blockTokens *= 2) {
    let explained = 0;
    for (const [tokens, ids] of requests) {
      const blocks = tokens / blockTokens;
      if (ids > 0 && (ids === Math.ceil(blocks) || ids === Math.floor(blocks))) explained++;
    }
    if (explained <= most) continue;
    most = explained;
    best = blockTokens;
  }
  return best;
}

function parseLine(line: string, where: string): Line {
  try {
    const parsed = JSON.parse(line) as Line;
    const { hash_ids, input_length, output_length = 1, timestamp = 0, shared_prefix_blocks = 0 } = parsed;
    const counts = [input_length, output_length, shared_prefix_blocks];
    const isSound = counts.every((count) => Number.isInteger(count) && count >= 0 && count < 2 ** 31);
    if (isSound && Number.isFinite(timestamp) && Array.isArray(hash_ids) && hash_ids.every(Number.isFinite))
      return parsed;
  } catch {}
  throw new KvError('CORRUPT', `${where}: not a line of a trace; see test/fixtures/traces/README.md`);
}
