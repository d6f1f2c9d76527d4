/** Tests of the Python package run by what test/e2e names: each class of them has to be named there, or its file. */
import { expect, it } from 'vitest';
import { filesBelow, read } from './tree.ts';

const runs = filesBelow('test/e2e', ['.ts'])
  .map(read)
  .flatMap((text) => [...text.matchAll(/\bruns\(\s*'([^']+)'/g)])
  .flatMap(([, names]) => names!.split(' '));
const files = filesBelow('packages/connector/python/tests', ['.py']).filter((path) => /\/test_\w+\.py$/.test(path));

/** Those with a test of their own: others are what such classes are made of. */
function classesOf(path: string): string[] {
  const [, ...parts] = read(path).split(/^class (?=\w)/m);
  return parts.filter((part) => /^ {4}def test_/m.test(part)).map((part) => /^\w+/.exec(part)![0]);
}

it('every class of them is run', () => {
  expect(files.length).toBeGreaterThan(20);
  const left = files.flatMap((path) => {
    const file = path.split('/').at(-1)!.slice(0, -'.py'.length);
    return classesOf(path)
      .map((name) => `${file}.${name}`)
      .filter((name) => !runs.includes(file) && !runs.includes(name));
  });
  expect(left).toEqual([]);
});
