/** What the command says at once, and when it runs. */

import { spawnSync } from 'node:child_process';
import { version } from '@kvtier/telemetry/version';
import { afterEach, expect, it, vi } from 'vitest';
import { main, saidAtOnce } from './main.ts';

const said = { out: '', err: '' };
vi.spyOn(process.stdout, 'write').mockImplementation((text) => {
  said.out += String(text);
  return true;
});
vi.spyOn(process.stderr, 'write').mockImplementation((text) => {
  said.err += String(text);
  return true;
});
afterEach(() => {
  said.out = '';
  said.err = '';
});

it.each([
  [['up', '--help'], 0, 'kvtier up: the whole system', ''],
  [['--version'], 0, `kvtier ${version}\n$`, ''],
  [['-v'], 0, `kvtier ${version}\n$`, ''],
  [['up', '--version'], 0, `kvtier ${version}\n$`, ''],
  [['--help'], 0, 'kvtier: a persistent KV-cache tier', ''],
  [[], 1, 'kvtier: a persistent KV-cache tier', ''],
  [['up', '--prot', '3'], 78, '', 'kvtier: --prot: unknown option; did you mean --port?\n'],
  [['up', '--check', '--engines', '0'], 78, '', 'kvtier: --engines: "0" is not a whole number from 1 to 64\n'],
  [
    ['up', '--check', '--data-dir', new URL(import.meta.url).pathname],
    1,
    '',
    expect.stringMatching(/ is a file; name a folder\n$/),
  ],
])('says what needs no system: %j', async (args, code, out, err) => {
  expect(await saidAtOnce(args)).toBe(code);
  expect(said).toEqual({ out: out === '' ? '' : expect.stringMatching(`^${out}`), err });
  const once = { ...said };
  expect(await main(args)).toBe(code);
  expect(said).toEqual({ out: once.out.repeat(2), err: once.err.repeat(2) });
});

it('says so before anything native is there', () => {
  const main = JSON.stringify(new URL('main.ts', import.meta.url).href);
  const program = `process.dlopen = () => { throw new Error('dlopen'); };
    const { saidAtOnce } = await import(${main});
    process.exitCode = (await saidAtOnce(['up', '--prot', '3'])) + (await saidAtOnce(['up', '--help']));`;
  const run = spawnSync(process.execPath, ['--import', 'tsx', '--input-type=module', '-e', program]);
  expect([run.status, String(run.stderr)]).toEqual([78, 'kvtier: --prot: unknown option; did you mean --port?\n']);
});

it('leaves to the command what is the command’s', async () => {
  expect(await saidAtOnce(['up', '--port', '3'])).toBeUndefined();
  expect(await saidAtOnce(['demmo'])).toBeUndefined();
  expect(await main(['demmo'])).toBe(78);
  expect(said).toEqual({ out: '', err: 'kvtier: demmo: unknown command; did you mean kvtier demo?\n' });
});
