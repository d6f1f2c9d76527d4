/** A system's start: one that fails when all its services run, and one whose node has a long configuration. Its life: the run folder goes. */
import { spawn } from 'node:child_process';
import { once } from 'node:events';
import {
  existsSync,
  mkdirSync,
  mkdtempSync,
  readdirSync,
  readFileSync,
  rmSync,
  statSync,
  writeFileSync,
} from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { afterEach, beforeEach, expect, it, vi } from 'vitest';
import { parseUp } from './options.ts';
import { program } from './programs.ts';
import { startSystem } from './system.ts';

let dataDir: string;
beforeEach(() => {
  dataDir = mkdtempSync(join(tmpdir(), 'kvtier-system-'));
});
afterEach(() => {
  for (const pid of services()) process.kill(pid, 'SIGKILL');
  rmSync(dataDir, { recursive: true, force: true });
});

/** Process ids of those that were told of our data folder. */
function services(): number[] {
  const told = (pid: string): string => {
    try {
      return readFileSync(`/proc/${pid}/environ`, 'latin1');
    } catch {
      return '';
    }
  };
  const pids = readdirSync('/proc').filter((name) => /^\d+$/.test(name));
  return pids.filter((pid) => told(pid).includes(dataDir)).map(Number);
}

const small = () => ['--port', '0', '--data-dir', dataDir, '--arena-bytes', '16MiB', '--disk-bytes', '64MiB'];

it('ends with what is told of it, and no service goes on', async () => {
  mkdirSync(join(dataDir, 'node-1', 'segments'), { recursive: true });
  writeFileSync(join(dataDir, 'node-1', 'node.lock'), '');
  let running = 0;
  const onEvent = (message: string): void => {
    if (!message.includes('there is no such node any more')) return;
    running = services().length;
    throw new Error('nobody listens');
  };
  const options = parseUp(small())!;
  await expect(startSystem(options, { onLine: () => {}, onEvent })).rejects.toThrow('nobody listens');
  expect([running > 0, services()]).toEqual([true, []]);
  // The data folder is nobody's.
  const system = await startSystem(options, { onLine: () => {}, onEvent: () => {} });
  await system.stop();
});

it('a node has a configuration that is longer than a variable may be, in a file that nobody else reads', async () => {
  const tenants = Array.from({ length: 3_000 }, (_, i) => [
    `a-tenant-of-some-name-${i}`,
    { arena: 1_000, disk: 5_000 },
  ]);
  const nodeConfig = join(dataDir, 'node.json');
  writeFileSync(nodeConfig, JSON.stringify({ quotas: Object.fromEntries(tenants) }));
  const options = parseUp([...small(), '--node-config', nodeConfig])!;
  const system = await startSystem(options, { onLine: () => {}, onEvent: () => {} });
  const args = readFileSync(`/proc/${system.pids().get('cache-node')}/cmdline`, 'utf8').split('\0');
  const file = args[args.indexOf('--config') + 1]!;
  const found = [statSync(file).mode & 0o777, JSON.parse(readFileSync(file, 'utf8')).quotas];
  await system.stop();
  expect(found).toEqual([0o600, Object.fromEntries(tenants)]);
  expect(existsSync(file)).toBe(false);
});

/** Of starts on a machine that does many other things. */
const patience = { timeout: 60_000 };

it('makes a run folder that has gone again when a service starts anew, with those whose sockets went with it', async () => {
  vi.stubEnv('XDG_RUNTIME_DIR', dataDir);
  const system = await startSystem(parseUp(small())!, { onLine: () => {}, onEvent: () => {} });
  try {
    const runDir = join(dataDir, readdirSync(dataDir).find((name) => /^kvtier-[0-9a-f]{8}$/.test(name))!);
    const before = system.pids();
    rmSync(runDir, { recursive: true });
    process.kill(before.get('cache-node')!, 'SIGKILL');
    const sockets = ['node.sock', 'engine.sock'].map((name) => join(runDir, name));
    await vi.waitUntil(() => sockets.every((path) => existsSync(path)), patience);
    const isSame = (name: string): boolean => system.pids().get(name) === before.get(name);
    expect(['coordinator', 'engine-worker', 'cache-node'].map(isSame)).toEqual([true, false, false]);
    const headers = { 'content-type': 'application/json' };
    const ask = { method: 'POST', headers, body: JSON.stringify({ model: 'demo', prompt: 'a', max_tokens: 1 }) };
    const isAnswered = () => fetch(`${system.url}/v1/completions`, ask).then(({ ok }) => ok);
    await vi.waitUntil(isAnswered, patience);
  } finally {
    vi.unstubAllEnvs();
    await system.stop();
  }
});

it('ends with one line where the run folder is gone for good', async () => {
  const runtimeDir = join(dataDir, 'runtime');
  mkdirSync(runtimeDir);
  const env = { ...process.env, XDG_RUNTIME_DIR: runtimeDir };
  const up = spawn(process.execPath, [...program('kvtier'), 'up', ...small()], { env });
  const said = { out: '', err: '' };
  up.stdout.on('data', (bytes) => (said.out += bytes));
  up.stderr.on('data', (bytes) => (said.err += bytes));
  const closed = once(up, 'close');
  await vi.waitUntil(() => said.out.includes('kvtier is up'), patience);
  rmSync(runtimeDir, { recursive: true });
  const isNode = (pid: number): boolean => readFileSync(`/proc/${pid}/cmdline`, 'utf8').includes('cache-node');
  process.kill(services().find(isNode)!, 'SIGKILL');
  expect(await closed).toEqual([1, null]);
  expect(said.err.trimEnd().split('\n').at(-1)).toMatch(
    /^kvtier: \S+\/runtime\/kvtier-[0-9a-f]{8}: the sockets' folder is gone \(ENOENT: .*\); start kvtier again$/,
  );
  expect(services()).toEqual([]);
});
