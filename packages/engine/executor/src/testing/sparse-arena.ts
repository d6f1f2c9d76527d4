/** An arena's file without a node: its header, and nothing behind it that takes memory before it is touched. */
import { truncateSync, writeFileSync } from 'node:fs';

/** @throws where the file is there already */
export function makeSparseArena(path: string, bytes: number, id: bigint): void {
  const header = Buffer.alloc(32);
  header.write('KVTIERAR');
  header.writeUInt32LE(1, 8);
  header.writeUInt32LE(4096, 12);
  header.writeBigUInt64LE(BigInt(bytes), 16);
  header.writeBigUInt64LE(id, 24);
  writeFileSync(path, header, { flag: 'wx', mode: 0o600 });
  truncateSync(path, bytes);
}
