/** The house's habits that a machine can check. Each message names the remedy. After TigerBeetle's tidy test. */
import { expect, it } from 'vitest';
import { filesBelow, isTest, read } from './tree.ts';

const folders = ['packages', 'services', 'bench', 'test', 'scripts', 'proto'];
const sources = folders.flatMap((folder) =>
  filesBelow(folder, ['.ts', '.mjs', '.cc', '.h', '.cu', '.cuh', '.py', '.proto']),
);
const maxLines = 500;

const linesOf = (path: string): string[] => read(path).split('\n');

it('finds the tree', () => expect(sources.length).toBeGreaterThan(50));

it(`no file has more than ${maxLines} lines`, () => {
  const long = sources
    .map((path) => `${path}: ${linesOf(path).length - 1}`)
    .filter((row) => Number(row.split(': ')[1]) > maxLines);
  expect(long, 'split by reason to change: which two things does the file do?').toEqual([]);
});

it('no marks of unfinished work', () => {
  const mark = /\b(TO_DO|FIX_ME|X_XX)\b/.source.replaceAll('_', ''); // spelled so that this file does not match itself
  const marked = sources.flatMap((path) =>
    linesOf(path).flatMap((line, index) => (new RegExp(mark).test(line) ? [`${path}:${index + 1}`] : [])),
  );
  expect(marked, 'finish it').toEqual([]);
});

it('every source file opens with what it is', () => {
  const opening = /^(\/\*\*?|\/\/|#|""")/;
  const isReexport = (path: string): boolean =>
    path.endsWith('/index.ts') && /^(\s*(export|import)\b[^;]*;\s*)+$/.test(read(path));
  const mayBeSilent = (path: string): boolean => isTest(path) || path.endsWith('.proto');
  const silent = sources.filter((path) => !mayBeSilent(path) && !isReexport(path) && !opening.test(read(path)));
  expect(silent, 'begin the file with a comment: what it is, its invariant, the source of the idea').toEqual([]);
});

it('packages and services never write to the console', () => {
  const pattern = /\bconsole\.(log|info|warn|error|debug)\(/;
  const talking = sources.filter(
    (path) => /^(packages|services)\//.test(path) && path.endsWith('.ts') && !isTest(path) && pattern.test(read(path)),
  );
  expect(talking, 'take a logger of @kvtier/telemetry as an argument; commands write to process.stdout').toEqual([]);
});

it('a service’s main stays a process without logic', () => {
  const mains = filesBelow('services', ['main.ts']).map((path) => [path, linesOf(path).length] as const);
  expect(mains.map(([path]) => path)).toEqual([
    'services/cache-node/src/main.ts',
    'services/coordinator/src/main.ts',
    'services/engine-worker/src/main.ts',
  ]);
  expect(
    mains.filter(([, count]) => count > 31),
    'move logic into a room of a wing: a main has at most 30 lines',
  ).toEqual([]);
});

it('no test is skipped or focused without a word', () => {
  const pattern = /\b(it|test|describe)\.(only|todo)\b/;
  expect(
    sources.filter((path) => isTest(path) && pattern.test(read(path))),
    'remove .only and .todo; a skip prints what was missed and why',
  ).toEqual([]);
});
