/**
 * npm run gpu:bundle [-- --architectures LIST]: one archive that a bare machine with an NVIDIA driver runs, without a network:
 * `kernel_check`, `runtime_check` and `kernel_bench` for any x86-64-v3 CPU, their sources, the whole system with this machine's Node
 * (lib/packed-system.mjs), the connector in Python with libkvtier, and `gpu-session.sh`, which gives every figure in stages. Then unpacks it into an empty folder and runs it there: on a machine without a GPU it has to say so, and end with 3.
 * Where nvcc is missing the archive holds sources only, to be compiled by its first stage. LIST: as CMake's (default 90a-real).
 */
import { execFileSync, spawnSync } from 'node:child_process';
import { copyFileSync, cpSync, existsSync, mkdirSync, mkdtempSync, rmSync, statSync, writeFileSync } from 'node:fs';
import { availableParallelism, tmpdir } from 'node:os';
import { dirname, join } from 'node:path';
import { command, onPath, root, SetupError, script } from './lib/command.mjs';
import { hasGpu, hasNvcc } from './lib/native.mjs';
import { packSystem } from './lib/packed-system.mjs';
import { step } from './lib/progress.mjs';
import { checkoutBytes, misfit } from './lib/travelling.mjs';
import { importTypeScript } from './lib/typescript.mjs';

const cuda = 'packages/engine/cuda';
const sources = [cuda, 'packages/engine/executor/cc', 'packages/base/data-plane/cc'];
/** Of the packed system. */
const modules = { 'data-plane': 'packages/base/data-plane/cc', executor: 'packages/engine/executor/cc' };
const programs = ['kernel_check', 'runtime_check', 'kernel_bench'];
/** Of stage connector: the package as it is installed, with libkvtier beside it. */
const python = 'packages/connector/python/src';
const work = join(root, 'build/gpu-bundle');
const folder = join(work, 'kvtier-gpu');
const archive = join(work, 'kvtier-gpu.tar.xz');
const noGpu = 3;

function architecturesOf(args) {
  if (args.length === 0) return '90a-real';
  if (args.length === 2 && args[0] === '--architectures' && /^[\w;-]+$/.test(args[1])) return args[1];
  throw new SetupError(`${args.join(' ')}: unknown options; allowed: --architectures "80-real;90a-real"`);
}

/** For any x86-64-v3 CPU, below `work`. */
async function buildIn(source, name, targets, options, note) {
  const target = join(work, name);
  const carried = ['-DCMAKE_BUILD_TYPE=Release', '-DKVTIER_CPU=x86-64-v3', '-DKVTIER_PORTABLE=ON', ...options];
  await command('cmake', ['-S', join(root, source), '-B', target, '-G', 'Ninja', ...carried], { note });
  await command('ninja', ['-j', String(availableParallelism()), '-C', target, ...targets], { note });
  return target;
}

async function compile(architectures, note) {
  const targets = [...programs, 'kvtier_cuda_module'];
  const build = await buildIn(cuda, 'build', targets, [`-DCMAKE_CUDA_ARCHITECTURES=${architectures}`], note);
  mkdirSync(join(folder, 'bin'));
  for (const name of programs) {
    copyFileSync(join(build, name), join(folder, 'bin', name));
    await command('strip', [join(folder, 'bin', name)]);
  }
}

/** Place below the system's `build/` → stripped module. */
async function compileModules(note) {
  const built = {};
  for (const [name, source] of Object.entries(modules)) {
    const file = `kvtier_${name.replace('-', '_')}.node`;
    built[`${name}/${file}`] = join(await buildIn(source, name, [], [], note), file);
  }
  if (hasNvcc()) built['cuda/kvtier_cuda.node'] = join(work, 'build/kvtier_cuda.node');
  for (const file of Object.values(built)) await command('strip', ['--strip-unneeded', file]);
  return built;
}

function copySources() {
  const files = execFileSync('git', ['ls-files', '-z', ...sources], { cwd: root, encoding: 'utf8' }).split('\0');
  for (const file of files.filter((name) => name !== '' && existsSync(join(root, name)))) {
    const target = join(folder, 'sources', file);
    mkdirSync(dirname(target), { recursive: true });
    copyFileSync(join(root, file), target);
  }
}

async function packConnector(note) {
  const target = join(folder, 'connector/kvtier');
  const ours = (path) => !path.includes('__pycache__') && !path.endsWith('.so');
  cpSync(join(root, python, 'kvtier'), target, { recursive: true, filter: ours });
  const library = join(await buildIn('packages/connector/native/cc', 'client', [], [], note), 'libkvtier.so');
  copyFileSync(library, join(target, 'libkvtier.so'));
  await command('strip', ['--strip-unneeded', join(target, 'libkvtier.so')]);
}

/** As it will run: in an empty folder, with nothing of this checkout in its environment. */
function dryRun() {
  const empty = mkdtempSync(join(tmpdir(), 'kvtier-gpu-'));
  try {
    execFileSync('tar', ['-xJf', archive, '-C', empty]);
    const args = hasGpu() ? ['probe'] : [];
    const run = spawnSync(join(empty, 'kvtier-gpu/gpu-session.sh'), args, {
      cwd: empty,
      encoding: 'utf8',
      env: { PATH: '/usr/local/bin:/usr/bin:/bin', HOME: empty },
      timeout: 300_000,
    });
    const said = `${run.stdout}${run.stderr}`.trim();
    if (run.status !== (hasGpu() ? 0 : noGpu)) {
      throw new SetupError(`${archive}: its dry run ended with ${run.status ?? run.signal}\n${said}`);
    }
    return said;
  } finally {
    rmSync(empty, { recursive: true });
  }
}

await script(async (args) => {
  const architectures = architecturesOf(args);
  for (const program of ['cmake', 'ninja', 'git', 'strip', 'xz']) {
    if (!onPath(program)) throw new SetupError(`${program} was not found; install it, then run this again`);
  }
  rmSync(folder, { recursive: true, force: true });
  mkdirSync(folder, { recursive: true });
  if (hasNvcc()) await step('compile for a GPU', (note) => compile(architectures, note));
  else
    process.stdout.write('nvcc was not found: the archive holds sources, compiled on the GPU machine by stage build\n');
  copySources();
  copyFileSync(join(root, cuda, 'gpu-session.sh'), join(folder, 'gpu-session.sh'));
  copyFileSync(join(root, cuda, 'verdicts.awk'), join(folder, 'verdicts.awk'));
  for (const name of ['torch_attention.py', 'connector_gpu.py']) {
    copyFileSync(join(root, cuda, 'checks', name), join(folder, name));
  }
  const { commitOf } = await importTypeScript('bench/record.ts');
  writeFileSync(join(folder, 'commit'), `${commitOf(root)}\n`); // what is measured there is recorded as of this
  await step('compile libkvtier', packConnector);
  const native = await step('compile the packed system', compileModules);
  await step('pack Node and the system', () => packSystem(join(folder, 'system'), native));
  await step('compress', () => command('tar', ['-I', 'xz -9', '-cf', archive, '-C', work, 'kvtier-gpu']));
  const { size } = statSync(archive);
  const tooMuch = misfit(archive, size, checkoutBytes());
  if (tooMuch !== '') throw new SetupError(tooMuch);
  const said = await step('dry run in an empty folder', async () => dryRun());
  process.stdout.write(`${said}\n${archive}: ${(size / 1024 / 1024).toFixed(1)} MiB\n`);
});
