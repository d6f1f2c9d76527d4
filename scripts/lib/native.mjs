/**
 * Native modules: built where they run, for this machine's CPU. A stamp over everything that decides the result (sources,
 * headers they share, CPU flags, compiler, place) makes the second run free.
 */
import { spawnSync } from 'node:child_process';
import { createHash } from 'node:crypto';
import { existsSync, mkdirSync, readdirSync, readFileSync, rmSync, writeFileSync } from 'node:fs';
import { availableParallelism } from 'node:os';
import { join, relative } from 'node:path';
import { command, root } from './command.mjs';
import { step } from './progress.mjs';

/** The executor includes headers of the data plane: both folders count for both. */
const sourceFolders = ['packages/native/cc', 'packages/executor/cc'];

export const modules = [
  { name: 'native data plane', source: 'packages/native/cc', build: 'build/native', file: 'kvtier_native.node' },
  { name: 'native executor', source: 'packages/executor/cc', build: 'build/executor', file: 'kvtier_executor.node' },
];

function filesBelow(folder) {
  if (!existsSync(folder)) return [];
  return readdirSync(folder, { withFileTypes: true })
    .sort((a, b) => (a.name < b.name ? -1 : 1))
    .flatMap((entry) => {
      const path = join(folder, entry.name);
      if (entry.isDirectory()) return filesBelow(path);
      return /\.(cc|cpp|h|hpp|cu|cuh|cmake)$|^CMakeLists\.txt$/.test(entry.name) ? [path] : [];
    });
}

function cpu() {
  try {
    const info = readFileSync('/proc/cpuinfo', 'utf8');
    return /^(flags|Features)\s*:.*$/m.exec(info)?.[0] ?? '';
  } catch {
    return process.arch;
  }
}

function fingerprint() {
  const hash = createHash('sha256');
  hash.update(`${root}\n${cpu()}\n${process.env.CXX ?? ''}\n`);
  hash.update(spawnSync(process.env.CXX ?? 'g++', ['--version'], { encoding: 'utf8' }).stdout ?? '');
  for (const path of sourceFolders.flatMap((folder) => filesBelow(join(root, folder)))) {
    hash.update(`${relative(root, path)}\n`).update(readFileSync(path));
  }
  return hash.digest('hex');
}

const stampOf = (module) => join(root, module.build, '.kvtier-stamp');

function isCurrent(module, print) {
  if (!existsSync(join(root, module.build, module.file)) || !existsSync(stampOf(module))) return false;
  return readFileSync(stampOf(module), 'utf8') === print;
}

export function nativeIsCurrent() {
  const print = fingerprint();
  return modules.every((module) => isCurrent(module, print));
}

export async function ensureNative() {
  for (const module of modules) {
    const print = fingerprint(); // before the build: a source that changes meanwhile is built again next time
    if (isCurrent(module, print)) continue;
    await step(`build ${module.name}`, (note) => build(module, note));
    writeFileSync(stampOf(module), print);
  }
}

async function build(module, note) {
  const target = join(root, module.build);
  const source = join(root, module.source);
  const cache = join(target, 'CMakeCache.txt');
  // CMake refuses a build folder that was made elsewhere (a copied or moved checkout).
  if (existsSync(cache) && !readFileSync(cache, 'utf8').includes(`CMAKE_HOME_DIRECTORY:INTERNAL=${source}\n`)) {
    rmSync(target, { recursive: true });
  }
  mkdirSync(target, { recursive: true });
  await command('cmake', ['-S', source, '-B', target, '-G', 'Ninja'], { note });
  await command('ninja', ['-C', target, '-j', String(availableParallelism())], { note });
}
