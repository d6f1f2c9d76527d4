import { chmodSync, mkdtempSync, rmSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { textDigestOf, tokenFiles } from '@kvtier/identity';
import { afterEach, beforeEach, expect, it } from 'vitest';
import { readTextDigests } from './text-files.ts';

let dir: string;
beforeEach(() => {
  dir = mkdtempSync(join(tmpdir(), 'kvtier-text-files-'));
});
afterEach(() => rmSync(dir, { recursive: true }));

it('is of what lies in the folder; a file that is not there is none', () => {
  const none = () => undefined;
  expect(readTextDigests(dir)).toEqual({ textDigest: textDigestOf(none), tokenDigest: textDigestOf(none, tokenFiles) });
  writeFileSync(join(dir, 'tokenizer.json'), '{}');
  const one = (name: string) => (name === 'tokenizer.json' ? Buffer.from('{}') : undefined);
  const tokenDigest = textDigestOf(one, tokenFiles);
  expect(readTextDigests(dir)).toEqual({ textDigest: textDigestOf(one), tokenDigest });
  writeFileSync(join(dir, 'generation_config.json'), '{}');
  expect(readTextDigests(dir)).toEqual({ textDigest: textDigestOf(one), tokenDigest });
});

it('another chat template leaves what ids mean as it is, another tokenizer does not', () => {
  const [first, second] = ['{}', '{ }'].map((content) => {
    writeFileSync(join(dir, 'tokenizer.json'), content);
    writeFileSync(join(dir, 'chat_template.jinja'), 'one');
    const before = readTextDigests(dir);
    writeFileSync(join(dir, 'chat_template.jinja'), 'another');
    const after = readTextDigests(dir);
    expect([after.tokenDigest, after.textDigest === before.textDigest]).toEqual([before.tokenDigest, false]);
    return after;
  });
  expect(first!.tokenDigest).not.toBe(second!.tokenDigest);
});

it('a file that cannot be read is said in one line', () => {
  writeFileSync(join(dir, 'tokenizer.json'), '{}');
  chmodSync(join(dir, 'tokenizer.json'), 0);
  chmodSync(dir, 0o755);
  const user = process.geteuid!();
  // Root reads everything.
  if (user === 0) process.seteuid!(65_534);
  try {
    expect(() => readTextDigests(dir)).toThrow(/tokenizer\.json: cannot be read .*check its permissions/);
  } finally {
    process.seteuid!(user);
  }
});
