/** Layouts: pinned digests, every field separates, sizes against a naive reckoning, and what is refused. */
import { readFileSync } from 'node:fs';
import fc from 'fast-check';
import { expect, it } from 'vitest';
import {
  type BlockLayout,
  blockLayout,
  type KeysAndValues,
  keysAndValues,
  type LayoutPart,
  layoutFingerprint,
  partNumberBytes,
  type SaidLayout,
} from './layout.ts';
import { namespaceOf } from './namespace.ts';

interface Golden {
  readonly name: string;
  readonly layout: SaidLayout;
  readonly heads: readonly [number, number, number] | null;
  /** Of each run of layers. */
  readonly layerBytes: readonly number[];
  readonly blockBytes: number;
  readonly fingerprint: string;
  readonly namespace: string;
}
const golden = JSON.parse(readFileSync(new URL('../golden/layouts.json', import.meta.url), 'utf8')) as Golden[];
const hex = (bytes: Uint8Array): string => Buffer.from(bytes).toString('hex');
const namespace = (layout: BlockLayout, heads: Golden['heads'] = null): string =>
  hex(
    namespaceOf({
      modelDigest: new Uint8Array(32).fill(1),
      kvDtype: layout.layers[0]!.parts[0]!.dtype,
      blockTokens: layout.blockTokens,
      algorithm: 'sha256_cbor',
      root: new Uint8Array(32).fill(2),
      layoutFingerprint: layoutFingerprint(layout),
      ...(heads && { tensorParallel: { firstHead: heads[0], headCount: heads[1], totalHeads: heads[2] } }),
    }).digest,
  );

