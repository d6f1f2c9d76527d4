/** The source tree as the style tests see it: what people wrote, without what was generated, built, installed or recorded. */
import { existsSync, readdirSync, readFileSync } from 'node:fs';
import { join, relative } from 'node:path';
import { fileURLToPath } from 'node:url';

export const root = fileURLToPath(new URL('../..', import.meta.url)).replace(/\/$/, '');

const notOurs = new Set(['node_modules', 'generated', 'golden', 'vectors', 'build', '.cache', '__pycache__', '.git']);

/** Paths relative to the root, sorted, of files below `folder` that end with one of `extensions`. */
export function filesBelow(folder: string, extensions: readonly string[]): string[] {
  const walk = (path: string): string[] =>
    readdirSync(path, { withFileTypes: true }).flatMap((entry) => {
      if (notOurs.has(entry.name)) return [];
      const child = join(path, entry.name);
      if (entry.isDirectory()) return walk(child);
      return extensions.some((extension) => entry.name.endsWith(extension)) ? [relative(root, child)] : [];
    });
  return walk(join(root, folder)).sort();
}

export const read = (path: string): string => readFileSync(join(root, path), 'utf8');

export interface Workspace {
  readonly folder: string;
  readonly name: string;
  readonly dependencies: Readonly<Record<string, string>>;
  readonly devDependencies: Readonly<Record<string, string>>;
  /** Entries, by what follows the name: ".", "./testing". */
  readonly exports: Readonly<Record<string, string>>;
}

export function workspace(folder: string): Workspace {
  const json = JSON.parse(read(join(folder, 'package.json'))) as Workspace;
  const { name, dependencies = {}, devDependencies = {}, exports = {} } = json;
  return { folder, name, dependencies, devDependencies, exports };
}

const folders = (parent: string): string[] =>
  readdirSync(join(root, parent), { withFileTypes: true })
    .filter((entry) => entry.isDirectory())
    .map((entry) => `${parent}/${entry.name}`);

const isWorkspace = (folder: string): boolean => existsSync(join(root, folder, 'package.json'));

/** The rooms of the wings, and the command: `packages/WING/ROOM`, `packages/cli`. */
export const packages: readonly Workspace[] = folders('packages')
  .flatMap((wing) => [wing, ...folders(wing)])
  .filter(isWorkspace)
  .map(workspace);
export const services: readonly Workspace[] = folders('services').filter(isWorkspace).map(workspace);

/** What stands in quotes after `from` or in `import()`, also for types, in a program's text; without Node's own modules. */
export function specifiersIn(text: string): string[] {
  const code = text.replaceAll(/\/\*[\s\S]*?\*\/|^\s*\/\/.*$/gm, '');
  const pattern =
    /(?:^|[;\n])\s*(?:import|export)\s[^;'"]*?from\s*['"]([^'"]+)['"]|import\(\s*['"]([^'"]+)['"]\s*\)|(?:^|\n)import\s*['"]([^'"]+)['"]/g;
  const specifiers = [...code.matchAll(pattern)].map((match) => match[1] ?? match[2] ?? match[3]!);
  // A specifier that begins with "${" stands in a program text that a test writes.
  return [...new Set(specifiers.filter((name) => !/^(node:|\$\{)/.test(name)))];
}

/** Packages that a TypeScript file imports, without relative paths. */
export function importsOf(path: string): string[] {
  return [
    ...new Set(
      specifiersIn(read(path))
        .filter((name) => !name.startsWith('.'))
        .map(packageName),
    ),
  ];
}

/** "@kvtier/wire/grpc" → "@kvtier/wire" */
export function packageName(specifier: string): string {
  return specifier
    .split('/')
    .slice(0, specifier.startsWith('@') ? 2 : 1)
    .join('/');
}

export const isTest = (path: string): boolean => /\.((slow|long)\.)?test\.ts$|\/testing\/|\/test\//.test(path);
