/**
 * Objects in slots, encoded and decoded: LZ4 over byte planes. Bytes go from the slot through LZ4 (native, off the
 * JavaScript thread) into a slot: one buffer in between, as `lz4-napi` makes its own; for the slow tiers only. That library works in libuv's
 * pool, so it gets two of the four threads there (pool-turns.ts).
 */

import { type ArenaHandle, native } from '@kvtier/data-plane';
import { decodeHeader, encodeHeader, type Header, headerBytes, slotBytesFor } from '@kvtier/identity';
import { compress, uncompress } from 'lz4-napi';
import type { ArenaMemory } from '../arena/arena-memory.ts';
import { decodeTable, encodedCodec, encodeTable, maxTableBytes, tableBytes, type Width } from './encoded.ts';
import { PoolTurns } from './pool-turns.ts';

/** Planes that wait are far fewer than the blocks of reads and writes that tiers have under way. */
const lz4 = new PoolTurns(2, 4_096);
/** What runs there. (In the simulation it takes its time.) */
export const lz4Calls = { compress, uncompress };

/** A plane that LZ4 does not bring below this is stored as it is: decoding it would cost more than its bytes. */
const maxPlaneShare = 0.95;

export interface CodecPlace {
  readonly arena: ArenaHandle;
  readonly memory: ArenaMemory;
}

/** Header of the sound, not encoded object in `slot`; undefined: leave it alone. */
export function plainHeader(arena: ArenaHandle, slot: number): Header | undefined {
  const header = decodeHeader(native.arenaRead(arena, slot, headerBytes));
  return 'error' in header || header.codec !== 0 ? undefined : header;
}

/**
 * Encode the object in `source` into `target`, a slot of at least the same size. Returns the bytes of the new payload;
 * undefined, and `target` is as it was, when they would not be fewer.
 */
export async function encodeObject(
  { arena, memory }: CodecPlace,
  header: Header,
  source: number,
  target: number,
  width: Width,
): Promise<number | undefined> {
  const { payloadBytes: rawBytes } = header;
  if (rawBytes === 0 || rawBytes % width !== 0) return undefined;
  const planes = await planesOf({ arena, memory }, source + headerBytes, rawBytes, width);
  const stored = await Promise.all(
    planes.map(async (plane) => {
      const packed = await lz4.run(() => lz4Calls.compress(plane), false);
      return packed !== undefined && packed.length <= maxPlaneShare * plane.length ? packed : plane;
    }),
  );
  const planeBytes = stored.map(({ length }) => length);
  const payloadBytes = planeBytes.reduce((sum, count) => sum + count, tableBytes(width));
  if (payloadBytes >= rawBytes) return undefined;
  const payload = memory.view(target + headerBytes, payloadBytes);
  let at = encodeTable({ width, rawBytes, rawChecksum: header.payloadChecksum, planeBytes }).copy(payload);
  for (const plane of stored) {
    payload.set(plane, at);
    at += plane.length;
  }
  const payloadChecksum = native.xxh3_64(payload);
  native.arenaWrite(arena, target, encodeHeader({ ...header, codec: encodedCodec, payloadBytes, payloadChecksum }));
  return payloadBytes;
}

/**
 * Decode the verified object in `slot` (of `slotBytes`) in place. Returns the bytes of its payload, then; 'too large': not for
 * this slot; 'busy': too many wait, 'foreign': of a codec that this program does not know, and `slot` is as it was; undefined when it is
 * not what its table says.
 */
export async function decodeObject(
  { arena, memory }: CodecPlace,
  header: Header,
  slot: number,
  slotBytes: number,
): Promise<number | 'too large' | 'busy' | 'foreign' | undefined> {
  if (header.codec !== encodedCodec) return 'foreign';
  const payload = memory.view(slot + headerBytes, header.payloadBytes);
  const table = decodeTable(payload.subarray(0, maxTableBytes), header.payloadBytes);
  if (table === undefined) return undefined;
  if (slotBytesFor(table.rawBytes) > slotBytes) return 'too large';
  const { width, rawBytes, rawChecksum, planeBytes } = table;
  let at = tableBytes(width);
  const planes = await Promise.all(
    planeBytes.map((count) => {
      const stored = payload.subarray(at, at + count);
      at += count;
      return planeFrom(stored, rawBytes / width);
    }),
  );
  if (planes.includes('busy')) return 'busy';
  if (planes.some((plane) => plane?.length !== rawBytes / width)) return undefined;
  if (width === 1) memory.view(slot + headerBytes, rawBytes).set(planes[0] as Buffer);
  else await native.arenaJoinPlanes(arena, slot + headerBytes, planes as Buffer[]);
  const [checksum] = await native.arenaChecksum(arena, Float64Array.of(slot + headerBytes), rawBytes);
  if (checksum !== rawChecksum) return undefined;
  native.arenaWrite(
    arena,
    slot,
    encodeHeader({ ...header, codec: 0, payloadBytes: rawBytes, payloadChecksum: rawChecksum }),
  );
  return rawBytes;
}

async function planesOf(place: CodecPlace, offset: number, rawBytes: number, width: Width): Promise<Buffer[]> {
  if (width === 1) return [place.memory.view(offset, rawBytes)];
  const all = await native.arenaSplitPlanes(place.arena, offset, rawBytes, width);
  const planeBytes = rawBytes / width;
  return Array.from({ length: width }, (_, plane) => all.subarray(plane * planeBytes, (plane + 1) * planeBytes));
}

/** A plane of its own memory, as what comes of it is written where it was stored; undefined: not what it says; 'busy': too many wait. */
async function planeFrom(stored: Buffer, rawBytes: number): Promise<Buffer | 'busy' | undefined> {
  if (stored.length === rawBytes) return Buffer.from(stored);
  // LZ4's own length comes first: not believed, or a few flipped bits would ask for gigabytes.
  if (stored.length < 4 || stored.readUInt32LE(0) !== rawBytes) return undefined;
  return lz4.run(() => lz4Calls.uncompress(stored), true)?.catch(() => undefined) ?? 'busy';
}