it.each(golden)('$name: the digests are those that docs/formats.md prescribes', (one) => {
  const layout = blockLayout(one.layout);
  expect(layout.layers.map(({ layerBytes }) => layerBytes)).toEqual(one.layerBytes);
  expect(layout.blockBytes).toBe(one.blockBytes);
  expect(hex(layoutFingerprint(layout))).toBe(one.fingerprint);
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
const one = fc
  .integer({ min: 1, max: 8 })
  .chain((all) => fc.tuple(fc.integer({ min: 0, max: all - 1 }), fc.constant(all)));
const parts = fc.array(part, { minLength: 1, maxLength: 4 });
const said = fc.record({
  blockTokens: count,
  layers: fc.array(fc.record({ count, parts }), { minLength: 1, maxLength: 3 }),
  tensorRank: one,
  stage: one,
  engine: fc.option(fc.record({ name: fc.constantFrom('a', 'b'), version: count })),
});

/** What a layout says, layer by layer. */
const spelled = (of: SaidLayout): string =>
  JSON.stringify({ ...of, layers: of.layers.flatMap((run) => Array.from({ length: run.count }, () => run.parts)) });

it('a block has room for every number of every part, in whole pieces of 16 bytes a layer', () => {
  fc.assert(
    fc.property(said, (of) => {
      let all = 0;
      for (const { count, parts } of of.layers) {
        let bytes = 0;
        for (const { shape, per, dtype } of parts) {
          let numbers = 1;
          for (const size of shape) numbers *= size;
          for (let token = 0; token < (per === 'token' ? of.blockTokens : 1); token++)
            bytes += numbers * partNumberBytes[dtype];
        }
        while (bytes % 16 !== 0) bytes++;
        all += count * bytes;
      }
      expect(blockLayout(of).blockBytes).toBe(all);
    }),
  );
});

it('layouts that differ in anything have different namespaces, equal ones the same, however their layers were counted', () => {
  fc.assert(
    fc.property(said, said, (left, right) => {
      const same = spelled(left) === spelled(right);
      expect(namespace(blockLayout(left)) === namespace(blockLayout(right))).toBe(same);
      const [first, ...rest] = left.layers;
      const counted = [...Array.from({ length: first!.count }, () => ({ ...first!, count: 1 })), ...rest];
      expect(namespace(blockLayout({ ...left, layers: counted }))).toBe(namespace(blockLayout(left)));
    }),
  );
  const base: SaidLayout = golden.find(({ name }) => name.includes('scales'))!.layout;
  const [{ count: layers, parts: all }] = base.layers as [SaidLayout['layers'][number]];
  const [first, ...rest] = all as [LayoutPart, ...LayoutPart[]];
  const withParts = (...changed: LayoutPart[]): SaidLayout => ({
    ...base,
    layers: [{ count: layers, parts: changed }],
  });
  const changed: SaidLayout[] = [
    base,
    { ...base, layers: [{ count: layers + 1, parts: all }] },
    { ...base, blockTokens: base.blockTokens * 2 },
    { ...base, tensorRank: [0, 2] },
    { ...base, tensorRank: [1, 2] },
    { ...base, stage: [0, 2] },
    { ...base, stage: [1, 2] },
    { ...base, engine: { name: 'another' } },
    { ...base, engine: { name: 'another', version: '2' } },
    withParts(...rest),
    withParts(...rest, first),
    withParts({ ...first, name: 'values' }, ...rest),
    withParts({ ...first, dtype: 'e5m2' }, ...rest),
    withParts({ ...first, shape: [...first.shape].reverse() }, ...rest),
    withParts({ ...first, order: 'token,head,dim' }, ...rest),
  ];
  expect(new Set(changed.map((layout) => namespace(blockLayout(layout)))).size).toBe(changed.length);
});

it('plain keys and values are parts like others; what is not as it was said is refused', () => {
  const kv: KeysAndValues = {
    ...{ layers: 2, kvHeads: 4, headDim: 64, dtype: 'bf16', blockTokens: 16 },
    ...{ blockBytes: 32_768, order: 'layer,kv,head,token,dim' },
  };
  const part = { dtype: 'bf16', per: 'token', shape: [4, 64], order: 'head,token,dim' } as const;
  const parts = [
    { name: 'keys', ...part },
    { name: 'values', ...part },
  ];
  expect(keysAndValues(kv)).toEqual(blockLayout({ blockTokens: 16, layers: [{ count: 2, parts }] }));
  expect(() => keysAndValues({ ...kv, blockBytes: 65_536 })).toThrow(/65536 bytes, whose parts take 32768/);
  expect(() => keysAndValues({ ...kv, order: 'layer,head,kv,token,dim' })).toThrow(/known is layer,kv,head,token,dim/);
});

it('what cannot be is refused in one line', () => {
  const base: SaidLayout = golden[0]!.layout;
  const [{ count: layers, parts: all }] = base.layers as [SaidLayout['layers'][number]];
  const [first] = all as [LayoutPart];
  const withParts = (...changed: LayoutPart[]): SaidLayout => ({
    ...base,
    layers: [{ count: layers, parts: changed }],
  });
  const huge = { ...first, per: 'block', shape: [2 ** 31], order: 'dim' } as const;
  const refused: [SaidLayout, RegExp][] = [
    [{ ...base, layers: [] }, /0 kinds of layers/],
    [{ ...base, layers: [{ count: 0, parts: all }] }, /layers: 0 is not a count/],
    [{ ...base, tensorRank: [2, 2] }, /rank 2 of 2; ranks count from 0/],
    [{ ...base, stage: [0, 0] }, /stages: 0 is not a count/],
    [withParts(), /0 parts/],
    [withParts({ ...first, name: 'Keys' }), /a part named "Keys"/],
    [withParts({ ...first, dtype: 'f8' as 'f32' }), /"f8" is no type of number/],
    [withParts({ ...first, shape: [] }), /0 dimensions/],
    [withParts({ ...first, shape: [2.5] }), /2.5 is not a count/],
    [withParts({ ...first, order: 'dim' }), /order "dim" has 1 dimensions/],
    [{ ...base, layers: [{ count: 2 ** 31, parts: [huge] }] }, /larger than/],
  ];
  for (const [layout, why] of refused) expect(() => blockLayout(layout)).toThrow(why);
});
