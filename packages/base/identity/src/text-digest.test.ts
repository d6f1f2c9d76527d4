import { expect, it } from 'vitest';
import { type TextFile, textDigestOf, textFiles } from './text-digest.ts';

const digestOf = (files: Partial<Record<TextFile, string>>): string =>
  textDigestOf((name) => (files[name] === undefined ? undefined : Buffer.from(files[name]!)));

it('is another one for each content, each absence, and each way in which contents could run into one another', () => {
  const folders: Partial<Record<TextFile, string>>[] = [
    {},
    ...textFiles.map((name) => ({ [name]: '' })),
    ...textFiles.map((name) => ({ [name]: 'a' })),
    { 'tokenizer.json': 'ab', 'tokenizer_config.json': 'c' },
    { 'tokenizer.json': 'a', 'tokenizer_config.json': 'bc' },
    { 'tokenizer.json': 'abc' },
    { 'tokenizer.json': 'tokenizer_config.json:0;' },
    { 'tokenizer.json': '', 'tokenizer_config.json': '' },
  ];
  const digests = folders.map(digestOf);
  expect(new Set(digests).size).toBe(folders.length);
  expect(folders.map(digestOf)).toEqual(digests);
  expect(digests[0]).toMatch(/^[0-9a-f]{64}$/);
});
