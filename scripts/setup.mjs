/**
 * All set-up that the other commands need: Node's version, system packages, npm packages, native modules. Plain JavaScript on
 * Node's own modules, because it runs before anything is installed. A run with nothing to do takes well under a second.
 *
 *   import { setup } from './setup.mjs';  await setup();          or: npm run build
 */
import { existsSync } from 'node:fs';
import { join } from 'node:path';
import { pathToFileURL } from 'node:url';
import { root, SetupError, script } from './lib/command.mjs';
import { withLock } from './lib/lock.mjs';
import { buildAhead, cudaGap, ensureNative, nativeIsCurrent } from './lib/native.mjs';
import { ensureNpmPackages, npmIsCurrent } from './lib/npm.mjs';
import { ensureCode, ensurePrograms, programsAreCurrent } from './lib/programs.mjs';
import { checkCmake, ensureSystemPackages } from './lib/system.mjs';

const minimumNode = [20, 19];

export function checkNode(version = process.versions.node) {
  const [major, minor] = version.split('.').map(Number);
  if (major > minimumNode[0] || (major === minimumNode[0] && minor >= minimumNode[1])) return;
  throw new SetupError(
    `Node ${version} is too old: ${minimumNode.join('.')} or newer is needed (nodejs.org, nvm install 22)`,
  );
}

export function checkProcessor(arch = process.arch) {
  if (arch === 'x64') return;
  throw new SetupError(
    `${arch} is not served: native code is written for x86-64; use such a machine, or its emulation`,
  );
}

/**
 * @param {{need?: readonly ('npm' | 'native' | 'cuda-emulated' | 'cuda')[], packages?: readonly string[]}} options `native`
 *   brings `cuda` along where there is a GPU; `cuda` is passed over, with one line, where there is no nvcc. `packages`: more
 *   Debian packages, for what runs later
 */
export async function setup({ need = ['npm', 'native'], packages = [] } = {}) {
  checkNode();
  if (process.platform !== 'linux') {
    throw new SetupError(
      `${process.platform} is not served: io_uring, /dev/shm and O_DIRECT are Linux; use a Linux machine`,
    );
  }
  checkProcessor();
  const gap = cudaGap(need);
  if (gap) process.stderr.write(`kvtier: ${gap}\n`);
  const npm = need.includes('npm');
  if ((!npm || (npmIsCurrent() && programsAreCurrent())) && nativeIsCurrent(need)) {
    await ensureSystemPackages(packages);
    return;
  }
  await withLock(join(root, 'build/.setup.lock'), async () => {
    if (need.includes('native')) {
      await ensureSystemPackages();
      checkCmake();
    }
    const ahead = buildAhead(need);
    // Nothing that is built needs them, and whoever unpacks them waits for its disk most of the time.
    const packed = Promise.allSettled([ensureSystemPackages(packages)]);
    try {
      if (npm) {
        await ensureNpmPackages();
        await ensurePrograms();
      }
      await ensureNative(need, ahead);
      if (npm && need.includes('native')) await ensureCode(); // programs load native modules as they begin
    } finally {
      await Promise.all([ahead, packed]); // nothing of ours runs on without the lock
    }
    const [{ reason }] = await packed;
    if (reason !== undefined) throw reason;
  });
  if (!existsSync(join(root, 'node_modules/tsx'))) throw new SetupError('node_modules/tsx is missing; run: npm ci');
}

if (import.meta.url === pathToFileURL(process.argv[1] ?? '').href) await script(() => setup());
