/** The source tree as the style tests see it: what people wrote, without what was generated, built, installed or recorded. */
import { readdirSync, readFileSync } from 'node:fs';
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
}

export function workspace(folder: string): Workspace {
  const { name, dependencies = {}, devDependencies = {} } = JSON.parse(read(join(folder, 'package.json'))) as Workspace;
  return { folder, name, dependencies, devDependencies };
}

const folders = (parent: string): string[] =>
  readdirSync(join(root, parent), { withFileTypes: true })
    .filter((entry) => entry.isDirectory())
    .map((entry) => `${parent}/${entry.name}`);

export const packages: readonly Workspace[] = folders('packages').map(workspace);
export const services: readonly Workspace[] = folders('services').map(workspace);

/** Modules that a TypeScript file imports, without relative ones and Node's own. */
export function importsOf(path: string): string[] {
  const text = read(path).replaceAll(/\/\*[\s\S]*?\*\/|^\s*\/\/.*$/gm, '');
  const pattern =
    /(?:^|[;\n])\s*(?:import|export)\s[^;'"]*?from\s*['"]([^'"]+)['"]|import\(\s*['"]([^'"]+)['"]\s*\)|(?:^|\n)import\s*['"]([^'"]+)['"]/g;
  const names = [...text.matchAll(pattern)].map((match) => match[1] ?? match[2] ?? match[3]!);
  // A specifier that begins with "${" stands in a program text that a test writes.
  const isOther = (name: string): boolean => !/^(\.|node:|\$\{)/.test(name);
  return [...new Set(names.filter(isOther).map(packageName))];
}

/** "@kvtier/wire/grpc" → "@kvtier/wire" */
function packageName(specifier: string): string {
  return specifier
    .split('/')
    .slice(0, specifier.startsWith('@') ? 2 : 1)
    .join('/');
}

export const isTest = (path: string): boolean =>
  /\.(slow\.)?test\.ts$|\/testing\/|\/test\/|\/conformance\.ts$/.test(path);
