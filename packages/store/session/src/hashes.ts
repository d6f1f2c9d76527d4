/** Hashes as they travel: packed one after another in one bytes field, in chain order. */
import type { Buffer } from 'node:buffer';
import { KvError } from '@kvtier/errors';
import { type HashKey, unpackHashKeys } from '@kvtier/identity';
import { type PackedHashes, type Ticket, ticketBytes, ticketOf } from '@kvtier/placement';

/** As they came, without a string for each. KvError PROTOCOL when the bytes are no whole number of hashes, or too many. */
export function checkHashes(packed: Buffer, hashBytes: number, maxHashes: number, call: string): PackedHashes {
  const count = packed.length / hashBytes;
  if (!Number.isInteger(count) || count > maxHashes) {
    throw new KvError(
      'PROTOCOL',
      `${call}: ${packed.length} bytes are not 0 to ${maxHashes} hashes of ${hashBytes} bytes; send whole hashes, fewer at once`,
    );
  }
  return { packed, hashBytes };
}

/** KvError PROTOCOL when the bytes are no whole number of hashes, or too many. */
export function unpackHashes(packed: Buffer, hashBytes: number, maxHashes: number, call: string): HashKey[] {
  return unpackHashKeys(checkHashes(packed, hashBytes, maxHashes, call).packed, hashBytes);
}

/** One hash, or null for an empty field. */
export function unpackParent(packed: Buffer, hashBytes: number, call: string): HashKey | null {
  if (packed.length === 0) return null;
  return unpackHashes(packed, hashBytes, 1, `${call}: parent`)[0]!;
}

/** KvError PROTOCOL when it has another length: it is to be drawn at random, and not to be guessed. */
export function unpackTicket(bytes: Buffer, call: string): Ticket {
  if (bytes.length === ticketBytes) return ticketOf(bytes);
  throw new KvError('PROTOCOL', `${call}: a ticket of ${bytes.length} bytes; draw ${ticketBytes} at random`);
}
