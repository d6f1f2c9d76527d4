/**
 * The whole system in one folder that can be carried to a machine without Node and without npm's packages:
 *
 *   node                      this machine's own, without its debugging symbols
 *   lib/                      the C++ runtime that it needs, for machines that have none
 *   build/programs/           services, threads and what measures them: our code and all packages in pure JavaScript, bundled
 *   build/MODULE/*.node       native modules, as given
 *   node_modules/             of packages with native parts, only what this machine's Node loads
 *   models/demo/model/        its tokenizer, which made-up models have, too; its weights would be an eighth of the archive
 *
 * Code finds what lies beside it (`import.meta.url`) at the same place below this folder as below a checkout, wherever it is unpacked.
 */
import { execFileSync } from 'node:child_process';
import { copyFileSync, existsSync, mkdirSync, readdirSync, readFileSync, realpathSync, writeFileSync } from 'node:fs';
import { dirname, join, relative } from 'node:path';
import { bundling, commonJs, licencesOf, nativePackages } from './bundling.mjs';
import { root, SetupError } from './command.mjs';
import { programSources } from './programs.mjs';

const sources = { ...programSources, 'bench/gpu-system': 'bench/gpu-system/main.ts' };
const demo = 'models/demo/model';

/**
 * @param {string} folder made here
 * @param {Record<string, string>} modules of this system, place below `build/` → file that is here
 */
export async function packSystem(folder, modules) {
  mkdirSync(join(folder, 'build'), { recursive: true });
  await bundle(folder);
  for (const [place, file] of Object.entries(modules)) copyTo(file, join(folder, 'build', place));
  for (const [name, read] of Object.entries(nativePackages)) copyPackage(folder, name, read);
  for (const file of readdirSync(join(root, demo))) {
    if (!file.endsWith('.safetensors')) copyTo(join(root, demo, file), join(folder, demo, file));
  }
  copyTo(join(root, 'models/demo/words.json'), join(folder, 'models/demo/words.json')); // the command line reads it as it starts
  copyNode(folder);
}

async function bundle(folder) {
  const { build } = await import('esbuild');
  const { metafile } = await build({
    ...bundling,
    absWorkingDir: root,
    entryPoints: sources,
    outdir: join(folder, 'build/programs'),
    minifyWhitespace: true,
    metafile: true,
    banner: {
      js: [
        "const kvtierRoot = import.meta.url.slice(0, import.meta.url.lastIndexOf('/build/programs/') + 1);",
        commonJs,
      ].join('\n'),
    },
    plugins: [ourPlaces],
  });
  writeFileSync(join(folder, 'build/programs/licences-of-packages.txt'), licencesOf(metafile));
  writeFileSync(join(folder, 'build/programs/inputs.json'), JSON.stringify({ root: null, inputs: {} }));
}

const ourPlaces = {
  name: 'our places',
  setup({ onLoad }) {
    onLoad({ filter: /\.ts$/ }, ({ path }) => {
      const place = (below) => `new URL(${JSON.stringify(below)}, kvtierRoot)`;
      const contents = readFileSync(path, 'utf8')
        .replace(/new URL\('\.\/([\w-]+)\.ts', import\.meta\.url\)/g, (whole, name) =>
          `threads/${name}` in sources ? place(`build/programs/threads/${name}.mjs`) : whole,
        )
        .replace(/import\.meta\.url/g, `${place(relative(root, path))}.href`);
      return { contents, loader: 'ts' };
    });
  },
};

function copyTo(file, target) {
  mkdirSync(dirname(target), { recursive: true });
  copyFileSync(file, target);
}

/** The files that are loaded when the package is, by this Node on this machine, with those of the packages it needs. */
function copyPackage(folder, name, read) {
  for (const file of read) copyTo(join(root, 'node_modules', name, file), join(folder, 'node_modules', name, file));
  const script = `require(${JSON.stringify(name)}); process.stdout.write(JSON.stringify(Object.keys(require.cache)))`;
  const loaded = JSON.parse(execFileSync(process.execPath, ['-e', script], { cwd: root, encoding: 'utf8' }));
  for (const file of loaded) {
    const place = relative(realpathSync(root), file);
    if (!place.startsWith('node_modules/')) throw new SetupError(`${name}: ${file} lies outside of node_modules`);
    copyTo(file, join(folder, place));
    const packageFolder = /^(.*node_modules\/(?:@[^/]+\/)?[^/]+)\//.exec(place)[1];
    copyTo(join(root, packageFolder, 'package.json'), join(folder, packageFolder, 'package.json'));
    for (const extra of readdirSync(join(root, packageFolder)).filter((one) => /^licen[cs]e/i.test(one))) {
      copyTo(join(root, packageFolder, extra), join(folder, packageFolder, extra));
    }
  }
}

function copyNode(folder) {
  const target = join(folder, 'node');
  execFileSync('strip', ['-o', target, process.execPath]);
  execFileSync(target, ['--version']); // a Node that does not start any more has nothing to do in there
  const needed = execFileSync('ldd', [process.execPath], { encoding: 'utf8' });
  for (const library of ['libstdc++.so.6', 'libgcc_s.so.1']) {
    const path = new RegExp(`${library.replaceAll('+', '\\+')} => (\\S+)`).exec(needed)?.[1];
    if (path !== undefined && existsSync(path)) copyTo(realpathSync(path), join(folder, 'lib', library));
  }
}
