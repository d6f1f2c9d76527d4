/** Layouts of parts: pinned digests, every field separates, sizes against a naive reckoning, and what is refused. */
import { readFileSync } from 'node:fs';
import fc from 'fast-check';
import { expect, it } from 'vitest';
import { namespaceOf } from './namespace.ts';
import { type LayoutPart, type PartsLayout, partNumberBytes, partsFingerprint, partsLayout } from './parts-layout.ts';

type Said = Parameters<typeof partsLayout>[0];
interface Golden {
  readonly name: string;
  readonly layout: Said;
  readonly heads: readonly [number, number, number] | null;
  readonly layerBytes: number;
  readonly blockBytes: number;
  readonly fingerprint: string;
  readonly namespace: string;
}
const golden = JSON.parse(readFileSync(new URL('../golden/layouts.json', import.meta.url), 'utf8')) as Golden[];
const hex = (bytes: Uint8Array): string => Buffer.from(bytes).toString('hex');
const namespace = (layout: PartsLayout, heads: Golden['heads'] = null): string =>
  hex(
    namespaceOf({
      modelDigest: new Uint8Array(32).fill(1),
      kvDtype: layout.parts[0]!.dtype,
      blockTokens: layout.blockTokens,
      algorithm: 'sha256_cbor',
      root: new Uint8Array(32).fill(2),
      layoutFingerprint: partsFingerprint(layout),
      ...(heads && { tensorParallel: { firstHead: heads[0], headCount: heads[1], totalHeads: heads[2] } }),
    }).digest,
  );

it.each(golden)('$name: the digests are those that docs/formats.md prescribes', (one) => {
  const layout = partsLayout(one.layout);
  expect({ layerBytes: layout.layerBytes, blockBytes: layout.blockBytes }).toEqual({
    layerBytes: one.layerBytes,
    blockBytes: one.blockBytes,
  });
  expect(hex(partsFingerprint(layout))).toBe(one.fingerprint);
  expect(namespace(layout, one.heads)).toBe(one.namespace);
});

it('no two of them share a namespace', () => {
  expect(new Set(golden.map((one) => one.namespace)).size).toBe(golden.length);
});

const count = fc.integer({ min: 1, max: 40 });
const part = fc
  .record({
    name: fc.constantFrom('keys', 'values', 'latent', 'scales', 'state'),
    dtype: fc.constantFrom(...(Object.keys(partNumberBytes) as LayoutPart['dtype'][])),
    per: fc.constantFrom('token' as const, 'block' as const),
    shape: fc.array(count, { minLength: 1, maxLength: 3 }),
  })
  .map((one) => ({
    ...one,
    order: [...(one.per === 'token' ? ['token'] : []), ...one.shape.map((_, at) => `d${at}`)].join(','),
  }));
const said = fc.integer({ min: 1, max: 8 }).chain((ranks) =>
  fc.record({
    layers: count,
    blockTokens: count,
    parts: fc.array(part, { minLength: 1, maxLength: 4 }),
    tensorRank: fc.tuple(fc.integer({ min: 0, max: ranks - 1 }), fc.constant(ranks)),
  }),
);

it('a block has room for every number of every part, in whole pieces of 16 bytes a layer', () => {
  fc.assert(
    fc.property(said, (of) => {
      const layout = partsLayout(of);
      let bytes = 0;
      for (const one of of.parts) {
        let numbers = 1;
        for (const size of one.shape) numbers *= size;
        for (let token = 0; token < (one.per === 'token' ? of.blockTokens : 1); token++)
          bytes += numbers * partNumberBytes[one.dtype];
      }
      expect(layout.layerBytes % 16).toBe(0);
      expect(layout.layerBytes - bytes).toBeGreaterThanOrEqual(0);
      expect(layout.layerBytes - bytes).toBeLessThan(16);
      expect(layout.blockBytes).toBe(of.layers * layout.layerBytes);
    }),
  );
});

it('layouts that differ in anything have different namespaces, equal ones the same', () => {
  fc.assert(
    fc.property(said, said, (left, right) => {
      const same = JSON.stringify(left) === JSON.stringify(right);
      expect(namespace(partsLayout(left)) === namespace(partsLayout(right))).toBe(same);
    }),
  );
  const one: Said = golden.find(({ name }) => name.includes('scales'))!.layout;
  const [first, ...rest] = one.parts as [LayoutPart, ...LayoutPart[]];
  const changed: Said[] = [
    one,
    { ...one, layers: one.layers + 1 },
    { ...one, blockTokens: one.blockTokens * 2 },
    { ...one, tensorRank: [0, 2] },
    { ...one, tensorRank: [1, 2] },
    { ...one, parts: rest },
    { ...one, parts: [...rest, first] },
    { ...one, parts: [{ ...first, name: 'values' }, ...rest] },
    { ...one, parts: [{ ...first, dtype: 'e5m2' }, ...rest] },
    { ...one, parts: [{ ...first, shape: [...first.shape].reverse() }, ...rest] },
    { ...one, parts: [{ ...first, order: 'token,head,dim' }, ...rest] },
  ];
  expect(new Set(changed.map((layout) => namespace(partsLayout(layout)))).size).toBe(changed.length);
});

it('what cannot be is refused in one line', () => {
  const one: Said = golden[0]!.layout;
  const [first] = one.parts as [LayoutPart];
  const refused: [Said, RegExp][] = [
    [{ ...one, layers: 0 }, /^CONFIG: layout: layers: 0 is not a count|layers: 0 is not a count/],
    [{ ...one, tensorRank: [2, 2] }, /rank 2 of 2; ranks count from 0/],
    [{ ...one, parts: [] }, /0 parts/],
    [{ ...one, parts: [{ ...first, name: 'Keys' }] }, /a part named "Keys"/],
    [{ ...one, parts: [{ ...first, dtype: 'f8' as 'f32' }] }, /"f8" is no type of number/],
    [{ ...one, parts: [{ ...first, shape: [] }] }, /0 dimensions/],
    [{ ...one, parts: [{ ...first, shape: [2.5] }] }, /2.5 is not a count/],
    [{ ...one, parts: [{ ...first, order: 'dim' }] }, /order "dim" has 1 dimensions/],
    [{ ...one, layers: 2 ** 31, parts: [{ ...first, per: 'block', shape: [2 ** 31], order: 'dim' }] }, /larger than/],
  ];
  for (const [layout, why] of refused) expect(() => partsLayout(layout)).toThrow(why);
});
