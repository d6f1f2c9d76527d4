/** docs/api.md against the source: requests, parameters and codes of errors, both ways. */
import { expect, it } from 'vitest';
import { codesIn, namesIn, tableRows } from './docs.ts';
import { filesBelow, isTest, read } from './tree.ts';

const folder = 'packages/coordinator/api-server/src';
const page = 'docs/api.md';
const sources = filesBelow(folder, ['.ts'])
  .filter((path) => !isTest(path))
  .map(read)
  .join('\n');
const all = (text: string, pattern: RegExp): string[] => [...text.matchAll(pattern)].map((match) => match[1]!);
const sorted = (names: Iterable<string>): string[] => [...new Set(names)].toSorted();
const isRequest = (name: string): boolean => /^(?:GET|POST) /.test(name);
/** Rows below a head that begins with `head`, up to the next head. */
const below = (head: string): string[] => {
  const rows = tableRows(page);
  const names: string[] = [];
  let isBelow = false;
  for (const row of rows) {
    const [name] = codesIn(row[0]!);
    if (name === undefined || !row[0]!.startsWith('`')) isBelow = row[0] === head;
    else if (isBelow) names.push(name);
  }
  return names;
};

it('every request stands there, and no other', () => {
  const served = [...sources.matchAll(/app\.(get|post)(?:<[^(]*>)?\(\s*'([^']+)'/g)].map(
    ([, method, path]) => `${method!.toUpperCase()} ${path}`,
  );
  expect(sorted(namesIn(page).filter(isRequest))).toEqual(sorted(served));
});

it('every parameter stands there, and no other', () => {
  const params = read(`${folder}/params.ts`);
  const members = (name: string): string[] => {
    const from = params.indexOf(`const ${name} = `);
    return all(params.slice(from, params.indexOf('\n}', from)), /^ {2}(\w+):/gm);
  };
  const served = [...members('shared'), ...members('completionSchema'), ...members('chatSchema')];
  expect(served.length).toBeGreaterThan(30);
  expect(sorted(below('parameter'))).toEqual(sorted(served));
});

it('every code of an error stands there, and no other', () => {
  const hosts = read('packages/base/wire/src/http.ts');
  const codes = [
    ...all(hosts, /\bcode: '([a-z]+_[a-z_]+)'/g),
    ...all(sources, /\bcode: '([a-z][a-z_]+)'/g),
    ...all(sources, /badParameter\(.*, '([a-z]+_[a-z_]+)'/g),
    ...all(sources, /\[\d{3}, '([a-z_]+)'/g),
    ...all(sources, /code = '([a-z_]+)'\)/g),
  ];
  expect(sorted(below('code'))).toEqual(sorted(codes));
});
