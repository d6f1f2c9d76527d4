/**
 * Native modules: built where they run, for this machine's CPU; `KVTIER_CPU` names another one, for images that run elsewhere. A stamp
 * over everything that decides the result (sources, headers they share, CPU flags, compilers, place) makes the second run free.
 */
import { spawnSync } from 'node:child_process';
import { createHash } from 'node:crypto';
import { existsSync, mkdirSync, readdirSync, readFileSync, rmSync, writeFileSync } from 'node:fs';
import { availableParallelism } from 'node:os';
import { join, relative } from 'node:path';
import { command, onPath, root } from './command.mjs';
import { step } from './progress.mjs';
import { keepPtxas, kernelSources, ptxasFile } from './ptxas.mjs';

/** The executor includes headers of the data plane: both folders count for both. */
const sources = ['packages/base/data-plane/cc', 'packages/engine/executor/cc'];
const withCuda = [...sources, 'packages/engine/cuda'];

/** As g++ names it: what `-march` takes. */
const cpuName = process.env.KVTIER_CPU || 'native';

export const hasNvcc = () => onPath('nvcc');
export const hasGpu = () => existsSync('/dev/nvidia0') || onPath('nvidia-smi');

const emulated = {
  source: 'packages/engine/cuda',
  build: 'build/cuda-emulated',
  options: ['-DKVTIER_EMULATED=ON'],
  sources: withCuda,
};

/**
 * `part`: what `setup` is asked for; `files`: what the build must leave; `targets`: of it, default all; `ahead`: those of its targets that need no npm
 * packages; `anyCpu`: it runs on every x86-64; `said`: where it leaves what ptxas said of kernels, and in which file several of them were compiled `together`.
 */
const modules = [
  {
    part: 'native',
    name: 'native data plane',
    source: 'packages/base/data-plane/cc',
    build: 'build/data-plane',
    files: ['kvtier_data_plane.node'],
    sources,
  },
  {
    part: 'native',
    name: 'native executor',
    source: 'packages/engine/executor/cc',
    build: 'build/executor',
    files: ['kvtier_executor.node'],
    sources,
  },
  {
    part: 'native',
    name: 'client library of other engines',
    source: 'packages/connector/native/cc',
    build: 'build/client',
    anyCpu: true,
    files: ['libkvtier.so'],
    sources: [
      'packages/base/data-plane/cc',
      'packages/connector/native/cc',
      ...['gpu', 'kernels', 'transfer'].map((part) => `packages/engine/cuda/${part}`),
    ],
  },
  {
    ...emulated,
    part: 'cuda-emulated',
    name: 'CUDA kernels for the CPU',
    targets: ['kvtier_cuda_emulated', 'standin_cuda'],
    files: ['libstandin_cuda.so', 'kvtier_cuda_emulated.node'],
    ahead: ['kvtier_cuda_core', 'kvtier_cuda_cpu', 'kvtier_cuda_emulator', 'standin_cuda'],
  },
  {
    ...emulated,
    part: 'cuda-checks',
    name: 'CUDA kernels for the CPU, and their checks',
    files: ['kernel_check', 'runtime_check', 'kernel_bench', 'libstandin_cuda.so', 'kvtier_cuda_emulated.node'],
  },
  {
    part: 'cuda',
    name: 'CUDA backend',
    source: 'packages/engine/cuda',
    build: 'build/cuda',
    // Without a GPU it is only to compile and link: one architecture of the three shows that, and the smallest program that has all of it but
    // checks, which the emulator compiles. A build type of our own: host code is not optimised, device code where what ptxas says of it is wanted.
    options: hasGpu()
      ? ['-UCMAKE_CUDA_ARCHITECTURES', '-DCMAKE_BUILD_TYPE=Release']
      : ['-DCMAKE_CUDA_ARCHITECTURES=90a-real', '-DCMAKE_BUILD_TYPE=Check'],
    said: hasGpu()
      ? undefined
      : { folder: 'CMakeFiles/kvtier_cuda_core.dir', together: 'small.cu', architecture: 'sm_90a' },
    targets: hasGpu() ? [] : ['runtime_check'],
    files: ['runtime_check', ...(hasGpu() ? ['kernel_check', 'kernel_bench', 'kvtier_cuda.node'] : [])],
    sources: withCuda,
  },
];

/**
 * The modules of these parts. `native` brings the CUDA backend with it where there is a GPU; where there is no nvcc, no part
 * does.
 */
function modulesOf(parts) {
  const cuda = (parts.includes('cuda') || (parts.includes('native') && hasGpu())) && hasNvcc();
  return modules.filter(({ part }) => (part === 'cuda' ? cuda : parts.includes(part)));
}

function filesBelow(folder) {
  if (!existsSync(folder)) return [];
  return readdirSync(folder, { withFileTypes: true })
    .sort((a, b) => (a.name < b.name ? -1 : 1))
    .flatMap((entry) => {
      const path = join(folder, entry.name);
      if (entry.isDirectory()) return filesBelow(path);
      return /\.(cc|cpp|h|hpp|cu|cuh|cmake|map|ptx)$|^CMakeLists\.txt$/.test(entry.name) ? [path] : [];
    });
}

function cpu() {
  if (cpuName !== 'native') return cpuName;
  try {
    const info = readFileSync('/proc/cpuinfo', 'utf8');
    return /^(flags|Features)\s*:.*$/m.exec(info)?.[0] ?? '';
  } catch {
    return process.arch;
  }
}

const versionOf = (compiler) => spawnSync(compiler, ['--version'], { encoding: 'utf8' }).stdout ?? '';

