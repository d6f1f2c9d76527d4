/**
 * The arrows between wings and rooms as rules over a tree of sources: each gives the lines that break it. Pure, so that a test
 * can plant a fault in a made-up tree and see it found.
 */
import { dirname, join, normalize } from 'node:path';
import { isTest, packageName, specifiersIn, type Workspace } from './tree.ts';

export interface Tree {
  /** packages/WING/ROOM, packages/cli, services/NAME, and `bench` and `test`, which may use everything. */
  readonly rooms: readonly Workspace[];
  /** Path → text of TypeScript files. */
  readonly files: ReadonlyMap<string, string>;
}

/** Which wings a wing may use, beside itself. Engine, store and coordinator never see each other; base sees nobody. */
export const wings: Readonly<Record<string, readonly string[]>> = {
  base: [],
  engine: ['base'],
  store: ['base'],
  coordinator: ['base'],
  connector: ['base', 'engine'],
  cli: ['base', 'engine'],
  services: ['base', 'engine', 'store', 'coordinator', 'connector'],
};

/** "packages/engine/model" → "engine"; "services/coordinator" → "services". */
export const wingOf = (folder: string): string => folder.replace(/^packages\//, '').split('/')[0]!;
const isOurs = (specifier: string): boolean => specifier.startsWith('@kvtier/');
const isFree = (folder: string): boolean => folder === 'bench' || folder === 'test';
/** Tests, and what only tests and measurements run. */
const isForTests = (path: string): boolean => isTest(path) || /^(bench|test)\//.test(path);

interface Use {
  readonly path: string;
  readonly from: Workspace;
  readonly to: Workspace;
  readonly specifier: string;
}

function uses({ rooms, files }: Tree): Use[] {
  const byName = new Map(rooms.map((room) => [room.name, room]));
  return [...files].flatMap(([path, text]) => {
    const from = rooms.find(({ folder }) => path.startsWith(`${folder}/`));
    if (from === undefined) return [];
    return specifiersIn(text)
      .filter(isOurs)
      .flatMap((specifier) => {
        const to = byName.get(packageName(specifier));
        return to === undefined || to === from ? [] : [{ path, from, to, specifier }];
      });
  });
}

/** No arrow upward, and none between engine, store and coordinator: neither in the code nor in its tests. */
export const wrongWings = (tree: Tree): string[] =>
  uses(tree)
    .filter(({ from, to }) => !isFree(from.folder) && wingOf(from.folder) !== wingOf(to.folder))
    .filter(({ from, to }) => !wings[wingOf(from.folder)]?.includes(wingOf(to.folder)))
    .map(({ path, specifier }) => `${path}: ${specifier}`);

/** Arrows between rooms that the table does not have, and rows of the table that no file uses. */
export function wrongRooms(tree: Tree, allowed: Readonly<Record<string, readonly string[]>>): string[] {
  const used = new Map<string, Set<string>>(tree.rooms.map(({ folder }) => [folder, new Set()]));
  const wrong: string[] = [];
  for (const { path, from, to } of uses(tree)) {
    if (isFree(from.folder) || isForTests(path)) continue;
    used.get(from.folder)!.add(to.folder);
    if (!allowed[short(from.folder)]?.includes(short(to.folder)))
      wrong.push(`${path}: ${short(from.folder)} may not use ${short(to.folder)}`);
  }
  for (const [folder, may] of Object.entries(allowed)) {
    const has = new Set([...(used.get(long(folder)) ?? [])].map(short));
    for (const one of may)
      if (!has.has(one)) wrong.push(`${folder} may use ${one}, and does not: take it out of the table`);
  }
  return wrong;
}

const short = (folder: string): string => folder.replace(/^packages\//, '');
const long = (folder: string): string => (folder.startsWith('services/') ? folder : `packages/${folder}`);

/** A room is entered by its entries only, also by tests; those for tests by tests only. */
export function pastEntries(tree: Tree): string[] {
  const roomOf = (path: string): string | undefined =>
    tree.rooms.find(({ folder }) => path.startsWith(`${folder}/`))?.folder;
  const relative = [...tree.files].flatMap(([path, text]) =>
    specifiersIn(text)
      .filter((specifier) => specifier.startsWith('.'))
      .filter((specifier) => {
        const to = roomOf(normalize(join(dirname(path), specifier)));
        return to !== undefined && to !== roomOf(path) && !isFree(to);
      })
      .map((specifier) => `${path}: ${specifier}`),
  );
  const named = uses(tree)
    .filter(({ path, to, specifier }) => {
      const entry = `.${specifier.slice(to.name.length)}`;
      return to.exports[entry] === undefined || (/\/testing$/.test(entry) && !isForTests(path));
    })
    .map(({ path, specifier }) => `${path}: ${specifier}`);
  return [...relative, ...named];
}

/** What an index passes on is imported outside of its room; types, and what is generated, may wait for somebody. */
export function unusedValues({ rooms, files }: Tree): string[] {
  return rooms.flatMap(({ folder, name, exports }) => {
    const index = exports['.'] === './src/index.ts' ? (files.get(`${folder}/src/index.ts`) ?? '') : '';
    const from = new RegExp(`(?:import|export)\\s([^;'"]*?)\\sfrom '${name}'`, 'g');
    // Of a file that imports it when it is needed, any word may be what it takes.
    const taken = [...files]
      .filter(([path]) => !path.startsWith(`${folder}/`))
      .flatMap(([, text]) =>
        text.includes(`import('${name}')`) ? text : [...text.matchAll(from)].map((use) => use[1]!),
      )
      .join('\n');
    const passed = [...index.matchAll(/^export \{([^}]*)\} from '\.\/(?!generated\/)/gm)].flatMap((match) =>
      match[1]!.split(','),
    );
    return passed
      .map((one) => one.trim())
      .filter((one) => one !== '' && !one.startsWith('type ') && !new RegExp(`\\b${one}\\b`).test(taken))
      .map((one) => `${folder}/src/index.ts: ${one}`);
  });
}

/** Files that import each other in a circle, types included: one line a circle. Tarjan's components. */
export function circles({ files }: Tree): string[] {
  const next = (path: string): string[] =>
    specifiersIn(files.get(path)!)
      .filter((specifier) => specifier.startsWith('.'))
      .map((specifier) => normalize(join(dirname(path), specifier)))
      .filter((to) => files.has(to));
  const order = new Map<string, number>();
  const low = new Map<string, number>();
  const stack: string[] = [];
  const found: string[] = [];
  const visit = (path: string): void => {
    order.set(path, order.size);
    low.set(path, order.get(path)!);
    stack.push(path);
    for (const to of next(path)) {
      if (!order.has(to)) visit(to);
      if (stack.includes(to)) low.set(path, Math.min(low.get(path)!, low.get(to)!));
    }
    if (low.get(path) !== order.get(path)) return;
    const circle = stack.splice(stack.indexOf(path));
    if (circle.length > 1) found.push(circle.sort().join(' ↔ '));
  };
  for (const path of files.keys()) if (!order.has(path)) visit(path);
  return found;
}
