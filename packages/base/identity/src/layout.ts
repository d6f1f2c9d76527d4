/**
 * How the payload of a block lies in memory: the one format for every engine. Keys and values, or what takes their place: MLA's
 * latent, 8-bit numbers beside their scales, states of a fixed size (Mamba, gated delta nets), pages that only the engine itself can read. A
 * block is its layers one after the other, a layer its parts one after the other, then zeros up to `layerBytes`:
 *
 *   | part | part | pad | part | part | pad | ...         one layer: layerBytes
 *
 * Nobody needs to understand the parts to move a block: bytes are bytes. They are named so that two engines share a block only if
 * they read the same thing in it. Byte for byte in docs/formats.md.
 */
import { Buffer } from 'node:buffer';
import { native } from '@kvtier/data-plane';
import { KvError } from '@kvtier/errors';
import { type CborValue, encodeCbor } from './encode.ts';

/** What one number of a part takes. */
export const partNumberBytes = {
  ...{ f32: 4, f16: 2, bf16: 2, i32: 4, i8: 1, u8: 1 },
  ...{ e4m3: 1, e5m2: 1, e8m0: 1 },
} as const;

export interface LayoutPart {
  /** keys, values, latent, rope, scales, conv-state, state, ...: what the numbers are. */
  readonly name: string;
  readonly dtype: keyof typeof partNumberBytes;
  /** Numbers for each token of the block; or once a block: the state behind its last token. */
  readonly per: 'token' | 'block';
  /** Of one token, or of the block: [KV heads, head dim], [latent dim], [heads, head dim, state dim] ... */
  readonly shape: readonly number[];
  /** Dimensions, outermost first, as the bytes lie: "head,token,dim". */
  readonly order: string;
}

/** Layers that follow one another and are alike. */
export interface LayerRun {
  readonly count: number;
  /** Of one layer. */
  readonly layerBytes: number;
  readonly parts: readonly LayoutPart[];
}

export interface BlockLayout {
  readonly blockTokens: number;
  readonly blockBytes: number;
  /** No two neighbours alike. */
  readonly layers: readonly LayerRun[];
  /**
   * Who of a tensor-parallel group holds these bytes: [rank, ranks], where no range of KV heads says it (states, which are cut by
   * channels; heads that several ranks hold alike). [0, 1]: all ranks hold the same, or there is one.
   */
  readonly tensorRank: readonly [number, number];
  /** Of a pipeline that hands layers to one process after the other: [stage, stages]. */
  readonly stage: readonly [number, number];
  /** Where parts do not say all: the engine that lays bytes out in a way of its own, and what of it gives them their meaning. */
  readonly engine: { readonly [key: string]: CborValue } | null;
}

/** What is said of a layout; sizes follow from it. */
export interface SaidLayout {
  readonly blockTokens: number;
  readonly layers: readonly Pick<LayerRun, 'count' | 'parts'>[];
  readonly tensorRank?: readonly [number, number];
  readonly stage?: readonly [number, number];
  readonly engine?: BlockLayout['engine'];
}

/** Plain keys and values of layers that are alike, as kvtier's own engine lays them out. */
export interface KeysAndValues {
  readonly layers: number;
  readonly kvHeads: number;
  readonly headDim: number;
  readonly dtype: string;
  readonly blockTokens: number;
  readonly blockBytes: number;
  /** The dimensions, outermost first; known is "layer,kv,head,token,dim". */
  readonly order: string;
}

const alignment = 16;
const maxParts = 64;
const maxRuns = 1024;
const maxDimensions = 8;
const word = /^[a-z0-9][a-z0-9-]{0,31}$/;
const words = /^[a-z0-9-]+(,[a-z0-9-]+)*$/;

