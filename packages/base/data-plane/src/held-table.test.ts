/** The table of held blocks: what is not one is none. */
import { mkdtempSync, rmSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { afterEach, beforeEach, expect, it } from 'vitest';
import { emptyHeldTable, HeldBlocks, heldTableHeader, pulsePlace } from './held-table.ts';

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
  expect(table.flagsOfAll(hashes, 8, 2)).toEqual(Uint8Array.of(3, 2));
  expect(() => table.flagsOfAll(hashes, 8, 3)).toThrow('fewer hashes than bytes');
  // Every second hash of three, and what is looked at may end with the last one's first four bytes.
  const three = Buffer.concat([hashes, Buffer.from('0500000000000000', 'hex')]);
  expect(table.flagsOfAll(three, 16, 2)).toEqual(Uint8Array.of(3, 1));
  expect(table.flagsOfAll(three.subarray(0, 20), 16, 2)).toEqual(Uint8Array.of(3, 1));
  expect(() => table.flagsOfAll(three.subarray(0, 19), 16, 2)).toThrow('fewer hashes than bytes');
  write(Buffer.concat([heldTableHeader(16), flags.subarray(0, 7)])); // the node has cut it off
  expect([table.flagsOfAll(hashes, 8, 1), table.flagsOfAll(hashes.subarray(8), 8, 1)]).toEqual([
    undefined,
    Uint8Array.of(2),
  ]);
  table.close();
  table.close();
  expect(table.flags(hashes, 0)).toBeUndefined();
  expect(table.flagsOfAll(hashes, 8, 1)).toBeUndefined();
});

it('tells a beat of its node once, and none of a node that has no pulse', () => {
  for (const older of [Buffer.alloc(0), Buffer.alloc(16), emptyHeldTable(16).subarray(-16, -1)]) {
    write(Buffer.concat([heldTableHeader(16), Buffer.alloc(16), older]));
    expect(HeldBlocks.open(arena(), 0)!.stillMs()).toBeUndefined();
  }
  const bytes = emptyHeldTable(16);
  write(bytes);
  const table = HeldBlocks.open(arena(), 0)!;
  expect(table.stillMs()).toBeUndefined();
  for (const [beats, still] of [
    [1, 0],
    [7, 1_250],
  ] as const) {
    bytes.writeUInt32LE(beats, pulsePlace(16));
    bytes.writeUInt32LE(still, pulsePlace(16) + 4);
    write(bytes);
    expect([table.stillMs(), table.stillMs()]).toEqual([still, undefined]);
  }
  table.close();
  expect(table.stillMs()).toBeUndefined();
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
