/** A system's start: one that fails when all its services run, and one whose node has a long configuration. */
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
import { afterEach, beforeEach, expect, it } from 'vitest';
import { parseUp } from './options.ts';
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
