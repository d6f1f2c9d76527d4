/** One word per thing (docs/glossary.md): its refused words are not used, and no two classes have one name. */
import { expect, it } from 'vitest';
import { filesBelow, read } from './tree.ts';

const glossary = read('docs/glossary.md');
const code = ['packages', 'services', 'bench', 'test', 'scripts', 'proto', 'infra'].flatMap((folder) =>
  filesBelow(folder, ['.ts', '.mjs', '.cc', '.h', '.cu', '.cuh', '.proto']),
);
const pages = ['README.md', 'ARCHITECTURE.md', 'CONTRIBUTING.md', ...filesBelow('docs', ['.md'])];

/** Exported classes by name, with their files. */
function classes(files: readonly (readonly [path: string, text: string])[]): Map<string, string[]> {
  const found = new Map<string, string[]>();
  for (const [path, text] of files) {
    for (const [, name] of text.matchAll(/^export (?:abstract )?class (\w+)/gm))
      found.set(name!, [...(found.get(name!) ?? []), path]);
  }
  return found;
}

const twice = (found: ReadonlyMap<string, readonly string[]>): string[] =>
  [...found].filter(([, paths]) => paths.length > 1).map(([name, paths]) => `${name}: ${paths.join(', ')}`);

it('no two exported classes have one name', () => {
  const typescript = code.filter((path) => path.endsWith('.ts')).map((path) => [path, read(path)] as const);
  expect(twice(classes(typescript)), 'say in the name what sets it apart').toEqual([]);
  expect(twice(classes([...typescript, ['planted.ts', 'export class Store {}\n']]))).toHaveLength(1);
});

it('words that the glossary refuses are not used', () => {
  const refused = [...glossary.matchAll(/\(not: ([^)]+)\)/g)].flatMap((match) => match[1]!.split(', '));
  expect(refused).toContain('door');
  const uses = (text: string): string[] =>
    refused.filter((word) => new RegExp(`(?<![\\w-])${word}(?![\\w-])`, 'i').test(text));
  const found = [...code, ...pages]
    .filter((path) => path !== 'docs/glossary.md' && path !== 'test/style/glossary.test.ts')
    .flatMap((path) =>
      read(path)
        .split('\n')
        .flatMap((line, at) => uses(line).map((word) => `${path}:${at + 1}: ${word}`)),
    );
  expect(found, 'use the word of docs/glossary.md').toEqual([]);
  expect(uses('The door answers.')).toEqual(['door']);
});

it('each word stands once', () => {
  const words = [...glossary.matchAll(/^\* \*\*([^*]+)\*\*/gm)].map((match) => match[1]!);
  expect(words.filter((word, at) => words.indexOf(word) !== at)).toEqual([]);
});
