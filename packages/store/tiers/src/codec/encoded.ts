/**
 * The payload of an encoded object (docs/formats.md, "Encoded payload"): what was saved, and what it becomes again.
 *
 *     width · raw bytes · raw checksum · stored bytes of each plane │ plane 0 │ plane 1 │ …
 *
 * A plane that did not get smaller is stored as it is. Invariant: what is decoded has the length and checksum that the
 * block had before it was encoded, or it is not delivered; nothing here trusts a number that it read.
 */
export const encodedCodec = 1;
export const widths = [1, 2, 4] as const;
/** Bytes of an element that are taken apart into as many planes; 1: not taken apart. */
export type Width = (typeof widths)[number];

export interface EncodedTable {
  readonly width: Width;
  readonly rawBytes: number;
  readonly rawChecksum: bigint;
  /** One for each plane; equal to `rawBytes / width` for a plane that is stored as it is. */
  readonly planeBytes: readonly number[];
}

const fixedBytes = 24;
export const tableBytes = (width: Width): number => fixedBytes + 8 * width;
/** Enough to read any table. */
export const maxTableBytes = tableBytes(4);

export function encodeTable({ width, rawBytes, rawChecksum, planeBytes }: EncodedTable): Buffer {
  const out = Buffer.alloc(tableBytes(width));
  out.writeUInt8(width, 0);
  out.writeBigUInt64LE(BigInt(rawBytes), 8);
  out.writeBigUInt64LE(rawChecksum, 16);
  for (const [plane, bytes] of planeBytes.entries()) out.writeBigUInt64LE(BigInt(bytes), fixedBytes + 8 * plane);
  return out;
}

/** The table at the start of a payload of `payloadBytes`; undefined when it cannot be one. */
export function decodeTable(bytes: Buffer, payloadBytes: number): EncodedTable | undefined {
  if (bytes.length < fixedBytes) return undefined;
  const width = bytes.readUInt8(0) as Width;
  if (!widths.includes(width) || bytes.length < tableBytes(width)) return undefined;
  const rawBytes = Number(bytes.readBigUInt64LE(8));
  const planeBytes = Array.from({ length: width }, (_, plane) => Number(bytes.readBigUInt64LE(fixedBytes + 8 * plane)));
  const stored = planeBytes.reduce((sum, count) => sum + count, tableBytes(width));
  if (!Number.isSafeInteger(rawBytes) || rawBytes % width !== 0 || stored !== payloadBytes) return undefined;
  if (planeBytes.some((count) => count > rawBytes / width)) return undefined;
  return { width, rawBytes, rawChecksum: bytes.readBigUInt64LE(16), planeBytes };
}
