/**
 * What bundles of our programs have in common: which packages are in them, how those in CommonJS find what they expect, and their
 * licences, which go along with them.
 */
import { readdirSync, readFileSync } from 'node:fs';
import { join } from 'node:path';
import { root } from './command.mjs';

/** Packages with native parts, and what they read beside the files that Node loads. They stay below node_modules. */
export const nativePackages = { zeromq: ['build/manifest.json'], 'lz4-napi': [] };

/** Options of esbuild. `tsx` runs sources where there is no bundle; `msgpackr-extract` is native, and msgpackr does without. */
export const bundling = {
  bundle: true,
  splitting: true,
  format: 'esm',
  platform: 'node',
  target: 'node20',
  outExtension: { '.js': '.mjs' },
  chunkNames: 'shared/[hash]',
  external: [...Object.keys(nativePackages), 'tsx', 'msgpackr-extract'],
  logLevel: 'silent',
};

/** What each bundle begins with: packages in CommonJS expect these. */
export const commonJs = [
  "import { createRequire as kvtierRequire } from 'node:module';",
  'const require = kvtierRequire(import.meta.url);',
  'const __dirname = import.meta.dirname;',
  'const __filename = import.meta.filename;',
].join('\n');

const packageOf = (path) => /^(.*node_modules\/(?:@[^/]+\/)?[^/]+)\//.exec(path)?.[1];

/** The licences of all packages of which something is in the bundles. */
export function licencesOf({ outputs }) {
  const used = Object.values(outputs).flatMap(({ inputs }) =>
    Object.entries(inputs).flatMap(([path, { bytesInOutput }]) => (bytesInOutput > 0 ? [packageOf(path)] : [])),
  );
  const folders = [...new Set(used)].filter((folder) => folder !== undefined).sort();
  const texts = folders.map((folder) => {
    const { name, version, license } = JSON.parse(readFileSync(join(root, folder, 'package.json'), 'utf8'));
    const files = readdirSync(join(root, folder)).filter((file) => /^(licen[cs]e|copying|notice)/i.test(file));
    const said = files.map((file) => readFileSync(join(root, folder, file), 'utf8').trim());
    return [`${name} ${version}: ${license}`, ...said].join('\n\n');
  });
  return `${texts.join(`\n\n${'-'.repeat(80)}\n\n`)}\n`;
}
