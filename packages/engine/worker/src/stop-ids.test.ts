/** eos_token_id in all the shapes that model folders have it in. */
import { mkdtempSync, rmSync, writeFileSync } from 'node:fs';
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

it.each(['{"eos_token_id": 100}', '{"eos_token_id": "2"}', '{"eos_token_id": [-1]}', '{"eos', '7'])(
  'refuses %s with one line that names the file',
  (text) => {
    write('config', text);
    expect(() => readStopTokenIds(folder, 100)).toThrow(expect.objectContaining({ code: 'MODEL' }));
    expect(() => readStopTokenIds(folder, 100)).toThrow(/config\.json: [^\n]+$/);
  },
);
