/** Text from tokens cut anywhere, against a decoder that is given all bytes. */
import fc from 'fast-check';
import { expect, it } from 'vitest';
import { Detokenizer, TokenTable, tokenToBytes } from './detokenizer.ts';

const toBytes = tokenToBytes({ type: 'Sequence', decoders: [{ type: 'ByteFallback' }] }, 'test');
const bytes = Array.from({ length: 256 }, (_, byte) => `<0x${byte.toString(16).toUpperCase().padStart(2, '0')}>`);
const words = ['▁the', 'é', '日本', '😀', '\u{feff}', '', 'a'];
const [special, literal] = [bytes.length + words.length, bytes.length + words.length + 1];
const table = TokenTable.of([...bytes, ...words, '</s>', '<note>'], toBytes, new Set([special]), new Set([literal]));

/** Each run of bytes between literal tokens by a decoder of its own. */
function naive(ids: readonly number[]): string {
  let text = '';
  let run: number[] = [];
  const end = (): void => {
    text += new TextDecoder('utf-8', { ignoreBOM: true }).decode(Uint8Array.from(run));
    run = [];
  };
  for (const id of ids) {
    if (id === literal) end();
    run.push(...table.bytes(id));
  }
  end();
  return text;
}

/** Bytes of characters, in their order, are as likely as nonsense. */
const idArbitrary = fc.oneof(
  fc.string({ unit: 'binary', maxLength: 3 }).map((text) => [...new TextEncoder().encode(text)]),
  fc.constantFrom(...[0xe6, 0x97, 0xa5, 0xf0, 0x9f, 0x98, 0x80, 0xc3, 0xa9, 0xff]).map((byte) => [byte]),
  fc.integer({ min: bytes.length, max: literal + 3 }).map((id) => [id]), // beyond the table, too
);

it('is the text of all bytes, whatever a token ends with, but for an unfinished last character', () => {
  fc.assert(
    fc.property(fc.array(idArbitrary, { maxLength: 12 }), (drawn) => {
      const ids = drawn.flat();
      const detokenizer = new Detokenizer(table);
      const pieces = ids.map((id) => detokenizer.push(id));
      const whole = naive(ids);
      expect([pieces.join(''), `${pieces.join('')}\uFFFD`]).toContain(whole);
      for (const piece of pieces) expect(piece).not.toMatch(/\p{Surrogate}/u);
    }),
    { numRuns: Number(process.env.KVTIER_PROPERTY_RUNS ?? 1_000) },
  );
});

it('holds a character back until it is whole', () => {
  const detokenizer = new Detokenizer(table);
  expect([0xe6, 0x97, special, 0xa5, bytes.length].map((id) => detokenizer.push(id))).toEqual([
    '',
    '',
    '',
    '日',
    ' the',
  ]);
  expect([0xe6, bytes.length].map((id) => detokenizer.push(id))).toEqual(['', '\uFFFD the']);
});
