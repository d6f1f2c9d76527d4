/** Keys of a file: what is one, and what becomes of them when it changes. */
import { Hmac } from 'node:crypto';
import { chmodSync, mkdtempSync, rmSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { afterEach, beforeEach, expect, it, vi } from 'vitest';
import { ApiKeys } from './api-keys.ts';
import { watchTurns } from './testing/index.ts';

let folder: string;
let file: string;
let problems: (string | undefined)[];
beforeEach(() => {
  folder = mkdtempSync(join(tmpdir(), 'kvtier-keys-'));
  file = join(folder, 'keys');
  problems = [];
});
afterEach(() => rmSync(folder, { recursive: true }));

const write = (text: string): void => writeFileSync(file, text, { mode: 0o600 });
const open = (reloadMs = 60_000): ApiKeys => new ApiKeys(file, { reloadMs, onProblem: (why) => problems.push(why) });
const [first, second] = ['sk-0123456789abcdef', 'sk-fedcba9876543210'];

it('are the lines without remarks, and nothing that is like one', () => {
  write(`# of the team\n  ${first}\r\n\n${second}`);
  const keys = open();
  expect([first, second].map((key) => keys.has(key))).toEqual([true, true]);
  for (const no of ['', ' ', '#', first.slice(1), `${first} `, first.toUpperCase(), `${first}\n${second}`])
    expect(keys.has(no), JSON.stringify(no)).toBe(false);
  keys.close();
});

it('change with the file; a file that is of no use changes nothing', async () => {
  write(first);
  const keys = open();
  write(second);
  expect(keys.has(first)).toBe(true);
  await keys.reload();
  expect([first, second].map((key) => keys.has(key))).toEqual([false, true]);
  write('');
  await keys.reload();
  await keys.reload();
  expect([keys.has(second), problems]).toEqual([
    true,
    [`${file}: not read again (holds 0 keys, not 1 to 65536); the one before stays in use`],
  ]);
  write(first);
  await keys.reload();
  expect([keys.has(first), keys.has(second), problems.at(-1)]).toEqual([true, false, undefined]);
  keys.close();
});

it('are looked at again by themselves', async () => {
  write(first);
  const keys = open(5);
  write(second);
  while (!keys.has(second)) await new Promise(setImmediate);
  keys.close();
});

it('of a full file come into use without a long turn, all at once', async () => {
  const keysOf = (team: string): string[] => Array.from({ length: 65_536 }, (_, i) => `sk-${team}-0123456789-${i}`);
  const [former, fresh] = [keysOf('a'), keysOf('b')];
  write(former.join('\n'));
  const keys = open();
  write(fresh.join('\n'));
  const worst = watchTurns();
  const reloaded = keys.reload().then(() => true);
  let isRenewed = false;
  while (!isRenewed) {
    const [isFormer, isFresh] = [former, fresh].map((each) => keys.has(each[0]!) && keys.has(each.at(-1)!));
    expect(isFormer).not.toBe(isFresh);
    isRenewed = await Promise.race([reloaded, new Promise<false>((resolve) => setImmediate(resolve, false))]);
  }
  expect(worst().cpuMs).toBeLessThan(200);
  expect([keys.has(former[7]!), keys.has(fresh[7]!)]).toEqual([false, true]);
  keys.close();
});

it('of the newest file are in use, also where it came before the last one was ready', async () => {
  const many = Array.from({ length: 20_000 }, (_, i) => `sk-0123456789abcdef-${i}`);
  write(first);
  const keys = open();
  write(many.join('\n'));
  const reloaded = [keys.reload()];
  const renewing = vi.spyOn(Hmac.prototype, 'update');
  while (renewing.mock.calls.length === 0) await new Promise(setImmediate);
  renewing.mockRestore();
  write(second);
  reloaded.push(keys.reload());
  await Promise.all(reloaded);
  expect([first, second, many[0]!].map((key) => keys.has(key))).toEqual([false, true, false]);
  keys.close();
});

it.each<[string, string, RegExp]>([
  ['too short', 'sk-0123456789ab', /keys: line 1 is no key: 16 to 512 printable characters .*; name a file of keys/],
  ['with a space', `${first}\nsk-0123456789 abcdef`, /line 2 is no key/],
  ['none', '# none\n', /holds 0 keys/],
])('a key that is %s is refused at start', (_, text, why) => {
  write(text);
  expect(open).toThrow(expect.objectContaining({ code: 'CONFIG', message: expect.stringMatching(why) }));
});

it('a file that is not there is named with the key that names it', () => {
  const missing = () => new ApiKeys('/nope', { key: 'adminKeysFile', onProblem: () => {} });
  expect(missing).toThrow(/^adminKeysFile: \/nope: cannot be used \(ENOENT/);
});

it('a file that everybody may read is refused, one of the group is not', () => {
  write(first);
  chmodSync(file, 0o644);
  expect(open).toThrow(/keys: cannot be used \(others may read it; chmod o-rwx it\)/);
  chmodSync(file, 0o440); // a secret that Kubernetes mounts for a group
  open().close();
});
