/**
 * What nodes of one protocol version have learned since its first day. Each says what it knows in its nonce, the one field that a node
 * of any age takes as it comes: the proofs cover it, so nobody on the way can take anything from it. A node is sent only what it knows;
 * what it does not know all the same it skips.
 */
import { Buffer } from 'node:buffer';
import { randomBytes } from 'node:crypto';

/** Bits; never used anew for anything else. */
export const features = {
  /** The end of a pin, message 10. */
  endPin: 1,
  /** An answer may have several proofs, one for each secret of its sender. */
  manyProofs: 2,
} as const;
export const allFeatures = Object.values(features).reduce((sum, bit) => sum | bit, 0);

export const nonceBytes = 32;
/** Random bytes; then, of a node that tells: a mark, and its features (u32). */
const randomPart = 24;
const mark = Buffer.from('KVTF', 'latin1');

export function nonceTelling(known: number): Buffer {
  const nonce = Buffer.concat([randomBytes(randomPart), mark, Buffer.alloc(4)]);
  nonce.writeUInt32LE(known, randomPart + mark.length);
  return nonce;
}

/** 0: an older node, whose nonce is random to its end. */
export function featuresIn(nonce: Buffer): number {
  const isTold = nonce.compare(mark, 0, mark.length, randomPart, randomPart + mark.length) === 0;
  return isTold ? nonce.readUInt32LE(randomPart + mark.length) : 0;
}

/** Messages that a node need not know, by their kind. */
const needs: Readonly<Record<string, number>> = { endPin: features.endPin };

/** Whether a node that knows these features knows the message. */
export const isKnown = ({ kind }: { readonly kind: string }, known: number): boolean =>
  ((needs[kind] ?? 0) & ~known) === 0;
