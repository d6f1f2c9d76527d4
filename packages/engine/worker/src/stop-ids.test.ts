/** What ends an answer, in all the shapes that model folders have it in. */
import { mkdtempSync, rmSync, truncateSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { afterEach, beforeEach, expect, it } from 'vitest';
import { readStopTokenIds } from './stop-ids.ts';

let folder: string;
beforeEach(() => {
  folder = mkdtempSync(join(tmpdir(), 'kvtier-stop-'));
});
afterEach(() => rmSync(folder, { recursive: true }));

const write = (name: string, text: string): void => writeFileSync(join(folder, `${name}.json`), text);

it('a number, a list, or nothing; the generation config wins', () => {
  expect(readStopTokenIds(folder, 100)).toEqual([]);
  write('config', '{"eos_token_id": 2}');
  expect(readStopTokenIds(folder, 100)).toEqual([2]);
  write('generation_config', '{"eos_token_id": [9, 3, 9]}');
  expect(readStopTokenIds(folder, 100)).toEqual([3, 9]);
  write('generation_config', '{"eos_token_id": null}');
  expect(readStopTokenIds(folder, 100)).toEqual([2]);
});

const endOf = (eos_token: unknown): string => JSON.stringify({ eos_token });
const tokenizer = (vocab: unknown): string =>
  JSON.stringify({
    added_tokens: [
      { id: 1, content: '<s>' },
      { id: 7, content: '<|im_end|>' },
    ],
    model: { vocab },
  });

it('the end of a turn, as the tokenizer names it, beside the end of a document, as the generation config does', () => {
  write('generation_config', '{"eos_token_id": 5}');
  write('tokenizer_config', endOf('<|im_end|>'));
  expect(readStopTokenIds(folder, 100)).toEqual([5]); // that text has no id yet
  write('tokenizer', tokenizer({}));
  expect(readStopTokenIds(folder, 100)).toEqual([5, 7]);
  write('generation_config', '{"eos_token_id": [7, 5]}');
  expect(readStopTokenIds(folder, 100)).toEqual([5, 7]);
  rmSync(join(folder, 'generation_config.json'));
  expect(readStopTokenIds(folder, 100)).toEqual([7]);
});

it.each([
  ['an object', endOf({ content: '<|im_end|>', lstrip: false }), {}, [7]],
  ['a token of the vocabulary', endOf('</s>'), { a: 0, '</s>': 3 }, [3]],
  [
    'a token of a unigram vocabulary',
    endOf('</s>'),
    [
      ['a', -1],
      ['</s>', 0],
    ],
    [1],
  ],
  ['a text that is no token', endOf('</s>'), { a: 0 }, []],
  ['a text that is no token of a unigram vocabulary', endOf('</s>'), [['a', -1]], []],
  ['a token that the model does not have', endOf('</s>'), { '</s>': 100 }, []],
  ['a name that all objects have', endOf('constructor'), {}, []],
  ['nothing', endOf(null), { null: 4 }, []],
  ['no text', endOf(7), { 7: 4 }, []],
])('the tokenizer names its end by %s', (_, config, vocab, ids) => {
  write('tokenizer', tokenizer(vocab));
  write('tokenizer_config', config);
  expect(readStopTokenIds(folder, 100)).toEqual(ids);
});

it('the tokenizer’s config wins over the list of its special tokens', () => {
  write('tokenizer', tokenizer({ '</s>': 3 }));
  write('special_tokens_map', endOf('</s>'));
  expect(readStopTokenIds(folder, 100)).toEqual([3]);
  write('tokenizer_config', endOf('<|im_end|>'));
  expect(readStopTokenIds(folder, 100)).toEqual([7]);
});

it('refuses a tokenizer of more bytes than any has', () => {
  write('tokenizer_config', endOf('</s>'));
  write('tokenizer', '{}');
  truncateSync(join(folder, 'tokenizer.json'), 2 ** 28 + 1); // a hole: it takes no room
  expect(() => readStopTokenIds(folder, 100)).toThrow(
    expect.objectContaining({
      code: 'MODEL',
      message: expect.stringMatching(/tokenizer\.json: \d+ bytes are too many; [^\n]+$/),
    }),
  );
});

it.each(['{"eos_token_id": 100}', '{"eos_token_id": "2"}', '{"eos_token_id": [-1]}', '{"eos', '7'])(
  'refuses %s with one line that names the file',
  (text) => {
    write('config', text);
    expect(() => readStopTokenIds(folder, 100)).toThrow(expect.objectContaining({ code: 'MODEL' }));
    expect(() => readStopTokenIds(folder, 100)).toThrow(/config\.json: [^\n]+$/);
  },
);
