/**
 * Our programs, each as one file of JavaScript below build/programs: from their sources, hundreds of files that are read and
 * translated one by one, a service takes a second or two of a CPU to start; from here a third to a fifth of that. Only our own
 * code is bundled. `inputs.json` names every source with its size and time: who starts a program (packages/cli/src/programs.ts)
 * takes the bundle as long as none has changed, else the sources, so that no build is ever older than what it was made of.
 */
import { existsSync, mkdirSync, readdirSync, readFileSync, renameSync, rmSync, statSync, writeFileSync } from 'node:fs';
import { join } from 'node:path';
import { pathToFileURL } from 'node:url';
import { root } from './command.mjs';
import { step } from './progress.mjs';

const folder = join(root, 'build/programs');
const inputsFile = join(folder, 'inputs.json');
/** Program → its source. Threads are programs, too. */
export const programSources = {
  'services/coordinator/main': 'services/coordinator/src/main.ts',
  'services/engine-worker/main': 'services/engine-worker/src/main.ts',
  'services/cache-node/main': 'services/cache-node/src/main.ts',
  'cli/kvtier': 'packages/cli/src/kvtier.ts',
  'threads/text-thread': 'packages/coordinator/api-server/src/text-thread.ts',
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
export { ensurePrograms as setup };

export async function ensurePrograms() {
  if (programsAreCurrent()) return;
  await step('bundle the programs', async () => {
    const { build } = await import('esbuild');
    const before = new Map();
    const { metafile, outputFiles } = await build({
      absWorkingDir: root,
      entryPoints: Object.fromEntries(Object.entries(programSources).map(([name, path]) => [name, path])),
      outdir: folder,
      bundle: true,
      splitting: true,
      format: 'esm',
      platform: 'node',
      target: 'node20',
      sourcemap: 'linked',
      sourcesContent: false,
      outExtension: { '.js': '.mjs' },
      chunkNames: 'shared/[hash]',
      metafile: true,
      write: false,
      logLevel: 'silent',
      plugins: [ourCodeOnly(before)],
    });
    mkdirSync(folder, { recursive: true });
    for (const { path, contents } of outputFiles) {
      mkdirSync(join(path, '..'), { recursive: true });
      writeFileSync(`${path}.new`, contents);
    }
    for (const { path } of outputFiles) renameSync(`${path}.new`, path); // who starts meanwhile sees the old one or the new one
    const inputs = Object.fromEntries(Object.keys(metafile.inputs).map((path) => [path, before.get(join(root, path))]));
    writeFileSync(`${inputsFile}.new`, JSON.stringify({ root, inputs }));
    renameSync(`${inputsFile}.new`, inputsFile);
    removeOld(new Set(outputFiles.map(({ path }) => path)));
  });
}

/** @param {Map<string, string>} before filled with the state of each source from before it is read */
const ourCodeOnly = (before) => ({
  name: 'our code only',
  setup({ onLoad, onResolve }) {
    onResolve({ filter: /^[^./]/ }, ({ path, kind }) =>
      kind === 'entry-point' || path.startsWith('@kvtier/') ? undefined : { path, external: true },
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
    if (!current.has(path) && Date.now() - statSync(path).mtimeMs > keepMs) rmSync(path);
  }
}
