/** Test doubles' shared memory: arenas by path, and a checksum. Bytes are small arrays, so that tests can see them. */

export const blockBytes = 32;
export const hashBytes = 8;

/** FNV-1a, 64 bits: enough to notice a wrong byte. */
export function checksumOf(bytes: Uint8Array): bigint {
  let sum = 0xcbf29ce484222325n;
  for (const byte of bytes) sum = ((sum ^ BigInt(byte)) * 0x100000001b3n) & 0xffff_ffff_ffff_ffffn;
  return sum;
}

/** Every arena that a fake node ever made, by path. */
export const arenas = new Map<string, { readonly id: bigint; readonly bytes: Uint8Array }>();

/** The hash of block `index` of chain `chain`, and the only bytes that are right under it. */
export function hashOf(chain: number, index: number): Buffer {
  const hash = Buffer.alloc(hashBytes);
  hash.writeUInt32LE(chain, 0);
  hash.writeUInt32LE(index + 1, 4);
  return hash;
}

export const chainOf = (chain: number, blocks: number): Buffer =>
  Buffer.concat(Array.from({ length: blocks }, (_, i) => hashOf(chain, i)));

export function contentOf(hash: Uint8Array): Uint8Array {
  return Uint8Array.from({ length: blockBytes }, (_, i) => hash[i % hashBytes]! * 31 + i);
}
