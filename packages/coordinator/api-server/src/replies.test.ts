/** Chunks that are written in one piece say what the same chunks as objects say. */
import fc from 'fast-check';
import { expect, it } from 'vitest';
import { chunksOf, PlainChunks } from './replies.ts';

const headArbitrary = fc.record({ id: fc.string(), created: fc.nat(), model: fc.string({ unit: 'binary' }) });
const deltaArbitrary = fc.record({
  index: fc.nat(200),
  text: fc.oneof(fc.constant(''), fc.string({ unit: 'binary' }), fc.constantFrom('"\\', '\u2028', '\ud800', '\0\n')),
  tokenIds: fc.array(fc.nat(2 ** 32 - 1), { maxLength: 4 }),
  first: fc.constant(false),
  finishReason: fc.constant(null),
});

it('a plain chunk is the JSON of the same chunk as an object', () => {
  const endpoint = fc.constantFrom('completion' as const, 'chat' as const);
  fc.assert(
    fc.property(endpoint, headArbitrary, deltaArbitrary, fc.boolean(), fc.boolean(), (of, head, delta, usage, ids) => {
      const [chunk] = chunksOf(of, head, delta, ids);
      const expected = chunk === undefined ? undefined : JSON.stringify(usage ? { ...chunk, usage: null } : chunk);
      expect(new PlainChunks(of, head, delta.index, usage, ids).of(delta)).toBe(expected);
    }),
    { numRuns: Number(process.env.KVTIER_PROPERTY_RUNS ?? 500) },
  );
});
