/**
 * Our programs, each as one script below build/programs (one-script.mjs): from their sources, hundreds of files that are read and
 * translated one by one, a service takes a second or two of a CPU to start; from here an eighth of that. Packages are bundled, too, but
 * for those with native parts and those that are loaded when they are wanted; their licences lie beside the programs.
 * `inputs.json` names every source with its size and time, and npm's list of what it installed: who starts a program
 * (packages/cli/src/programs.ts) takes the bundle as long as none has changed, else the sources, so that no build is ever older than
 * what it was made of.
 */
import { existsSync, mkdirSync, readdirSync, readFileSync, renameSync, rmSync, statSync, writeFileSync } from 'node:fs';
import { basename, dirname, join, relative } from 'node:path';
import { pathToFileURL } from 'node:url';
import { licencesOf } from './bundling.mjs';
import { root } from './command.mjs';
import { isCodeKept, keepCode, oneScriptEach } from './one-script.mjs';
import { step } from './progress.mjs';

const folder = join(root, 'build/programs');
const inputsFile = join(folder, 'inputs.json');
/** What else decides the result: npm's list of packages is written anew whenever it installs any. */
const besides = [
  'scripts/lib/programs.mjs',
  'scripts/lib/bundling.mjs',
  'scripts/lib/one-script.mjs',
  'scripts/lib/source-maps.mjs',
  'node_modules/.package-lock.json',
];
/** Program → its source. Threads are programs, too. */
export const programSources = {
  'services/coordinator/main': 'services/coordinator/src/main.ts',
  'services/engine-worker/main': 'services/engine-worker/src/main.ts',
  'services/cache-node/main': 'services/cache-node/src/main.ts',
  'cli/kvtier': 'packages/cli/src/kvtier.ts',
  'threads/text-thread': 'packages/coordinator/api-server/src/text-thread.ts',
};
/** Configurations by which a program does more of its start before its first wait. */
const begins = {
  'services/coordinator/main': { port: 0, discovery: { kind: 'static', workers: [] } },
};
/** Of shared pieces that no program names any more: one that runs may still want to load them. */
const keepMs = 24 * 3_600_000;

/** Size and time to the microsecond. */
const stateOf = (path) => {
  const { size, mtimeMs } = statSync(path);
  return `${size} ${mtimeMs}`;
};

export function programsAreCurrent() {
  try {
    const { root: of, inputs } = JSON.parse(readFileSync(inputsFile, 'utf8'));
    return of === root && Object.entries(inputs).every(([path, state]) => stateOf(join(root, path)) === state);
  } catch {
    return false; // none yet, or a source has gone
  }
}

/** What vitest runs before slow tests, so that they start what the sources say now. */
export async function setup() {
  await ensurePrograms();
  await ensureCode();
}

export async function ensurePrograms() {
  if (programsAreCurrent()) return;
  await step('bundle the programs', async () => {
    const before = new Map(besides.map((path) => [join(root, path), stateOf(join(root, path))]));
    const { metafile, files } = await oneScriptEach(programSources, folder, ourPlaces(before));
    for (const [path, contents] of files) {
      mkdirSync(dirname(path), { recursive: true });
      writeFileSync(`${path}.new`, contents);
    }
    for (const path of files.keys()) renameSync(`${path}.new`, path); // who starts meanwhile sees the old one or the new one
    writeFileSync(join(folder, 'licences-of-packages.txt'), licencesOf(metafile));
    const inputs = Object.fromEntries([...before].map(([path, state]) => [relative(root, path), state]));
    writeFileSync(`${inputsFile}.new`, JSON.stringify({ root, inputs }));
    renameSync(`${inputsFile}.new`, inputsFile);
    removeOld([...files.keys()].map((path) => basename(path)));
  });
}

/** V8's code of the programs that lack it, for this Node. A start does without, too, and takes half as long again. */
export async function ensureCode() {
  const programs = Object.keys(programSources).map((name) => [name, join(folder, `${name}.mjs`)]);
  const lacking = programs.filter(([, file]) => !isCodeKept(file));
  if (lacking.length === 0) return;
  await step("keep the programs' compiled code", () =>
    Promise.all(lacking.map(([name, file]) => keepCode(file, begins[name] ?? {}))),
  );
}

/** @param {Map<string, string>} before filled with the state of each source from before it is read */
export const ourPlaces = (before) => ({
  name: 'our places',
  setup({ onLoad, onResolve }) {
    // What is loaded when it is wanted (the clients of S3 and Kubernetes, larger than all the rest) is read from where it lies: of a
    // package in CommonJS esbuild gives whoever loads it so no names.
    onResolve({ filter: /^[^./]/ }, ({ path, kind, importer }) =>
      kind === 'dynamic-import' && !path.startsWith('@kvtier/') && !importer.includes('/node_modules/')
        ? { path, external: true }
        : undefined,
    );
    onLoad({ filter: /\.ts$/ }, ({ path }) => {
      before.set(path, stateOf(path));
      // What a source finds beside itself (models, native modules) it still finds; of threads it gets our bundle.
      const contents = readFileSync(path, 'utf8')
        .replace(/new URL\('\.\/([\w-]+)\.ts', import\.meta\.url\)/g, (whole, name) =>
          `threads/${name}` in programSources ? `new URL(${quoted(join(folder, `threads/${name}.mjs`))})` : whole,
        )
        .replace(/import\.meta\.url/g, quoted(path));
      return { contents, loader: 'ts' };
    });
  },
});

const quoted = (path) => JSON.stringify(pathToFileURL(path).href);

function removeOld(current) {
  const shared = join(folder, 'shared');
  if (!existsSync(shared)) return;
  for (const name of readdirSync(shared)) {
    const path = join(shared, name);
    const isCurrent = current.some((file) => name.startsWith(file));
    if (!isCurrent && Date.now() - statSync(path).mtimeMs > keepMs) rmSync(path);
  }
}
