/**
 * Programs that tests start, as bundles below build/test-programs: from its sources, through tsx, a program takes half a second of a CPU to start,
 * each time; as one file a tenth. Made by the test that starts it, of what the sources are then.
 */
import { createHash } from 'node:crypto';
import {
  existsSync,
  mkdirSync,
  mkdtempSync,
  readdirSync,
  renameSync,
  rmSync,
  statSync,
  utimesSync,
  writeFileSync,
} from 'node:fs';
import { basename, dirname, join, relative } from 'node:path';
import { fileURLToPath } from 'node:url';
import { bundling, commonJs } from './bundling.mjs';
import { root } from './command.mjs';
import { ourPlaces } from './programs.mjs';

const folder = join(root, 'build/test-programs');
/** Of folders that nobody has asked for since. */
const keepMs = 24 * 3_600_000;

/**
 * Files of JavaScript that do what these sources do, for `node FILE` or an import. What they share they have once, as modules do; what another call
 * makes is another module.
 * @param {URL[]} sources
 * @returns {Promise<string[]>} a file for each, in the same order
 */
export async function bundled(...sources) {
  const { build } = await import('esbuild');
  const names = sources.map((source, index) => `${index}-${basename(fileURLToPath(source), '.ts')}`);
  const { outputFiles } = await build({
    ...bundling,
    absWorkingDir: root,
    entryPoints: Object.fromEntries(sources.map((source, index) => [names[index], fileURLToPath(source)])),
    outdir: folder,
    write: false,
    banner: { js: commonJs },
    plugins: [ourPlaces(new Map())],
  });
  const hash = createHash('sha256');
  for (const { path, contents } of outputFiles) hash.update(`${relative(folder, path)}\n`).update(contents);
  const made = join(folder, hash.digest('hex').slice(0, 32));
  if (existsSync(made)) {
    utimesSync(made, new Date(), new Date());
  } else {
    mkdirSync(folder, { recursive: true });
    removeOld();
    const making = mkdtempSync(join(folder, 'new-'));
    for (const { path, contents } of outputFiles) {
      const file = join(making, relative(folder, path));
      mkdirSync(dirname(file), { recursive: true });
      writeFileSync(file, contents);
    }
    try {
      renameSync(making, made);
    } catch (error) {
      if (!existsSync(made)) throw error;
      rmSync(making, { recursive: true }); // another process has made the same
    }
  }
  return names.map((name) => join(made, `${name}.mjs`));
}

function removeOld() {
  for (const name of readdirSync(folder)) {
    const path = join(folder, name);
    const state = statSync(path, { throwIfNoEntry: false }); // absent: another process has removed it
    if (state !== undefined && Date.now() - state.mtimeMs > keepMs) rmSync(path, { recursive: true, force: true });
  }
}
