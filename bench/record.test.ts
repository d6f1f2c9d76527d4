/** The page of figures is what the history says. */
import { execFileSync } from 'node:child_process';
import { appendFileSync, mkdirSync, mkdtempSync, readFileSync, rmSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { expect, it, onTestFinished } from 'vitest';
import { commitOf, page, type Run, readHistory, runOf } from './record.ts';

const run = (at: string, machine: string, suite: string, value: number): Run => ({
  ...{ at, commit: 'abc1234', machine, suite },
  figures: [{ name: 'rate', value, unit: 'GB/s', limit: 2, limitName: 'memcpy', ratio: value / 2 }],
});

it('shows the latest of each figure on each machine', () => {
  const rows = page([
    run('2026-01-01', 'a', 'arena', 1),
    run('2026-01-02', 'b', 'arena', 3),
    run('2026-01-03', 'a', 'arena', 2),
  ])
    .split('\n')
    .filter((line) => /^## |^\| arena/.test(line));
  expect(rows).toEqual([
    '## a',
    '| arena | rate | 2.00 | 2.00 | GB/s | 1.000 | memcpy | 2026-01-03, abc1234 |',
    '## b',
    '| arena | rate | 3.00 | 2.00 | GB/s | 1.500 | memcpy | 2026-01-02, abc1234 |',
  ]);
});

it('a run of a part of a suite leaves the figures of the other parts, each with its own day and commit', () => {
  const first = { ...run('2026-01-01', 'a', 'ttft', 0), figures: [figure('warm', 1), figure('miss', 2)] };
  const second = { ...run('2026-01-02', 'a', 'ttft', 0), commit: 'def5678', figures: [figure('miss', 1.5)] };
  const nothing = { ...run('2026-01-03', 'a', 'ttft', 0), figures: [] };
  const rows = page([first, second, nothing])
    .split('\n')
    .filter((line) => line.startsWith('| ttft'));
  expect(rows).toEqual([
    '| ttft | warm | 1.00 | 2.00 | GB/s | 0.500 | memcpy | 2026-01-01, abc1234 |',
    '| ttft | miss | 1.50 | 2.00 | GB/s | 0.750 | memcpy | 2026-01-02, def5678 |',
  ]);
});

const figure = (name: string, value: number) => ({ ...run('', '', '', value).figures[0]!, name });
const isWhole = { isWhole: true } as const;
const suiteRows = (history: readonly Run[], suite: string): string[] =>
  page(history)
    .split('\n')
    .filter((line) => line.startsWith(`| ${suite} |`));

it('a figure that was measured with arguments is marked by them', () => {
  const plain = { ...run('2026-01-01', 'a', 'redis', 0), figures: [figure('set', 1), figure('get', 2)], ...isWhole };
  const shallow = { ...run('2026-01-02', 'a', 'redis', 0), args: ['--depth', '1|2'], figures: [figure('set', 3)] };
  expect(suiteRows([plain, shallow], 'redis')).toEqual([
    '| redis | get | 2.00 | 2.00 | GB/s | 1.000 | memcpy | 2026-01-01, abc1234 |',
    '| redis | set | 3.00 | 2.00 | GB/s | 1.500 | memcpy | 2026-01-02, abc1234, `redis --depth 1\\|2` |',
  ]);
});

it('what the newest whole run of a suite on a machine does not have any more has left the page', () => {
  const old = { ...run('2026-01-01', 'a', 'ttft', 0), figures: [figure('warm', 1), figure('renamed', 2)] };
  const elsewhere = { ...old, machine: 'b' };
  const otherSuite = { ...old, suite: 'disk' };
  const whole = { ...run('2026-01-02', 'a', 'ttft', 0), figures: [figure('warm', 2)], ...isWhole };
  const part = { ...run('2026-01-03', 'a', 'ttft', 0), args: ['miss'], figures: [figure('miss', 3)] };
  const warm = '| ttft | warm | 2.00 | 2.00 | GB/s | 1.000 | memcpy | 2026-01-02, abc1234 |';
  const miss = '| ttft | miss | 3.00 | 2.00 | GB/s | 1.500 | memcpy | 2026-01-03, abc1234, `ttft miss` |';
  const left = suiteRows([elsewhere], 'ttft');
  expect(left).toHaveLength(2);
  expect(suiteRows([old, elsewhere, otherSuite, whole, part], 'ttft')).toEqual([warm, miss, ...left]);
  expect(suiteRows([old, elsewhere, otherSuite, whole, part], 'disk')).toHaveLength(2);
  expect(suiteRows([old, part], 'ttft')).toHaveLength(3);
});

it('a figure without a limit above 0 is no comparison, and is not shown', () => {
  const bare = { ...figure('added', 1), limit: -0.15, ratio: -0.083 };
  const first = { ...run('2026-01-01', 'a', 'streams', 0), figures: [figure('added', 1), figure('memory', 2)] };
  const second = { ...run('2026-01-02', 'a', 'streams', 0), figures: [bare] };
  expect(suiteRows([first, second], 'streams')).toEqual([
    '| streams | memory | 2.00 | 2.00 | GB/s | 1.000 | memcpy | 2026-01-01, abc1234 |',
  ]);
});

it.each([
  ['whole without arguments', [], true, isWhole],
  ['no whole one with some', ['miss'], true, { args: ['miss'] }],
  ['no whole one where a part failed', [], false, {}],
])('a run is %s', (_, args, measuredAll, kept) => {
  const figures = [figure('warm', 1)];
  const { at, commit, machine, ...rest } = runOf('ttft', args, figures, measuredAll);
  expect([at, commit, machine]).toEqual([
    expect.stringMatching(/^\d{4}-\d\d-\d\d$/),
    expect.stringMatching(/^[0-9a-f]{7,}\+?$/),
    expect.stringMatching(/^\d+ x .+, .+$/),
  ]);
  expect(rest).toEqual({ suite: 'ttft', figures, ...kept });
});

it('a commit has a "+" for changes to the code, and none for what was recorded before', () => {
  const dir = mkdtempSync(join(tmpdir(), 'kvtier-record-'));
  onTestFinished(() => rmSync(dir, { recursive: true, force: true }));
  const git = (...args: readonly string[]): string =>
    execFileSync('git', ['-C', dir, '-c', 'user.name=a', '-c', 'user.email=a@example.org', ...args], {
      encoding: 'utf8',
    }).trim();
  git('init', '--quiet');
  mkdirSync(join(dir, 'bench/results'), { recursive: true });
  const [code, results] = [join(dir, 'bench/run.ts'), join(dir, 'bench/results/history.jsonl')];
  for (const path of [code, results]) writeFileSync(path, 'a\n');
  git('add', '.');
  git('commit', '--quiet', '--message', 'a');
  const commit = git('rev-parse', '--short', 'HEAD');
  appendFileSync(results, 'b\n');
  expect(commitOf(join(dir, 'bench'))).toBe(commit);
  appendFileSync(code, 'b\n');
  expect(commitOf(join(dir, 'bench'))).toBe(`${commit}+`);
});

it('bench/results/README.md is written from history.jsonl', () => {
  const written = readFileSync(new URL('./results/README.md', import.meta.url), 'utf8');
  expect(written, 'run a suite with --record, or write the page anew').toBe(page(readHistory()));
});
