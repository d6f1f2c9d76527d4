/** The two serialisations against CPython's own output, and their refusals. */
import { readFileSync } from 'node:fs';
import { expect, it } from 'vitest';
import { encodeCbor, encodePickle, type HashValue } from './encode.ts';

type Json = null | number | string | { hex: string } | Json[];
interface Case {
  value: Json;
  pickle: string;
  cbor: string;
}
const cases = JSON.parse(readFileSync(new URL('../golden/python.json', import.meta.url), 'utf8')) as Case[];

function build(value: Json): HashValue {
  if (Array.isArray(value)) return value.map(build);
  return value !== null && typeof value === 'object' ? Buffer.from(value.hex, 'hex') : value;
}

it.each(cases)('CPython: $cbor', ({ value, pickle, cbor }) => {
  expect(encodeCbor(build(value)).toString('hex')).toBe(cbor);
  expect(encodePickle(build(value)).toString('hex')).toBe(pickle);
});

it('maps are sorted by their encoded keys', () => {
  expect(encodeCbor({ bb: 1, c: 2, a: null }).toString('hex')).toBe('a3 6161f6 616302 62626201'.replaceAll(' ', ''));
});

it('a lone surrogate is refused, not replaced', () => {
  for (const encode of [encodeCbor, encodePickle]) {
    expect(() => encode(['\ud800'])).toThrow(expect.objectContaining({ code: 'REQUEST' }));
    expect(encode('🙂').includes(Buffer.from('🙂'))).toBe(true);
  }
});

it('what is not an exact integer is a defect', () => {
  expect(() => encodeCbor(0.5)).toThrow(/exact integer/);
  expect(() => encodeCbor(2 ** 53)).toThrow(/exact integer/);
  expect(() => encodeCbor(1n << 64n)).toThrow(/64 bits/);
});

it('a pickle of more than one frame is refused', () => {
  expect(() => encodePickle('x'.repeat(65_536))).toThrow(expect.objectContaining({ code: 'REQUEST' }));
});
