/**
 * System packages: found by what they provide (a program or a header), so that any distribution will do; installed with
 * apt-get where we may, otherwise the exact command is printed and the run ends.
 */
import { spawnSync } from 'node:child_process';
import { existsSync, readdirSync } from 'node:fs';
import { command, onPath, SetupError } from './command.mjs';
import { step } from './progress.mjs';

const header =
  (...names) =>
  () =>
    names.some((name) =>
      ['/usr/include', '/usr/local/include', ...multiarch()].some((dir) => existsSync(`${dir}/${name}`)),
    );
const program = (name) => () => onPath(name);
const pythonModule = (name) => () => existsSync(`/usr/lib/python3/dist-packages/${name}`);

const minimumCmake = [3, 25];
const library =
  (...names) =>
  () =>
    names.every((name) => libraryFolders().some((dir) => existsSync(`${dir}/${name}`)));
const both = (one, other) => () => one() && other();

/** What the build needs: Debian's name → how to see that it is there. */
export const buildPackages = {
  cmake: program('cmake'),
  'ninja-build': program('ninja'),
  'g++': program('g++'),
  // Linked statically; some distributions have the archives in a package of their own, or none.
  'libssl-dev': both(header('openssl/ssl.h'), library('libssl.a', 'libcrypto.a')),
  'liburing-dev': header('liburing.h'),
  'libxxhash-dev': header('xxhash.h'),
};

/** Real servers that the tests start themselves, what the consumers of KV events are written with, and the C++ tests' framework. */
export const testPackages = {
  'redis-server': program('redis-server'),
  'redis-sentinel': program('redis-sentinel'),
  'redis-tools': program('redis-cli'),
  openssl: program('openssl'),
  iproute2: program('ip'),
  nftables: program('nft'),
  'ceph-mon': program('ceph-mon'),
  'ceph-osd': program('ceph-osd'),
  radosgw: program('radosgw'),
  'ceph-common': program('ceph'),
  'python3-zmq': pythonModule('zmq'),
  'python3-msgpack': pythonModule('msgpack'),
  'python3-protobuf': pythonModule('google/protobuf'),
  'libgtest-dev': header('gtest/gtest.h'),
};

/** Of these, what servers by hand need (infra/redis/up.mjs, infra/s3/up.mjs). */
export const redisPackages = ['redis-server', 'redis-sentinel', 'redis-tools', 'openssl'];
export const s3Packages = ['ceph-mon', 'ceph-osd', 'radosgw', 'ceph-common', 'openssl'];

/** Packages that a bench suite may ask for. Others are looked up with dpkg-query. */
const morePackages = { fio: program('fio'), git: program('git'), libopenblas0: library('libopenblas.so.0') };

function multiarch() {
  try {
    return readdirSync('/usr/include')
      .filter((name) => name.endsWith('-linux-gnu'))
      .map((name) => `/usr/include/${name}`);
  } catch {
    return [];
  }
}

/** Where a linker looks. */
function libraryFolders() {
  const folders = ['/usr/lib', '/usr/local/lib'].flatMap((dir) => [dir, dir.replace(/lib$/, 'lib64')]);
  return [...folders, ...multiarch().map((dir) => dir.replace('/include/', '/lib/'))];
}

/** A package manager may bring one that is too old. @throws SetupError */
export function checkCmake(said = spawnSync('cmake', ['--version'], { encoding: 'utf8' }).stdout ?? '') {
  const [, major, minor] = (/version (\d+)\.(\d+)/.exec(said) ?? []).map(Number);
  const [least, leastMinor] = minimumCmake;
  if (major > least || (major === least && minor >= leastMinor)) return;
  const found = major === undefined ? 'its version cannot be read' : `${major}.${minor} is too old`;
  throw new SetupError(`cmake: ${found}; ${least}.${leastMinor} or newer is needed (cmake.org, pip install cmake)`);
}

function isThere(name) {
  const probe = buildPackages[name] ?? testPackages[name] ?? morePackages[name];
  if (probe) return probe();
  const found = spawnSync('dpkg-query', ['-W', '-f', `\${Status}`, name], { encoding: 'utf8' });
  return found.status === 0 && found.stdout === 'install ok installed';
}

/** Installs what is missing of `names`; throws SetupError with the exact command when that is not possible. */
export async function ensureSystemPackages(names = Object.keys(buildPackages)) {
  const missing = names.filter((name) => !isThere(name));
  if (missing.length === 0) return;
  const list = missing.join(' ');
  if (!onPath('apt-get')) {
    throw new SetupError(`system packages are missing: ${list} (Debian's names); install them and run this again`);
  }
  const isRoot = process.getuid?.() === 0;
  const sudo = isRoot
    ? []
    : spawnSync('sudo', ['-n', 'true'], { stdio: 'ignore' }).status === 0
      ? ['sudo', '-n']
      : null;
  const remedy = `install by hand and run this again: ${isRoot ? '' : 'sudo '}apt-get update && ${isRoot ? '' : 'sudo '}apt-get install -y --no-install-recommends ${list}`;
  if (sudo === null) throw new SetupError(`system packages are missing: ${list}; ${remedy}`);

  const env = { ...process.env, DEBIAN_FRONTEND: 'noninteractive' };
  const aptGet = (args, note) =>
    command(sudo[0] ?? 'apt-get', [...sudo.slice(1), ...(sudo.length ? ['apt-get'] : []), ...args], {
      env,
      note,
      remedy,
    });
  const install = ['install', '-y', '--no-install-recommends', ...missing];
  await step(`system packages (${list})`, async (note) => {
    if (!hasPackageLists()) await aptGet(['update'], note);
    try {
      await aptGet(install, note);
    } catch {
      await aptGet(['update'], note); // lists may be older than the archive
      await aptGet(install, note);
    }
  });
  const still = missing.filter((name) => !isThere(name));
  if (still.length > 0) throw new SetupError(`installed, but still not found: ${still.join(' ')}; ${remedy}`);
}

function hasPackageLists() {
  try {
    return readdirSync('/var/lib/apt/lists').some((name) => name.endsWith('_Packages') || name.includes('_Packages.'));
  } catch {
    return false;
  }
}
