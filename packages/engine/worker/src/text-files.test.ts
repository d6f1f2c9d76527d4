import { chmodSync, mkdtempSync, rmSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { textDigestOf } from '@kvtier/identity';
import { afterEach, beforeEach, expect, it } from 'vitest';
import { readTextDigest } from './text-files.ts';

let dir: string;
beforeEach(() => {
  dir = mkdtempSync(join(tmpdir(), 'kvtier-text-files-'));
});
afterEach(() => rmSync(dir, { recursive: true }));

it('is of what lies in the folder; a file that is not there is none', () => {
  expect(readTextDigest(dir)).toBe(textDigestOf(() => undefined));
  writeFileSync(join(dir, 'tokenizer.json'), '{}');
  const one = textDigestOf((name) => (name === 'tokenizer.json' ? Buffer.from('{}') : undefined));
  expect(readTextDigest(dir)).toBe(one);
  writeFileSync(join(dir, 'generation_config.json'), '{}');
  expect(readTextDigest(dir)).toBe(one);
});

it.skipIf(process.getuid!() === 0)('a file that cannot be read is said in one line', () => {
  writeFileSync(join(dir, 'tokenizer.json'), '{}');
  chmodSync(join(dir, 'tokenizer.json'), 0);
  expect(() => readTextDigest(dir)).toThrow(/tokenizer\.json: cannot be read .*check its permissions/);
});
