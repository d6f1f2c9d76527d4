/**
 * Arrows run one way (ARCHITECTURE.md, design "Layout"): who may know whom, as a table. An import that is not in it is either in
 * the wrong package or a decision, to be made in the table and in ARCHITECTURE.md.
 */
import { describe, expect, it } from 'vitest';
import { filesBelow, importsOf, isTest, packages, services, type Workspace, workspace } from './tree.ts';

/** What each package may depend on. Below: what stands on nothing first. */
const allowed: Readonly<Record<string, readonly string[]>> = {
  errors: [],
  config: ['errors'],
  native: ['errors'],
  telemetry: ['errors', 'native'],
  identity: ['errors', 'native'],
  wire: ['errors', 'identity', 'native'],
  eviction: ['errors', 'identity'],
  events: ['errors', 'identity', 'native'],
  tiers: ['errors', 'eviction', 'identity', 'native', 'wire'],
  store: ['errors', 'eviction', 'identity', 'tiers'],
  session: ['errors', 'events', 'identity', 'native', 'store', 'tiers', 'wire'],
  'prefix-cache': ['errors', 'eviction', 'identity'],
  executor: ['errors', 'native'],
  connector: ['errors', 'executor', 'identity', 'prefix-cache', 'wire'],
  scheduler: ['connector', 'errors', 'events', 'executor', 'identity', 'prefix-cache'],
  door: ['errors', 'telemetry', 'wire'],
  cli: ['config', 'errors', 'executor', 'native', 'telemetry'],
};

const short = (name: string): string => name.replace('@kvtier/', '');
const ours = (names: readonly string[]): string[] => names.filter((name) => name.startsWith('@kvtier/'));
const rootPackage = workspace('.');

describe.each([...packages, ...services].map((one) => [one.folder, one] as const))('%s', (folder, one) => {
  const files = filesBelow(folder, ['.ts']);
  const isService = folder.startsWith('services/');

  it('depends only on what its place in the design allows', () => {
    const may = isService ? Object.keys(allowed) : allowed[short(one.name)];
    expect(may, `${folder}: not in the table of this test; add it there and to ARCHITECTURE.md`).toBeDefined();
    const wrong = ours(Object.keys(one.dependencies)).filter((name) => !may!.includes(short(name)));
    expect(
      wrong,
      `${folder}/package.json: arrows against the design; move the code to where it may know these`,
    ).toEqual([]);
  });

  it('declares what it imports', () => {
    const undeclared = files.flatMap((path) => {
      const declared = new Set([
        one.name,
        ...Object.keys(one.dependencies),
        ...(isTest(path) ? [...Object.keys(one.devDependencies), ...Object.keys(rootPackage.devDependencies)] : []),
      ]);
      return importsOf(path)
        .filter((name) => !declared.has(name))
        .map((name) => `${path}: ${name}`);
    });
    expect(
      undeclared,
      `add these to ${folder}/package.json (and package-lock.json), if the design allows the arrow`,
    ).toEqual([]);
  });

  it('declares nothing that it does not use', () => {
    const used = new Set(files.flatMap(importsOf));
    // Used by CMakeLists.txt and by generated code.
    const elsewhere = new Set(['node-addon-api', 'node-api-headers', '@bufbuild/protobuf']);
    const unused = Object.keys(one.dependencies).filter((name) => !used.has(name) && !elsewhere.has(name));
    expect(
      files.length === 0 ? [] : unused,
      `remove these from ${folder}/package.json (and package-lock.json)`,
    ).toEqual([]);
  });
});

it('nothing imports a service, nor a file of another package past its entry', () => {
  const paths = [...packages, ...services].flatMap(({ folder }) => filesBelow(folder, ['.ts']));
  const names = new Set(services.map(({ name }) => name));
  expect(paths.filter((path) => importsOf(path).some((name) => names.has(name)))).toEqual([]);
});

it('has no cycle', () => {
  const byName = new Map<string, Workspace>(packages.map((one) => [one.name, one]));
  const done = new Set<string>();
  const visit = (name: string, path: readonly string[]): void => {
    expect(path, `a cycle; move what both need into a package below them`).not.toContain(name);
    if (done.has(name)) return;
    for (const next of ours(Object.keys(byName.get(name)!.dependencies))) visit(next, [...path, name]);
    done.add(name);
  };
  for (const { name } of packages) visit(name, []);
  expect(done.size).toBe(packages.length);
});

it('pins every package exactly', () => {
  const loose = [rootPackage, ...packages, ...services, workspace('bench'), workspace('test')].flatMap((one) =>
    Object.entries({ ...one.dependencies, ...one.devDependencies })
      .filter(([, version]) => !/^\d+\.\d+\.\d+(-[\w.]+)?$/.test(version))
      .map(([name, version]) => `${one.folder}: ${name} ${version}`),
  );
  expect(loose, 'write the exact version, so that Node 20 never gets another major').toEqual([]);
});