/** A layer's bytes are those of its parts, and zeros up to a multiple of 16. @throws KvError CONFIG */
export function blockLayout(of: SaidLayout): BlockLayout {
  const { blockTokens, layers, tensorRank = [0, 1], stage = [0, 1], engine = null } = of;
  positive('blockTokens', blockTokens);
  oneOf('rank', tensorRank);
  oneOf('stage', stage);
  check(
    layers.length > 0 && layers.length <= maxRuns,
    `${layers.length} kinds of layers; 1 to ${maxRuns} are possible`,
  );
  const runs: LayerRun[] = [];
  for (const { count, parts } of layers) {
    positive('layers', count);
    check(parts.length > 0 && parts.length <= maxParts, `${parts.length} parts; 1 to ${maxParts} are possible`);
    const bytes = parts.reduce((sum, part) => sum + partBytes(part, blockTokens), 0);
    const last = runs.at(-1);
    const run = { count, layerBytes: Math.ceil(bytes / alignment) * alignment, parts };
    if (last && encodeParts(last.parts).equals(encodeParts(parts))) {
      runs[runs.length - 1] = { ...run, count: last.count + count };
    } else runs.push(run);
  }
  const blockBytes = runs.reduce((sum, { count, layerBytes }) => sum + count * layerBytes, 0);
  check(Number.isSafeInteger(blockBytes), 'a block is larger than numbers can say');
  return { blockTokens, blockBytes, layers: runs, tensorRank, stage, engine };
}

/** @throws KvError CONFIG where the bytes are others, or lie in another order, than kvtier's own engine's */
export function keysAndValues(kv: KeysAndValues): BlockLayout {
  const { layers: count, kvHeads, headDim, blockTokens, blockBytes, order } = kv;
  check(order === 'layer,kv,head,token,dim', `order "${order}" of keys and values; known is layer,kv,head,token,dim`);
  const dtype = kv.dtype as LayoutPart['dtype'];
  const part = (name: string): LayoutPart => {
    return { name, dtype, per: 'token', shape: [kvHeads, headDim], order: 'head,token,dim' };
  };
  const layout = blockLayout({ blockTokens, layers: [{ count, parts: [part('keys'), part('values')] }] });
  check(layout.blockBytes === blockBytes, `a block of ${blockBytes} bytes, whose parts take ${layout.blockBytes}`);
  return layout;
}

/** Bytes of a part in one layer of a block. */
function partBytes({ name, dtype, per, shape, order }: LayoutPart, blockTokens: number): number {
  check(word.test(name), `a part named "${name}"; names are words of up to 32 small letters, digits and "-"`);
  check(Object.hasOwn(partNumberBytes, dtype), `part ${name}: "${dtype}" is no type of number`);
  check(per === 'token' || per === 'block', `part ${name}: per "${per}"; say token or block`);
  check(shape.length > 0 && shape.length <= maxDimensions, `part ${name}: ${shape.length} dimensions`);
  for (const size of shape) positive(`part ${name}: a dimension`, size);
  check(order.length <= 128 && words.test(order), `part ${name}: order "${order}"; say "head,token,dim"`);
  const dimensions = order.split(',').length;
  const wanted = shape.length + (per === 'token' ? 1 : 0);
  check(dimensions === wanted, `part ${name}: order "${order}" has ${dimensions} dimensions, the part ${wanted}`);
  return shape.reduce((count, size) => count * size, per === 'token' ? blockTokens : 1) * partNumberBytes[dtype];
}

/** SHA-256, 32 bytes. Equal layouts, and only those, may exchange blocks. */
export function layoutFingerprint({ blockTokens, blockBytes, layers, tensorRank, stage, engine }: BlockLayout): Buffer {
  const fields = {
    format: 'kvtier-layout-3',
    ...{ blockTokens, blockBytes, tensorRank: [...tensorRank], stage: [...stage], engine },
    layers: layers.map(({ count, layerBytes, parts }) => [count, layerBytes, partsOf(parts)]),
  };
  return Buffer.from(native.sha256(encodeCbor(fields)));
}

const partsOf = (parts: readonly LayoutPart[]): CborValue =>
  parts.map(({ name, dtype, per, shape, order }) => [name, dtype, per, [...shape], order]);
const encodeParts = (parts: readonly LayoutPart[]): Buffer => encodeCbor(partsOf(parts));

function oneOf(what: string, [number, count]: readonly [number, number]): void {
  positive(`${what}s`, count);
  const known = Number.isInteger(number) && number >= 0 && number < count;
  check(known, `${what} ${number} of ${count}; ${what}s count from 0`);
}

function positive(what: string, value: number): void {
  check(Number.isSafeInteger(value) && value > 0 && value <= 2 ** 31, `${what}: ${value} is not a count`);
}

function check(holds: boolean, why: string): void {
  if (!holds) throw new KvError('CONFIG', `layout: ${why}`);
}
