/**
 * Blocks that are more, or less, than keys and values of equal layers: MLA's latent, 8-bit numbers beside their scales, states of a fixed
 * size (Mamba, gated delta nets), and what one rank of a tensor-parallel group holds of them. A block is its layers one after the other, a layer
 * its parts one after the other, then zeros up to `layerBytes`:
 *
 *   | part | part | pad | part | part | pad | ...         one layer: layerBytes, a multiple of 16; blockBytes = layers × layerBytes
 *
 * Nobody needs to understand the parts to move a block: bytes are bytes. They are named so that two engines share a block only if
 * they read the same thing in it. Layers that hold other parts are another attention group. Byte for byte in docs/formats.md.
 */
import { Buffer } from 'node:buffer';
import { native } from '@kvtier/data-plane';
import { KvError } from '@kvtier/errors';
import { encodeCbor } from './encode.ts';

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

export interface PartsLayout {
  readonly layers: number;
  readonly blockTokens: number;
  readonly parts: readonly LayoutPart[];
  readonly layerBytes: number;
  readonly blockBytes: number;
  /**
   * Who of a tensor-parallel group holds these bytes: [rank, ranks], where no range of KV heads says it (states, which are cut by
   * channels; heads that several ranks hold alike). [0, 1]: all ranks hold the same, or there is one.
   */
  readonly tensorRank: readonly [number, number];
}

const alignment = 16;
const maxParts = 64;
const maxDimensions = 8;
const word = /^[a-z0-9][a-z0-9-]{0,31}$/;
const words = /^[a-z0-9-]+(,[a-z0-9-]+)*$/;

/** Sizes are reckoned here. @throws KvError CONFIG */
export function partsLayout(of: Omit<PartsLayout, 'layerBytes' | 'blockBytes'>): PartsLayout {
  const { layers, blockTokens, parts, tensorRank } = of;
  positive('layers', layers);
  positive('blockTokens', blockTokens);
  const [rank, ranks] = tensorRank;
  positive('ranks', ranks);
  check(Number.isInteger(rank) && rank >= 0 && rank < ranks, `rank ${rank} of ${ranks}; ranks count from 0`);
  check(parts.length > 0 && parts.length <= maxParts, `${parts.length} parts; 1 to ${maxParts} are possible`);
  const bytes = parts.reduce((sum, part) => sum + partBytes(part, blockTokens), 0);
  const layerBytes = Math.ceil(bytes / alignment) * alignment;
  const blockBytes = layers * layerBytes;
  check(Number.isSafeInteger(blockBytes), 'a block is larger than numbers can say');
  return { layers, blockTokens, parts, layerBytes, blockBytes, tensorRank };
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
export function partsFingerprint({
  layers,
  blockTokens,
  parts,
  layerBytes,
  blockBytes,
  tensorRank,
}: PartsLayout): Buffer {
  const fields = {
    format: 'kvtier-layout-2',
    ...{ layers, blockTokens, layerBytes, blockBytes, tensorRank: [...tensorRank] },
    parts: parts.map(({ name, dtype, per, shape, order }) => [name, dtype, per, [...shape], order]),
  };
  return Buffer.from(native.sha256(encodeCbor(fields)));
}

function positive(what: string, value: number): void {
  check(Number.isSafeInteger(value) && value > 0 && value <= 2 ** 31, `${what}: ${value} is not a count`);
}

function check(holds: boolean, why: string): void {
  if (!holds) throw new KvError('CONFIG', `layout: ${why}`);
}
