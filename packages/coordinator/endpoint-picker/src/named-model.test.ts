/** The model that a body names, found in as much of it as there is. */
import fc from 'fast-check';
import { expect, it } from 'vitest';
import { modelIn } from './named-model.ts';

const never = new AbortController().signal;
const pieces = (text: string, bytes: number): Buffer[] => {
  const whole = Buffer.from(text);
  const parts: Buffer[] = [];
  for (let at = 0; at < whole.length; at += bytes) parts.push(whole.subarray(at, at + bytes));
  return parts;
};

it('is that of the outermost object, whatever stands before it and however it is cut', async () => {
  const value = fc.jsonValue({ maxDepth: 4 }).map((json) => [json, { model: 'inner', json }, '"model":"text"']);
  await fc.assert(
    fc.asyncProperty(
      fc.dictionary(
        fc.string().filter((name) => name !== 'model' && name !== '__proto__'),
        value,
      ),
      fc.string({ unit: 'grapheme', maxLength: 100 }),
      fc.integer({ min: 1, max: 40 }),
      fc.constantFrom(undefined, 1),
      async (before, model, bytes, indent) => {
        const text = JSON.stringify({ ...before, zz: 1, model }, undefined, indent);
        expect(await modelIn(pieces(text, bytes), never)).toBe(model);
        // Of what is cut off behind it, nothing is needed.
        expect(await modelIn(pieces(text.slice(0, -1), bytes), never)).toBe(model);
        const without = JSON.stringify(before, undefined, indent);
        expect(await modelIn(pieces(without, bytes), never)).toBeUndefined();
      },
    ),
    { numRuns: 100 },
  );
});

it.each([
  ['\ufeff {"model" : "m"', 'm'],
  ['{"model":"a","model":"b"}', 'a'],
  ['{"model":"', undefined],
  ['{"model":null,"x":{"model":"m"}}', undefined],
  ['{"model":{"model":"m"}}', undefined],
  ['[{"model":"m"}]', undefined],
  ['--boundary\r\n{"model":"m"}', undefined],
  ['{} {"model":"m"}', undefined],
  [`{"model":"${'m'.repeat(2_000)}"}`, undefined],
  ['', undefined],
])('%s names %s', async (text, model) => expect(await modelIn(pieces(text, 7), never)).toBe(model));

it('of a large body turns are short, and whoever leaves ends it', async () => {
  const large = Buffer.from(`{"prompt":[${'1,'.repeat(4 << 20)}1],"model":"m"}`);
  let turns = 0;
  let isOver = false;
  const count = (): void => {
    turns++;
    if (!isOver) setImmediate(count);
  };
  setImmediate(count);
  expect(await modelIn([large], never)).toBe('m');
  isOver = true;
  expect(turns).toBeGreaterThan(16);
  const left = new AbortController();
  const asked = modelIn([large], left.signal);
  left.abort(new Error('left'));
  await expect(asked).rejects.toThrow('left');
});
