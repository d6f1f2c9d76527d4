/** The disk tier's formats: golden files, and every flipped byte noticed. Byte tables in docs/formats.md. */
import { readFileSync } from 'node:fs';
import { describe, expect, it } from 'vitest';
import {
  decodeCheckpoint,
  decodeFooter,
  decodeSegmentHeader,
  emptyRecords,
  encodeCheckpoint,
  encodeFooter,
  encodeSegmentHeader,
  footerBytesOf,
  record,
} from './format.ts';

const golden = (name: string): Buffer => readFileSync(new URL(`../../golden/${name}`, import.meta.url));
const header = { id: 7, generation: 41, bytes: 256 << 20 };
const tail = { id: 7, generation: 41, sealed: true, tail: 4096 * 12 };
const namespaces = [1, 2].map((fill) => new Uint8Array(32).fill(fill));
const checkpoint = {
  tick: 2 ** 33 + 5,
  segments: [
    { id: 7, generation: 41, rank: 1, uses: Uint32Array.of(1, 6, 9, 1) },
    { id: 3, generation: 2 ** 32 + 1, rank: 0, uses: new Uint32Array(0) },
  ],
};

/** Two blocks: a hash of 32 bytes, hot, used beyond 32 bits, with an end; and one of 8 bytes without. */
function records() {
  const out = emptyRecords(2);
  const [first, second] = [
    new Uint8Array(out.words.buffer, 0, 32),
    new Uint8Array(out.words.buffer, 4 * record.words, 8),
  ];
  first.forEach((_, i) => {
    first[i] = 0xa0 + i;
  });
  second.fill(0x55);
  out.words.set([1, 8, 1, 32 | record.hotBit], record.page);
  out.doubles[record.lastUse] = 2 ** 33 + 2;
  out.words[record.expires] = 2 ** 32 - 2;
  out.words.set([9, 3, 0, 8], record.words + record.page);
  out.doubles[record.doubles + record.lastUse] = 4;
  return out;
}

const flips = (bytes: Buffer): Buffer[] =>
  Array.from(bytes, (_, at) => {
    const copy = Buffer.from(bytes);
    copy[at]! ^= 0x10;
    return copy;
  });

describe('golden files', () => {
  it('segment-header.bin', () => {
    const bytes = golden('segment-header.bin');
    expect(encodeSegmentHeader(header).equals(bytes)).toBe(true);
    expect(decodeSegmentHeader(bytes)).toEqual(header);
    for (const flipped of flips(bytes)) expect(decodeSegmentHeader(flipped)).toBeUndefined();
  });

  it('segment-footer-v3.bin', () => {
    const bytes = golden('segment-footer-v3.bin');
    expect(encodeFooter(tail, namespaces, records()).equals(bytes)).toBe(true);
    expect(footerBytesOf(bytes)).toBe(4096);
    expect(decodeFooter(bytes)).toEqual({ ...tail, namespaces, records: records() });
    for (const flipped of flips(bytes)) expect(decodeFooter(flipped)).toBeUndefined();
  });

  it('checkpoint-v2.bin', () => {
    const bytes = golden('checkpoint-v2.bin');
    expect(encodeCheckpoint(checkpoint).equals(bytes)).toBe(true);
    expect(decodeCheckpoint(bytes)).toEqual(checkpoint);
    for (const flipped of flips(bytes)) expect(decodeCheckpoint(flipped)).toBeUndefined();
  });
});

it('is no index that is shorter than its trailer, or longer than it says', () => {
  expect(decodeFooter(Buffer.alloc(0))).toBeUndefined();
  expect(decodeCheckpoint(Buffer.alloc(10))).toBeUndefined();
  expect(decodeFooter(golden('segment-footer-v2.bin'))).toBeUndefined(); // of an older program: its objects are walked over
  const bytes = golden('segment-footer-v3.bin');
  expect(decodeFooter(Buffer.concat([Buffer.alloc(4096), bytes]))).toBeUndefined();
});
