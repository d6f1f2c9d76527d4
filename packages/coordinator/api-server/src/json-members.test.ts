import fc from 'fast-check';
import { expect, it } from 'vitest';
import { membersOf, withMembers } from './json-members.ts';

const bytes = (text: string): Buffer => Buffer.from(text);
const changed = (text: string, changes: Record<string, string | undefined>): string =>
  Buffer.from(withMembers(bytes(text), membersOf(bytes(text))!, changes)).toString();

it('changes some members and leaves all others byte by byte', () => {
  const text =
    ' {"model" : "m",\n "seed": 12345678901234567890, "max_tokens":16 ,"prompt":["}{,\\"" , [1 ,2]], "stream":true } ';
  expect(changed(text, { max_tokens: '1', stream: undefined, kv: '{"a":null}' })).toBe(
    '{"model" : "m","seed": 12345678901234567890,"prompt":["}{,\\"" , [1 ,2]],"max_tokens":1,"kv":{"a":null}}',
  );
});

it.each([
  ['{}', { a: '1' }, '{"a":1}'],
  ['{ }', { a: undefined }, '{}'],
  ['{"a":1}', { a: undefined }, '{}'],
  ['{"a":1,"a":2,"b":3}', { a: '4' }, '{"b":3,"a":4}'],
  ['{"\\u0061":1,"b":3}', { a: '4' }, '{"b":3,"a":4}'],
  ['\ufeff{"a":"é","b":3}', { b: undefined }, '{"a":"é"}'],
  ['{"__proto__":1,"b":3}', { b: '4' }, '{"__proto__":1,"b":4}'],
])('%s', (text, changes, wanted) => {
  expect(changed(text, changes)).toBe(wanted);
});

it('is what a parser makes of it, whatever the object and its spaces', () => {
  const name = fc.oneof(fc.constantFrom('a', 'b', 'max_tokens', 'stream'), fc.string());
  const object = fc.dictionary(name, fc.jsonValue({ maxDepth: 3 }), { maxKeys: 8 });
  fc.assert(
    fc.property(object, fc.constantFrom(undefined, 1, '\t'), fc.jsonValue(), (given, space, value) => {
      const text = JSON.stringify(given, null, space);
      const changes = { a: JSON.stringify(value), stream: undefined };
      const { a: _, stream: __, ...rest } = JSON.parse(text) as Record<string, unknown>;
      expect(JSON.parse(changed(text, changes))).toEqual({ ...rest, a: JSON.parse(JSON.stringify(value)) });
    }),
  );
});

it('an object of very many members is not taken apart', () => {
  const of = (count: number): Buffer =>
    bytes(JSON.stringify(Object.fromEntries(Array.from({ length: count }, (_, at) => [`n${at}`, at]))));
  expect(membersOf(of(256))!.names).toHaveLength(256);
  expect(membersOf(of(257))).toBeUndefined();
});
