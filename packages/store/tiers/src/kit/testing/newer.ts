/** For tests: objects as a newer program may write them. Their headers are sound, and say what this one does not know. */
import { native } from '@kvtier/data-plane';
import { headerBytes } from '@kvtier/identity';

/** What is new, and a change of a header that makes it so. */
export const newerHeaders: readonly (readonly [what: string, change: (header: Buffer) => void])[] = [
  ['another version', (header) => void header.writeUInt16LE(2, 8)],
  ['an unknown codec', (header) => void header.writeUInt16LE(2, 116)],
  ['an unknown flag', (header) => void header.writeUInt16LE(1, 118)],
];

/** `change` the header at the start of `object`, in place; its checksum is right again. */
export function resealed(object: Buffer, change: (header: Buffer) => void): Buffer {
  const header = object.subarray(0, headerBytes);
  change(header);
  header.writeBigUInt64LE(native.xxh3_64(header.subarray(0, headerBytes - 8)), headerBytes - 8);
  return object;
}
