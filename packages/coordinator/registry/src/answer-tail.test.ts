/** What is read of a pod's answer that passes by. */
import fc from 'fast-check';
import { describe, expect, it } from 'vitest';
import { AnswerTail } from './answer-tail.ts';

const tailOf = (text: string, sizes: readonly number[]): AnswerTail => {
  const reader = new AnswerTail();
  const bytes = Buffer.from(text);
  for (let at = 0, i = 0; at < bytes.length; i++) {
    const size = sizes[i % sizes.length]!;
    reader.push(bytes.subarray(at, at + size));
    at += size;
  }
  return reader;
};

describe('usage', () => {
  const read = (text: string, sizes: readonly number[]) => tailOf(text, sizes).usage();
  const usage =
    '"usage": {"prompt_tokens":5,"total_tokens":8,"completion_tokens":3,"prompt_tokens_details":{"cached_tokens":4}}';

  it('is found however the answer is cut, and never in the model’s own words', () => {
    fc.assert(
      fc.property(
        fc.string({ maxLength: 30_000 }),
        fc.array(fc.integer({ min: 1, max: 20_000 }), { minLength: 1, maxLength: 5 }),
        fc.constantFrom('', ',"kv_transfer_params":null', '}\n\ndata: [DONE]\n\n'),
        (words, sizes, end) => {
          const text = JSON.stringify({ text: `${words}"usage": {"prompt_tokens":99}` }).slice(0, -1);
          expect(read(`${text},${usage}${end}`, sizes)).toEqual({
            promptTokens: 5,
            completionTokens: 3,
            cachedTokens: 4,
          });
          expect(read(text, sizes)).toBeUndefined();
        },
      ),
      { numRuns: 30 },
    );
  });

  it.each([
    ['null in the last chunk but one', `"usage":null,"x":1} ${usage}`, 5],
    ['null after it', `${usage} {"usage":null}`, 5],
    ['not a number', '"usage":{"prompt_tokens":"5"}', undefined],
    ['below zero', '"usage":{"prompt_tokens":-5}', undefined],
    ['cut off', '"usage":{"prompt_tokens":5', undefined],
    ['nothing', '', undefined],
  ])('%s', (_, text, tokens) => expect(read(text, [7])?.promptTokens).toBe(tokens));
});

describe('a stream', () => {
  const event = 'data: {"choices":[]}\n\n';
  it.each([
    ['nothing', '', [true, false, false]],
    ['whole events', event, [true, false, false]],
    ['the same with other line breaks', 'data: {}\r\n\r\n', [true, false, false]],
    ['half an event', `${event}data: {"cho`, [false, false, false]],
    ['a line that is no end', `${event}data: {}\n`, [false, false, false]],
    ['its end', `${event}data: [DONE]\n\n`, [true, true, false]],
    ['an end that is not whole', `${event}data: [DONE]`, [false, false, false]],
    ['a failure of the engine', `${event}data: {"error": {"message": "x"}}\n\ndata: [DONE]\n\n`, [true, true, true]],
    [
      'words of the model',
      `data: ${JSON.stringify({ text: '\ndata: {"error":\n\ndata: [DONE]' })}\n\n`,
      [true, false, false],
    ],
  ])('that ends with %s', (_, text, says) => {
    for (const sizes of [[1], [7, 3], [1_000]]) {
      const tail = tailOf(text, sizes);
      expect([tail.isBetweenEvents(), tail.isDone(), tail.saysError()]).toEqual(says);
    }
  });
});
