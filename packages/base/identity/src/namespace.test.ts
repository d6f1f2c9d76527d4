/** Namespaces: pinned digests, and every field separates. */
import { readFileSync } from 'node:fs';
import { expect, it } from 'vitest';
import { type KeysAndValues, keysAndValues, layoutFingerprint } from './layout.ts';
import { type NamespaceFields, namespaceFromDigest, namespaceOf } from './namespace.ts';

const layout: KeysAndValues = {
  layers: 2,
  kvHeads: 4,
  headDim: 64,
  dtype: 'bf16',
  blockTokens: 16,
  blockBytes: 32_768,
  order: 'layer,kv,head,token,dim',
};
const fields: NamespaceFields = {
  modelDigest: new Uint8Array(32).fill(1),
  kvDtype: 'bf16',
  blockTokens: 16,
  algorithm: 'sha256_cbor',
  root: new Uint8Array(32).fill(2),
  layoutFingerprint: layoutFingerprint(keysAndValues(layout)),
};
const hex = (bytes: Uint8Array) => Buffer.from(bytes).toString('hex');

it('the digests are those that docs/formats.md prescribes', () => {
  const golden = JSON.parse(readFileSync(new URL('../golden/namespaces.json', import.meta.url), 'utf8'));
  const sharded = { ...fields, group: 1, tensorParallel: { firstHead: 2, headCount: 2, totalHeads: 4 } };
  expect({
    layout: hex(layoutFingerprint(keysAndValues(layout))),
    namespace: hex(namespaceOf(fields).digest),
    sharded: hex(namespaceOf(sharded).digest),
  }).toEqual(golden);
});

it('every field separates', () => {
  const namespaces: NamespaceFields[] = [
    fields,
    { ...fields, modelDigest: new Uint8Array(32).fill(9) },
    { ...fields, kvDtype: 'f16' },
    { ...fields, blockTokens: 32 },
    { ...fields, algorithm: 'sha256' },
    { ...fields, root: new Uint8Array(32).fill(9) },
    { ...fields, group: 1 },
    { ...fields, layoutFingerprint: new Uint8Array(32) },
    { ...fields, tensorParallel: { firstHead: 0, headCount: 2, totalHeads: 4 } },
    { ...fields, tensorParallel: { firstHead: 2, headCount: 2, totalHeads: 4 } },
  ];
  expect(new Set(namespaces.map((one) => namespaceOf(one).key)).size).toBe(namespaces.length);
});

it('all heads is the same as no sharding', () => {
  const all = { firstHead: 0, headCount: 4, totalHeads: 4 };
  expect(namespaceOf({ ...fields, tensorParallel: all })).toEqual(namespaceOf(fields));
});

it('a digest that came in makes the same namespace, and stays when its buffer is reused', () => {
  const namespace = namespaceOf(fields);
  const received = Buffer.from(namespace.digest);
  const copy = namespaceFromDigest(received);
  received.fill(0);
  expect(copy).toEqual(namespace);
  expect(Buffer.from(copy.key, 'latin1').equals(copy.digest)).toBe(true);
  expect(() => namespaceFromDigest(new Uint8Array(31))).toThrow(/31 bytes/);
});
