/** The object header: golden files, round trip, and every flipped byte noticed. */
import { readFileSync } from 'node:fs';
import { native } from '@kvtier/data-plane';
import fc from 'fast-check';
import { describe, expect, it } from 'vitest';
import {
  decodeHeader,
  encodeHeader,
  type Header,
  type HeaderFields,
  hashKeyOf,
  headerBytes,
  slotBytesFor,
} from './index.ts';

const golden = (name: string) => readFileSync(new URL(`../golden/${name}`, import.meta.url));
type Json = Record<string, string | number | null> & { file: string };
const cases = JSON.parse(golden('headers.json').toString()) as Json[];

function fieldsOf(json: Json): Header {
  const key = (text: unknown) => hashKeyOf(Buffer.from(String(text), 'hex'));
  return {
    namespace: Uint8Array.from(Buffer.from(String(json.namespace), 'hex')),
    hash: key(json.hash),
    parent: json.parent === null ? null : key(json.parent),
    tokenCount: Number(json.tokenCount),
    payloadBytes: Number(json.payloadBytes),
    codec: Number(json.codec),
    flags: Number(json.flags),
    sequence: Number(json.sequence),
    payloadChecksum: BigInt(String(json.payloadChecksum)),
    expiresS: Number(json.expiresS ?? 0), // older programs had no such field
  };
}

describe.each(cases)('$file', (json) => {
  const bytes = golden(json.file);
  const fields = fieldsOf(json);

  it('is what encodeHeader writes and decodeHeader reads', () => {
    expect(encodeHeader(fields).toString('hex')).toBe(bytes.toString('hex'));
    expect(decodeHeader(bytes)).toEqual(fields);
  });

  it('any one byte changed is noticed', () => {
    const damaged = Buffer.from(bytes);
    for (let at = 0; at < headerBytes; at++) {
      for (let change = 1; change < 256; change++) {
        damaged[at] = bytes[at]! ^ change;
        const error = at < 8 ? 'magic' : 'checksum';
        const result = decodeHeader(damaged);
        // The plain comparison keeps 65,280 cases quick.
        if (!('error' in result) || result.error !== error) expect({ at, change, result }).toEqual({ error });
      }
      damaged[at] = bytes[at]!;
    }
  });
});

const bytesOf = (length: number) => fc.uint8Array({ minLength: length, maxLength: length });
const headerFields = fc.constantFrom(16, 32).chain((hashBytes) =>
  fc.record({
    namespace: bytesOf(32),
    hash: bytesOf(hashBytes).map(hashKeyOf),
    parent: fc.option(bytesOf(hashBytes).map(hashKeyOf)),
    tokenCount: fc.nat({ max: 0xffff_ffff }),
    payloadBytes: fc.maxSafeNat(),
    codec: fc.nat({ max: 0xffff }),
    flags: fc.nat({ max: 0xffff }),
    sequence: fc.maxSafeNat(),
    payloadChecksum: fc.bigInt({ min: 0n, max: (1n << 64n) - 1n }),
    expiresS: fc.nat({ max: 0xffff_ffff }),
  }),
);

it('what was encoded is decoded, wherever it lies', () => {
  fc.assert(
    fc.property(headerFields, fc.nat({ max: 9 }), (fields, offset) => {
      const memory = Buffer.alloc(headerBytes + 20);
      encodeHeader(fields).copy(memory, offset);
      expect(decodeHeader(memory.subarray(offset))).toEqual(fields);
    }),
  );
});

describe('what is not a sound header is a reason', () => {
  const bytes = golden(cases[0]!.file);
  const resealed = (change: (header: Buffer) => void) => {
    const header = Buffer.from(bytes);
    change(header);
    header.writeBigUInt64LE(native.xxh3_64(header.subarray(0, 248)), 248);
    return decodeHeader(header);
  };
  it('short, empty, zeros', () => {
    expect(decodeHeader(bytes.subarray(0, 255))).toEqual({ error: 'short' });
    expect(decodeHeader(new Uint8Array(0))).toEqual({ error: 'short' });
    expect(decodeHeader(new Uint8Array(4096))).toEqual({ error: 'magic' });
  });
  it('a later version, even with a right checksum', () => {
    expect(resealed((header) => header.writeUInt16LE(2, 8))).toEqual({ error: 'version' });
    expect(resealed((header) => header.writeUInt16LE(512, 10))).toEqual({ error: 'version' });
  });
  it('fields out of range, even with a right checksum', () => {
    expect(resealed((header) => header.writeUInt16LE(20, 12))).toEqual({ error: 'fields' });
    expect(resealed((header) => header.writeUInt16LE(16, 14))).toEqual({ error: 'fields' });
    expect(resealed((header) => header.writeBigUInt64LE(1n << 53n, 120))).toEqual({ error: 'fields' });
  });
});

it('a writer that breaks the contract is a defect', () => {
  const fields: HeaderFields = fieldsOf(cases[0]!);
  expect(() => encodeHeader({ ...fields, namespace: new Uint8Array(31) })).toThrow(/namespace/);
  expect(() => encodeHeader({ ...fields, payloadBytes: -1 })).toThrow(/payloadBytes/);
  expect(() => encodeHeader({ ...fields, hash: hashKeyOf(new Uint8Array(20)) })).toThrow(/20 bytes/);
});

it('slots are whole pages', () => {
  expect([0, 1, 3840, 3841, 65_536].map(slotBytesFor)).toEqual([4096, 4096, 4096, 8192, 69_632]);
});
