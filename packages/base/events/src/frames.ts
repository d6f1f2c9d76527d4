/**
 * The frames of vLLM's event protocol.
 *
 *   stream    [topic, seq u64 big-endian, payload]
 *   request   ["", first seq wanted]
 *   answers   ["", topic, seq, payload] ... ["", "", ff*8, ""]       publishers before July 2026 leave the topic out
 */
export const endOfReplay = Buffer.alloc(8, 0xff);

export function encodeSeq(seq: number): Buffer {
  const frame = Buffer.allocUnsafe(8);
  frame.writeBigUInt64BE(BigInt(seq));
  return frame;
}

/** undefined: not a sequence number. */
export function decodeSeq(frame: Uint8Array | undefined): number | undefined {
  if (frame?.length !== 8) return undefined;
  const seq = Number(Buffer.from(frame.buffer, frame.byteOffset, 8).readBigUInt64BE());
  return Number.isSafeInteger(seq) ? seq : undefined;
}
