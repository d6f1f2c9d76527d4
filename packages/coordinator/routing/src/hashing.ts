/** Small hashes for routing (not names of anything): the same on every machine. */

/** 32 well mixed bits of two words (finalizer of MurmurHash3). */
export function mix32(low: number, high: number): number {
  let h = Math.imul(low ^ Math.imul(high, 0x85ebca6b), 0xcc9e2d51);
  h = Math.imul(h ^ (h >>> 16) ^ high, 0x85ebca6b);
  h = Math.imul(h ^ (h >>> 13), 0xc2b2ae35);
  return (h ^ (h >>> 16)) >>> 0;
}

/** FNV-1a of the UTF-16 units, mixed. */
export function hashText(text: string): number {
  let h = 0x811c9dc5;
  for (let i = 0; i < text.length; i++) h = Math.imul(h ^ text.charCodeAt(i), 0x01000193);
  return mix32(h, text.length);
}
