/**
 * Arrows run one way (ARCHITECTURE.md, "The wings"): who may know whom, as a table. An import that is not in it is either in
 * the wrong room or a decision, to be made in the table and in ARCHITECTURE.md. An arrow of the table that nobody uses goes.
 */
import { describe, expect, it } from 'vitest';
import { circles, pastEntries, type Tree, unusedValues, wingOf, wings, wrongRooms, wrongWings } from './arrows.ts';
import { filesBelow, importsOf, isTest, packages, read, services, type Workspace, workspace } from './tree.ts';

/** What each room's code uses. Its tests may use what its wing may. */
const allowed: Readonly<Record<string, readonly string[]>> = {
  'base/config': ['base/errors'],
  'base/data-plane': ['base/errors'],
  'base/errors': [],
  'base/events': ['base/config', 'base/data-plane', 'base/errors', 'base/identity'],
  'base/eviction': ['base/errors', 'base/identity'],
  'base/identity': ['base/data-plane', 'base/errors'],
  'base/membership': ['base/config', 'base/errors', 'base/redis', 'base/runtime'],
  'base/redis': ['base/config', 'base/errors'],
  'base/runtime': [],
  'base/telemetry': ['base/data-plane', 'base/errors'],
  'base/wire': ['base/config', 'base/data-plane', 'base/errors'],
  'engine/executor': ['base/errors', 'engine/model'],
  'engine/model': ['base/errors'],
  'engine/prefix-cache': ['base/errors', 'base/eviction', 'base/identity'],
  'engine/scheduler': ['base/errors', 'base/identity', 'engine/executor', 'engine/prefix-cache'],
  'engine/worker': [
    'base/config',
    'base/errors',
    'base/events',
    'base/identity',
    'base/membership',
    'base/telemetry',
    'base/wire',
    'engine/executor',
    'engine/scheduler',
  ],
  'connector/load-planner': [],
  'connector/session-client': [
    'base/errors',
    'base/wire',
    'connector/load-planner',
    'engine/executor',
    'engine/scheduler',
  ],
  'store/node': [
    'base/config',
    'base/data-plane',
    'base/errors',
    'base/events',
    'base/identity',
    'base/membership',
    'base/runtime',
    'base/telemetry',
    'base/wire',
    'store/placement',
    'store/session',
    'store/tiers',
  ],
  'store/placement': ['base/errors', 'base/eviction', 'base/identity', 'base/runtime', 'store/tiers'],
  'store/session': ['base/errors', 'base/identity', 'base/runtime', 'base/wire', 'store/placement'],
  'store/tiers': [
    'base/config',
    'base/data-plane',
    'base/errors',
    'base/eviction',
    'base/identity',
    'base/redis',
    'base/runtime',
  ],
  'coordinator/kv-index': ['base/config', 'base/errors', 'base/events', 'base/identity'],
  'coordinator/routing': ['coordinator/kv-index'],
  'coordinator/registry': [
    'base/config',
    'base/errors',
    'base/membership',
    'base/runtime',
    'base/telemetry',
    'base/wire',
  ],
  'coordinator/handoff': [
    'base/errors',
    'base/telemetry',
    'base/wire',
    'coordinator/dispatch',
    'coordinator/kv-index',
    'coordinator/registry',
    'coordinator/routing',
  ],
  'coordinator/dispatch': ['base/errors', 'coordinator/kv-index', 'coordinator/registry', 'coordinator/routing'],
  'coordinator/api-server': [
    'base/config',
    'base/data-plane',
    'base/errors',
    'base/identity',
    'base/telemetry',
    'base/wire',
    'coordinator/dispatch',
    'coordinator/handoff',
    'coordinator/kv-index',
    'coordinator/pod-handoff',
    'coordinator/registry',
  ],
  'coordinator/planner': [
    'base/config',
    'base/errors',
    'base/telemetry',
    'base/wire',
    'coordinator/dispatch',
    'coordinator/registry',
  ],
  'coordinator/pod-handoff': [
    'base/config',
    'base/errors',
    'base/telemetry',
    'coordinator/dispatch',
    'coordinator/registry',
  ],
  'coordinator/endpoint-picker': [
    'base/config',
    'base/errors',
    'base/telemetry',
    'base/wire',
    'coordinator/dispatch',
    'coordinator/kv-index',
    'coordinator/pod-handoff',
    'coordinator/registry',
  ],
  'coordinator/coordinator': [
    'base/config',
    'base/errors',
    'base/identity',
    'base/telemetry',
    'base/wire',
    'coordinator/api-server',
    'coordinator/dispatch',
    'coordinator/endpoint-picker',
    'coordinator/handoff',
    'coordinator/kv-index',
    'coordinator/planner',
    'coordinator/pod-handoff',
    'coordinator/registry',
    'coordinator/routing',
  ],
  cli: ['base/config', 'base/data-plane', 'base/errors', 'base/telemetry', 'engine/model'],
  'services/cache-node': ['base/config', 'base/telemetry', 'store/node'],
  'services/coordinator': ['base/config', 'base/telemetry', 'coordinator/coordinator'],
  'services/engine-worker': ['base/config', 'base/telemetry', 'connector/session-client', 'engine/worker'],
};

