/** The pack's table against its golden file, and against damage anywhere. */
import { readFileSync } from 'node:fs';
import { headerBytes } from '@kvtier/identity';
import fc from 'fast-check';
import { describe, expect, it } from 'vitest';
import { hashNamed, namespaceNamed } from '../kit/testing/objects.ts';
import { decodePackTable, encodePackTable, packTableBytes, packTableBytesOf } from './pack-format.ts';

const golden = readFileSync(new URL('../../golden/pack-table.bin', import.meta.url));
const id = '000102030405060708090a0b0c0d0e0f';
const objects = ['a', 'b', 'c'].map((name, index) => ({
  namespace: namespaceNamed(index < 2 ? 'one' : 'two'),
  hash: hashNamed(name),
  bytes: headerBytes + 1000 * (index + 1),
}));
const wholeBytes = packTableBytes(3) + 3 * headerBytes + 6000;

describe('the table of a pack', () => {
  it('is the golden file, byte by byte', () => {
    expect(encodePackTable(id, objects).equals(golden)).toBe(true);
  });

  it('says where each object lies, without a gap', () => {
    expect(packTableBytesOf(golden)).toBe(golden.length);
    const table = decodePackTable(golden, wholeBytes);
    if (table === 'damaged') throw new Error('damaged');
    expect(table).toMatchObject({ id, packBytes: wholeBytes });
    let offset = golden.length;
    for (const [index, { namespace, hash, bytes }] of objects.entries()) {
      const record = table.records[index]!;
      expect(record).toMatchObject({ hash, bytes, offset });
      expect(record.namespace.key).toBe(namespace.key);
      offset += bytes;
    }
    expect(offset).toBe(wholeBytes);
  });

  it('is not taken when the object has another length, or any bit is another', () => {
    expect(decodePackTable(golden, wholeBytes + 1)).toBe('damaged');
    const flip = fc.tuple(fc.nat(golden.length - 1), fc.nat(7));
    fc.assert(
      fc.property(flip, ([at, bit]) => {
        const table = Buffer.from(golden);
        table[at]! ^= 1 << bit;
        const size = packTableBytesOf(table);
        if (typeof size === 'string') return; // foreign, or damaged
        // A reader that meets another count of records has other bytes under the checksum.
        const read = Buffer.alloc(size);
        table.copy(read);
        expect(decodePackTable(read, wholeBytes)).toBe('damaged');
      }),
    );
  });

  it('is foreign without the magic, or of another version', () => {
    expect(packTableBytesOf(Buffer.alloc(64))).toBe('foreign');
    expect(packTableBytesOf(golden.subarray(0, 63))).toBe('foreign');
    const later = Buffer.from(golden);
    later.writeUInt32LE(2, 8);
    expect(packTableBytesOf(later)).toBe('foreign');
    const none = Buffer.from(golden);
    none.writeUInt32LE(0, 12);
    expect(packTableBytesOf(none)).toBe('damaged');
  });
});
