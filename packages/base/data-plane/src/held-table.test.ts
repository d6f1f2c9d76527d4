/** The table of held blocks: what is not one is none. */
import { mkdtempSync, rmSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { afterEach, beforeEach, expect, it } from 'vitest';
import { HeldBlocks, heldTableHeader } from './held-table.ts';

let folder: string;
beforeEach(() => {
  folder = mkdtempSync(join(tmpdir(), 'kvtier-held-'));
});
afterEach(() => rmSync(folder, { recursive: true }));
const arena = (): string => join(folder, 'arena');
const write = (bytes: Buffer): void => writeFileSync(`${arena()}.lock`, bytes);

it('says the byte of the bucket that a hash and the tag name', () => {
  const flags = Buffer.from(Array.from({ length: 16 }, (_, bucket) => bucket % 4));
  write(Buffer.concat([heldTableHeader(16), flags]));
  const table = HeldBlocks.open(arena(), 0xffff_fff0)!;
  const hashes = Buffer.from('0700000000000000f6ffffff00000000', 'hex');
  expect([table.flags(hashes, 0), table.flags(hashes, 8)]).toEqual([3, 2]);
  table.close();
  table.close();
  expect(table.flags(hashes, 0)).toBeUndefined();
});

it('is none where the file is missing, empty, short, or of another form', () => {
  expect(HeldBlocks.open(arena(), 0)).toBeNull();
  for (const bytes of [
    Buffer.alloc(0),
    heldTableHeader(16),
    Buffer.concat([heldTableHeader(12), Buffer.alloc(16)]),
    Buffer.concat([Buffer.from('kvheld2'), heldTableHeader(16).subarray(7), Buffer.alloc(16)]),
    Buffer.concat([heldTableHeader(0), Buffer.alloc(16)]),
  ]) {
    write(bytes);
    expect(HeldBlocks.open(arena(), 0)).toBeNull();
  }
});
