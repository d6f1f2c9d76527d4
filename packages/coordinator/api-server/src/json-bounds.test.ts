/** What is counted on the bytes is what the parser builds. */
import fc from 'fast-check';
import { expect, it } from 'vitest';
import { boundsOf, checkJsonBounds } from './json-bounds.ts';

/** Depth, most names of an object, and number of objects, lists, names and texts. */
function count(value: unknown): { depth: number; names: number; items: number } {
  if (typeof value === 'string') return { depth: 0, names: 0, items: 1 };
  if (typeof value !== 'object' || value === null) return { depth: 0, names: 0, items: 0 };
  const parts = Object.values(value).map(count);
  const names = Array.isArray(value) ? 0 : Object.keys(value).length;
  return {
    names: Math.max(names, ...parts.map((part) => part.names)),
    depth: 1 + Math.max(0, ...parts.map(({ depth }) => depth)),
    items: 1 + names + parts.reduce((sum, { items }) => sum + items, 0),
  };
}

const passes = (text: string, maxDepth: number, maxNames: number, maxItems: number): boolean => {
  try {
    checkJsonBounds(Buffer.from(text), { maxDepth, maxNames, maxItems });
    return true;
  } catch (error) {
    expect(error).toMatchObject({ status: 400, body: { error: { code: 'body_too_complex' } } });
    return false;
  }
};

it('passes exactly what has no more levels, names and items than allowed', () => {
  const texts = fc.string({ unit: fc.constantFrom('"', '\\', '[', '{', ']', '}', 'a', 'é', '\n', ':', ',') });
  const { value } = fc.letrec((tie) => ({
    value: fc.oneof(
      { maxDepth: 5 },
      texts,
      fc.integer(),
      fc.constant(null),
      fc.array(tie('value'), { maxLength: 5 }),
      fc.dictionary(texts, tie('value'), { maxKeys: 5, noNullPrototype: true }),
    ),
  }));
  fc.assert(
    fc.property(value, fc.boolean(), (value, indented) => {
      const text = JSON.stringify(value, undefined, indented ? 2 : 0);
      const { depth, names, items } = count(JSON.parse(text));
      expect(passes(text, depth, names, items)).toBe(true);
      if (depth > 0) expect(passes(text, depth - 1, names, items)).toBe(false);
      if (names > 1) expect(passes(text, depth, names - 1, items)).toBe(false);
      if (items > 0) expect(passes(text, depth, names, items - 1)).toBe(false);
    }),
    { numRuns: 500 },
  );
});

it('takes any bytes, and a context full of messages in their longest form', () => {
  fc.assert(fc.property(fc.uint8Array(), (bytes) => void passes(Buffer.from(bytes).toString('latin1'), 4, 10, 100)));
  const message = { role: 'user', content: [{ type: 'text', text: 'a' }] };
  const { maxDepth, maxNames, maxItems } = boundsOf(2_000);
  expect(
    passes(JSON.stringify({ messages: Array(2_000).fill(message), stream: true }), maxDepth, maxNames, maxItems),
  ).toBe(true);
});
