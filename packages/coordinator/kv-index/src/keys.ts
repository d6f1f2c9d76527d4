/** Chain hashes as the index's keys: the last 8 bytes of each, big-endian, as two words: the integer form of vLLM's events. */

/** Block hashes, two words each: low, high half of the 64-bit form. */
export type Keys = Int32Array;

/** `hashes`: packed, `hashBytes` each. */
export function keysOfHashes(hashes: Uint8Array, hashBytes: number): Keys {
  const view = new DataView(hashes.buffer, hashes.byteOffset, hashes.byteLength);
  const keys = new Int32Array(2 * Math.floor(hashes.length / hashBytes));
  for (let block = 0, end = hashBytes; end <= hashes.length; block++, end += hashBytes) {
    keys[2 * block] = view.getInt32(end - 4);
    keys[2 * block + 1] = view.getInt32(end - 8);
  }
  return keys;
}
