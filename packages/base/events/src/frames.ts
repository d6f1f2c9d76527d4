/**
 * The frames of vLLM's event protocol.
 *
 *   stream    [topic, seq u64 big-endian, payload]
 *   request   ["", first seq wanted]
 *   answers   ["", topic, seq, payload] ... ["", "", ff*8, ""]       publishers before July 2026 leave the topic out
 *
 * And ours: a request for the number before the last one that there can be asks for all that the publisher holds, in batches that all bear
 * the number of the next batch. Publishers of others have no batch of so high a number: they answer with the end.
 */
export const endOfReplay = Buffer.alloc(8, 0xff);
export const snapshotRequest = Buffer.from('fffffffffffffffe', 'hex');

export function encodeSeq(seq: number): Buffer {
  const frame = Buffer.allocUnsafe(8);
  frame.writeUInt32BE(Math.floor(seq / 2 ** 32), 0);
  frame.writeUInt32BE(seq % 2 ** 32, 4);
  return frame;
}

/** undefined: not a sequence number. */
export function decodeSeq(frame: Uint8Array | undefined): number | undefined {
  if (frame?.length !== 8) return undefined;
  let seq = 0;
  for (let i = 0; i < 8; i++) seq = seq * 256 + frame[i]!; // inexact only where it is not safe
  return Number.isSafeInteger(seq) ? seq : undefined;
}