function fingerprint(module) {
  const hash = createHash('sha256');
  hash.update(`${root}\n${cpu()}\n${process.env.CXX ?? ''}\n`);
  hash.update(versionOf(process.env.CXX ?? 'g++'));
  if (module.part === 'cuda') hash.update(`${versionOf('nvcc')}${module.options}`);
  for (const path of module.sources.flatMap((folder) => filesBelow(join(root, folder)))) {
    hash.update(`${relative(root, path)}\n`).update(readFileSync(path));
  }
  return hash.digest('hex');
}

const stampOf = (module) => join(root, module.build, `.kvtier-stamp-${module.part}`);

function isCurrent(module, print) {
  if (!module.files.every((file) => existsSync(join(root, module.build, file))) || !existsSync(stampOf(module)))
    return false;
  return readFileSync(stampOf(module), 'utf8') === print;
}

/** @param {readonly string[]} parts of `native`, `cuda-emulated` or, with all of it, `cuda-checks`, `cuda` */
export function nativeIsCurrent(parts) {
  return modulesOf(parts).every((module) => isCurrent(module, fingerprint(module)));
}

const jobs = String(availableParallelism());
const halfOfJobs = String(Math.ceil(availableParallelism() / 2));
const atLowestPriority = ['nice', '-n', '19', 'ninja', '-j', jobs];

/**
 * Begins with what needs no npm packages, while these are fetched. Without a word: what fails here fails again, and tells it, in
 * `ensureNative`. Resolves when it has ended.
 * @param {readonly string[]} parts
 */
export async function buildAhead(parts) {
  const modules = modulesOf(parts).filter((module) => module.ahead && !isCurrent(module, fingerprint(module)));
  for (const module of modules)
    await build({ ...module, targets: module.ahead }, () => {}, atLowestPriority).catch(() => {});
}

/**
 * Two at a time, each with half of the cores: what begins a build (headers that are compiled first) and what ends it (the linker) has no use for
 * more than one.
 * @param {readonly string[]} parts of `native`, `cuda-emulated` or, with all of it, `cuda-checks`, `cuda`
 * @param {Promise<void>} ahead what `buildAhead` has begun with
 */
export async function ensureNative(parts, ahead = Promise.resolve()) {
  // Before the build: a source that changes meanwhile is built again next time.
  const stale = modulesOf(parts)
    .map((module) => ({ module, print: fingerprint(module) }))
    .filter(({ module, print }) => !isCurrent(module, print))
    .sort((a, b) => Number('ahead' in b.module) - Number('ahead' in a.module)); // the longest ones first
  if (stale.length === 0) return;
  const ninja = ['ninja', '-j', stale.length > 1 ? halfOfJobs : jobs];
  await step(`build ${stale.map(({ module }) => module.name).join(', ')}`, async (note) => {
    const builds = async () => {
      for (let next = stale.shift(); next !== undefined; next = stale.shift()) {
        const { module, print } = next;
        if (module.ahead) await ahead;
        await build(module, (text) => note(`${module.name}: ${text}`), ninja);
        writeFileSync(stampOf(module), print);
      }
    };
    // Who fails leaves nothing to begin with, and is told when the other one has ended: no compiler of ours runs on.
    const ends = await Promise.allSettled([builds(), builds()].map((one) => one.finally(() => stale.splice(0))));
    for (const { reason } of ends) if (reason !== undefined) throw reason;
  });
}

/** One line for people where something of the CUDA backend is wanted and cannot be built; '' where all is well. */
export function cudaGap(parts) {
  if (hasNvcc()) return '';
  if (parts.includes('cuda')) {
    return 'nvcc was not found: the CUDA backend is not compiled, its kernels are checked on the CPU only; install the CUDA toolkit 12 or newer';
  }
  if (parts.includes('native') && hasGpu()) {
    return 'a GPU is here, but nvcc was not found: models run on the CPU; install the CUDA toolkit 12 or newer';
  }
  return '';
}

async function build(module, note, [ninja, ...flags] = ['ninja', '-j', jobs]) {
  const target = join(root, module.build);
  const source = join(root, module.source);
  const cache = join(target, 'CMakeCache.txt');
  // CMake refuses a build folder that was made elsewhere (a copied or moved checkout).
  if (existsSync(cache) && !readFileSync(cache, 'utf8').includes(`CMAKE_HOME_DIRECTORY:INTERNAL=${source}\n`)) {
    rmSync(target, { recursive: true });
  }
  mkdirSync(target, { recursive: true });
  // Named by what lies there before the build, as its stamp is.
  const said = module.said ? kernelSources().map((source) => [source, keptAs(source, module.said.architecture)]) : [];
  // Named in any case: CMake keeps what it was told before.
  const options = [...(module.anyCpu ? [] : [`-DKVTIER_CPU=${cpuName}`]), ...(module.options ?? [])];
  await command('cmake', ['-S', source, '-B', target, '-G', 'Ninja', ...options], { note });
  await command(ninja, [...flags, '-C', target, ...(module.targets ?? [])], { note });
  for (const [source, file] of said) {
    const text = saidOf(source, target, module.said);
    if (text !== undefined) keepPtxas(file, text);
  }
}

/** What ptxas said of it, or of all that it was compiled with; undefined: nothing was asked. A file that is in the group now may have left its own. */
function saidOf(source, target, { folder, together }) {
  const group = join(target, together);
  const isIn = existsSync(group) && readFileSync(group, 'utf8').includes(`/kernels/${source}"`);
  const text = join(target, folder, isIn ? `${together}.o.said` : `kernels/${source}.o.said`);
  return existsSync(text) ? readFileSync(text, 'utf8') : undefined;
}

const keptAs = (source, architecture) => ptxasFile(source, architecture, versionOf('nvcc'));
