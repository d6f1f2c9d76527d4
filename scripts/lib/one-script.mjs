/**
 * A program as one script (`.cjs`), named by its content; beside it what its lines are in the sources (`.lines`) and the code that V8 makes of
 * it (`.code`). What is started is a module of two lines that names the script (packages/base/telemetry/src/start-program.ts).
 */
import { spawn } from 'node:child_process';
import { createHash } from 'node:crypto';
import { once } from 'node:events';
import { existsSync, readFileSync } from 'node:fs';
import { dirname, join, relative } from 'node:path';
import { pathToFileURL } from 'node:url';
import { cachedDataVersionTag } from 'node:v8';
import { bundling } from './bundling.mjs';
import { root } from './command.mjs';
import { linesOfOurs } from './source-maps.mjs';

const starter = join(root, 'packages/base/telemetry/src/start-program.ts');
/** V8's flags that services are started with (packages/cli/src/programs.ts, infra/Dockerfile): code is for those that it was made with. */
const flags = [[], ['--min-semi-space-size=32', '--max-semi-space-size=32']];
const keepingMs = 30_000;

/**
 * @param {Record<string, string>} sources program → its source
 * @param {string} folder where the files are to lie
 * @param {import('esbuild').Plugin} plugin
 */
export async function oneScriptEach(sources, folder, plugin) {
  const { build } = await import('esbuild');
  const { splitting, chunkNames, ...alike } = bundling;
  const common = {
    ...alike,
    absWorkingDir: root,
    outdir: folder,
    write: false,
    plugins: [plugin],
    legalComments: 'none',
  };
  const asScripts = { format: 'cjs', outExtension: { '.js': '.cjs' }, sourcemap: 'external', sourcesContent: false };
  const [{ metafile, outputFiles }, start] = await Promise.all([
    build({ ...common, ...asScripts, entryPoints: sources, metafile: true }),
    build({ ...common, entryPoints: [starter] }),
  ]);
  const files = new Map();
  const shared = (contents, end) => {
    const path = join(folder, 'shared', `${createHash('sha256').update(contents).digest('hex').slice(0, 16)}${end}`);
    files.set(path, contents);
    return path;
  };
  const startFile = shared(start.outputFiles[0].contents, '.mjs');
  for (const name of Object.keys(sources)) {
    const textOf = (end) => outputFiles.find(({ path }) => path === join(folder, `${name}${end}`)).text;
    const { imports } = metafile.outputs[relative(root, join(folder, `${name}.cjs`))];
    const wanted = imports.filter(({ external, kind }) => external && kind === 'dynamic-import');
    // A script that V8's kept code is of imports nothing by itself.
    const loads = wanted.reduce(
      (text, { path }) => text.replaceAll(`import("${path}")`, `importing("${path}")`),
      textOf('.cjs'),
    );
    // What CommonJS gives a module; on the script's first line, so that all others stay where the map has them.
    const script = shared(
      `(function (exports, require, module, __filename, __dirname, importing) {${loads}\n})`,
      '.cjs',
    );
    files.set(`${script}.lines`, await linesOfOurs(textOf('.cjs.map'), join(folder, dirname(name)), dirname(script)));
    const from = (path) => JSON.stringify(relative(join(folder, dirname(name)), path));
    const begin = `import { startProgram } from ${from(startFile)};\nstartProgram(new URL(${from(script)}, import.meta.url));\n`;
    files.set(join(folder, `${name}.mjs`), begin);
  }
  return { metafile, files };
}

/** The script that a program's file names, and what begins it. */
function partsOf(program) {
  const [start, script] = [...readFileSync(program, 'utf8').matchAll(/"([^"]+)"/g)].map(([, path]) =>
    join(dirname(program), path),
  );
  return { start, script };
}

/** Of this Node: one that is installed later makes its own. */
export const isCodeKept = (program) => existsSync(`${partsOf(program).script}.${cachedDataVersionTag()}.code`);

/** What V8 has compiled when a program comes to its first wait is nearly all that a start needs. Native modules are loaded then, and so built before. */
export async function keepCode(program, config) {
  const { start, script } = partsOf(program);
  const [module, bundle] = [start, script].map((path) => JSON.stringify(pathToFileURL(path).href));
  const text = `import { keepCode } from ${module};
    keepCode(new URL(${bundle}), ${JSON.stringify(flags)});
    process.kill(process.pid, 'SIGKILL');`; // the program ends where it is
  const child = spawn(process.execPath, ['--input-type=module', '--eval', text], {
    stdio: 'ignore',
    env: { ...process.env, KVTIER_CONFIG: JSON.stringify(config) },
    timeout: keepingMs,
    killSignal: 'SIGKILL',
  });
  await once(child, 'close');
}