const rootPackage = workspace('.');
const rooms = [...packages, ...services];
const whole: Tree = {
  rooms: [...rooms, workspace('bench'), workspace('test')],
  files: new Map(
    ['packages', 'services', 'bench', 'test', 'test/vectors']
      .flatMap((folder) => filesBelow(folder, ['.ts']))
      .map((path) => [path, read(path)]),
  ),
};

describe('the tree', () => {
  it('has no arrow upward, and none between engine, store and coordinator', () => {
    expect(wrongWings(whole), 'move the code to the wing that may know both, or take it as an argument').toEqual([]);
  });

  it('has the arrows of the table between rooms, and no others', () => {
    expect(Object.keys(allowed).sort(), 'a room is missing in the table of this test, or gone').toEqual(
      rooms.map(({ folder }) => folder.replace(/^packages\//, '')).sort(),
    );
    expect(wrongRooms(whole, allowed)).toEqual([]);
  });

  it('enters rooms by their entries only', () => {
    expect(pastEntries(whole), 'export it (for tests: from src/testing/index.ts) and import it by name').toEqual([]);
  });

  it('passes nothing on at an entry that nobody outside of the room imports', () => {
    expect(unusedValues(whole), 'take it out of the index; tests of the room import its file').toEqual([]);
  });

  it('has no circle of files', () => {
    expect(circles(whole), 'move what both need into a file below them; types count').toEqual([]);
  });
});

describe('a planted fault is found', () => {
  const room = (folder: string, dependencies: readonly string[] = []): Workspace => ({
    folder,
    name: `@kvtier/${folder.split('/').at(-1)}`,
    dependencies: Object.fromEntries(dependencies.map((name) => [name, '0.1.0'])),
    devDependencies: {},
    exports: { '.': './src/index.ts', './testing': './src/testing/index.ts' },
  });
  const rooms = ['base/wire', 'engine/model', 'engine/worker', 'store/tiers', 'coordinator/api-server'].map((folder) =>
    room(`packages/${folder}`),
  );
  const tree = (files: Readonly<Record<string, string>>): Tree => ({ rooms, files: new Map(Object.entries(files)) });

  it.each([
    ['upward', 'packages/base/wire/src/a.ts', '@kvtier/model'],
    ['from engine to store', 'packages/engine/model/src/a.ts', '@kvtier/tiers'],
    ['from store to coordinator', 'packages/store/tiers/src/a.ts', '@kvtier/api-server'],
    [
      'from coordinator to engine, in a test',
      'packages/coordinator/api-server/src/a.test.ts',
      '@kvtier/worker/testing',
    ],
  ])('an arrow %s', (_, path, name) => {
    expect(wrongWings(tree({ [path]: `import { x } from '${name}';\n` }))).toEqual([`${path}: ${name}`]);
  });

  it('an arrow between rooms that the table does not have, and one that nobody uses', () => {
    const files = { 'packages/engine/worker/src/a.ts': "import type { x } from '@kvtier/wire';\n" };
    expect(wrongRooms(tree(files), { 'engine/worker': ['base/wire'] })).toEqual([]);
    expect(wrongRooms(tree(files), { 'engine/worker': ['engine/model'] })).toEqual([
      'packages/engine/worker/src/a.ts: engine/worker may not use base/wire',
      'engine/worker may use engine/model, and does not: take it out of the table',
    ]);
  });

  it.each([
    ['by a relative path, in a test', 'packages/engine/worker/src/a.test.ts', '../../model/src/rope.ts'],
    ['by a name that is no entry', 'packages/engine/worker/src/a.ts', '@kvtier/model/rope'],
    ['by the entry for tests, in code', 'packages/engine/worker/src/a.ts', '@kvtier/model/testing'],
  ])('a room entered %s', (_, path, specifier) => {
    expect(pastEntries(tree({ [path]: `import { x } from '${specifier}';\n` }))).toEqual([`${path}: ${specifier}`]);
  });

  it('a value of an entry that only its own room imports', () => {
    const files = {
      'packages/engine/model/src/index.ts':
        "export { type A, b, c } from './a.ts';\nexport { d } from './d.ts';\nexport { E } from './generated/e.ts';\n",
      'packages/engine/model/src/a.test.ts': "import { b } from './index.ts';\n",
      'packages/engine/worker/src/a.ts': "import { c } from '@kvtier/model';\n",
      'packages/engine/worker/src/b.test.ts': "const { d } = await import('@kvtier/model');\n",
    };
    expect(unusedValues(tree(files))).toEqual(['packages/engine/model/src/index.ts: b']);
  });

  it('a circle of files, of types alone', () => {
    const files = {
      'packages/engine/model/src/a.ts': "import type { B } from './b.ts';\n",
      'packages/engine/model/src/b.ts': "import { c } from './c.ts';\n",
      'packages/engine/model/src/c.ts': "import {\n  type A,\n} from './a.ts';\n",
    };
    expect(circles(tree(files))).toEqual([Object.keys(files).join(' ↔ ')]);
    expect(circles(tree({ ...files, 'packages/engine/model/src/c.ts': '' }))).toEqual([]);
  });
});

it('every wing has a row', () => {
  expect([...new Set(rooms.map(({ folder }) => wingOf(folder)))].sort()).toEqual(Object.keys(wings).sort());
});

describe.each(rooms.map((one) => [one.folder, one] as const))('%s', (folder, one) => {
  const files = filesBelow(folder, ['.ts']);

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
    expect(undeclared, `add these to ${folder}/package.json (and package-lock.json)`).toEqual([]);
  });

  it('declares nothing that it does not use', () => {
    const used = new Set(files.flatMap(importsOf));
    // Used by CMakeLists.txt and by generated code.
    const elsewhere = new Set(['node-addon-api', 'node-api-headers', '@bufbuild/protobuf']);
    const unused = [...Object.keys(one.dependencies), ...Object.keys(one.devDependencies)].filter(
      (name) => !used.has(name) && !elsewhere.has(name),
    );
    expect(unused, `remove these from ${folder}/package.json (and package-lock.json)`).toEqual([]);
  });
});

it('has no cycle of packages', () => {
  const byName = new Map<string, Workspace>(packages.map((one) => [one.name, one]));
  const done = new Set<string>();
  const visit = (name: string, path: readonly string[]): void => {
    expect(path, `a cycle; move what both need into a package below them`).not.toContain(name);
    if (done.has(name)) return;
    for (const next of Object.keys(byName.get(name)!.dependencies)) if (byName.has(next)) visit(next, [...path, name]);
    done.add(name);
  };
  for (const { name } of packages) visit(name, []);
  expect(done.size).toBe(packages.length);
});

it('pins every package exactly', () => {
  const loose = [rootPackage, ...rooms, workspace('bench'), workspace('test')].flatMap((one) =>
    Object.entries({ ...one.dependencies, ...one.devDependencies })
      .filter(([, version]) => !/^\d+\.\d+\.\d+(-[\w.]+)?$/.test(version))
      .map(([name, version]) => `${one.folder}: ${name} ${version}`),
  );
  expect(loose, 'write the exact version, so that Node 20 never gets another major').toEqual([]);
});
