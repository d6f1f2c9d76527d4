/**
 * The headers of *.safetensors files: which tensor lies where. Format (huggingface/safetensors):
 *
 *   | u64 LE: header bytes | JSON {name: {dtype, shape, data_offsets: [from, to]}} | data |
 *
 * Invariant: a table that is returned describes bytes that exist, each tensor as long as its shape and dtype say, no two
 * overlapping. Anything else is one KvError('MODEL') that names the file.
 */
import { KvError } from '@kvtier/errors';
import { type ModelFile, type ModelFolder, readExactly, readModelFolder } from './model-folder.ts';

export interface Tensor {
  /** Index into `TensorTable.files`. */
  readonly file: number;
  /** Of the first byte in the file. */
  readonly offset: number;
  readonly bytes: number;
  readonly dtype: string;
  readonly shape: readonly number[];
}

export interface TensorTable {
  /** Open for as long as the folder is. */
  readonly files: readonly ModelFile[];
  readonly tensors: ReadonlyMap<string, Tensor>;
}

const elementBytes: Readonly<Record<string, number>> = {
  ...{ F64: 8, I64: 8, U64: 8, F32: 4, I32: 4, U32: 4, F16: 2, BF16: 2, I16: 2, U16: 2 },
  ...{ I8: 1, U8: 1, BOOL: 1, F8_E4M3: 1, F8_E5M2: 1 },
};
/** The format's own limit. */
const maxHeaderBytes = 100_000_000;

const single = 'model.safetensors';
const index = 'model.safetensors.index.json';

/** The tensors of a model folder: model.safetensors, or the shards that model.safetensors.index.json names. */
export async function readTensorTable(from: string | ModelFolder): Promise<TensorTable> {
  if (typeof from === 'string') return readModelFolder(from, readTensorTable);
  const indexText = await from.text(index);
  const map = indexText === null ? null : weightMap(indexText, from.pathOf(index));
  const names = map ? [...new Set(map.values())].sort() : [single];
  const files: ModelFile[] = [];
  for (const name of names) {
    const file = await from.file(name);
    if (!file) throw new KvError('MODEL', `${from.pathOf(name)}: no such file; fetch the model again`);
    files.push(file);
  }
  const tensors = new Map<string, Tensor>();
  for (const [i, file] of files.entries()) {
    for (const [name, tensor] of await readHeader(file, i)) {
      if (map && map.get(name) !== names[i]) continue; // the index decides which copy counts
      tensors.set(name, tensor);
    }
  }
  for (const [name, shard] of map ?? []) {
    if (!tensors.has(name)) {
      throw new KvError('MODEL', `${from.pathOf(shard)}: tensor ${name} is missing; fetch the model again`);
    }
  }
  return { files, tensors };
}

/** tensor name → shard file name, from an index; names that would leave the folder are refused. */
function weightMap(text: string, where: string): Map<string, string> {
  const fail = (what: string) => new KvError('MODEL', `${where}: ${what}; fetch the model again`);
  let json: { weight_map?: unknown };
  try {
    json = JSON.parse(text) as { weight_map?: unknown };
  } catch (error) {
    throw fail(`not JSON (${(error as Error).message})`);
  }
  const map = json?.weight_map;
  if (typeof map !== 'object' || map === null || Array.isArray(map)) throw fail('"weight_map" is missing');
  const entries = Object.entries(map as Record<string, unknown>);
  for (const [name, shard] of entries) {
    if (typeof shard !== 'string' || !/^[\w.-]+\.safetensors$/.test(shard))
      throw fail(`shard of ${name} is not a file name`);
  }
  return new Map(entries as [string, string][]);
}

async function readHeader(file: ModelFile, index: number): Promise<Map<string, Tensor>> {
  const size = Number(file.facts.size);
  const fail = (what: string) => new KvError('MODEL', `${file.path}: ${what}; the file is damaged, fetch it again`);
  if (size < 8) throw fail(`${size} bytes are too few for a safetensors file`);
  const headerBytes = (await readExactly(file, 0, 8)).readBigUInt64LE();
  if (headerBytes < 2n || headerBytes > BigInt(Math.min(maxHeaderBytes, size - 8))) {
    throw fail(`its header claims ${headerBytes} bytes, the file has ${size}`);
  }
  const header = await readExactly(file, 8, Number(headerBytes));
  return parseHeader(header, 8 + header.length, size, index, fail);
}

function parseHeader(
  header: Buffer,
  dataOffset: number,
  fileBytes: number,
  file: number,
  fail: (what: string) => KvError,
): Map<string, Tensor> {
  let json: unknown;
  try {
    json = JSON.parse(header.toString('utf8'));
  } catch (error) {
    throw fail(`its header is not JSON (${(error as Error).message})`);
  }
  if (typeof json !== 'object' || json === null || Array.isArray(json)) throw fail('its header is not a JSON object');
  const tensors = new Map<string, Tensor>();
  const natural = (value: unknown): value is number => Number.isSafeInteger(value) && (value as number) >= 0;
  for (const [name, entry] of Object.entries(json as Record<string, unknown>)) {
    if (name === '__metadata__') continue;
    const { dtype, shape, data_offsets: offsets } = (entry ?? {}) as Record<string, unknown>;
    if (typeof dtype !== 'string' || !Object.hasOwn(elementBytes, dtype)) {
      throw fail(`tensor ${name} has the unknown dtype ${JSON.stringify(dtype)}`);
    }
    if (!Array.isArray(shape) || !shape.every(natural)) throw fail(`tensor ${name} has no proper shape`);
    if (!Array.isArray(offsets) || offsets.length !== 2 || !offsets.every(natural)) {
      throw fail(`tensor ${name} has no proper data_offsets`);
    }
    const [from, to] = offsets as [number, number];
    const bytes = shape.reduce((product, size) => product * size, elementBytes[dtype]!);
    if (to - from !== bytes) throw fail(`tensor ${name} has ${to - from} bytes, its shape and dtype need ${bytes}`);
    if (dataOffset + to > fileBytes) throw fail(`tensor ${name} ends at byte ${dataOffset + to} of ${fileBytes}`);
    tensors.set(name, { file, offset: dataOffset + from, bytes, dtype, shape: shape as number[] });
  }
  const placed = [...tensors].sort(([, a], [, b]) => a.offset - b.offset || a.bytes - b.bytes);
  for (let i = 1; i < placed.length; i++) {
    const [before, after] = [placed[i - 1]!, placed[i]!];
    if (before[1].offset + before[1].bytes > after[1].offset)
      throw fail(`tensors ${before[0]} and ${after[0]} overlap`);
  }
  return tensors;
}
