/**
 * Recorded request streams for replays: each request as the ids of its prompt's full blocks, where equal ids mean equal
 * chains. Reads `*.jsonl` and `*.jsonl.gz` of a folder; the formats are in test/fixtures/traces/README.md.
 */
import { readdirSync, readFileSync } from 'node:fs';
import { join } from 'node:path';
import { fileURLToPath } from 'node:url';
import { gunzipSync } from 'node:zlib';
import { KvError } from '@kvtier/errors';
import { median } from './figures.ts';

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
  readonly session?: number;
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
  const lines = text.split('\n').filter((line) => line !== '');
  const unique = new Set<number>();
  const lastOf = new Map<number, Int32Array>();
  const tokensPerId: number[] = [];
  const arrivalsMs = new Float64Array(lines.length);
  const inputTokens = new Int32Array(lines.length);
  const outputTokens = new Int32Array(lines.length);
  const requests = lines.map((line, i) => {
    const parsed = parseLine(line, `${path}:${i + 1}`);
    const { input_length, hash_ids, session, shared_prefix_blocks = 0 } = parsed;
    arrivalsMs[i] = parsed.timestamp ?? 0;
    inputTokens[i] = input_length;
    outputTokens[i] = parsed.output_length ?? 1;
    const shared = session === undefined ? [] : (lastOf.get(session)?.subarray(0, shared_prefix_blocks) ?? []);
    const ids = Int32Array.from([...shared, ...hash_ids]);
    if (session !== undefined) lastOf.set(session, ids);
    for (const id of hash_ids) unique.add(id);
    if (ids.length > 0) tokensPerId.push(input_length / ids.length);
    return ids;
  });
  if (tokensPerId.length === 0) throw new KvError('CORRUPT', `${path}: no request in it; name a folder of traces`);
  // The last block of a request may be only begun, or left out; block sizes are powers of two.
  const blockTokens = 2 ** Math.round(Math.log2(median(tokensPerId)));
  return { name, blockTokens, requests, arrivalsMs, inputTokens, outputTokens, uniqueBlocks: unique.size };
}

function parseLine(line: string, where: string): Line {
  try {
    const parsed = JSON.parse(line) as Line;
    if (Array.isArray(parsed.hash_ids) && Number.isInteger(parsed.input_length)) return parsed;
  } catch {}
  throw new KvError('CORRUPT', `${where}: not a line of a trace; see test/fixtures/traces/README.md`);
}
