/** A suite that is stopped under way leaves nothing behind: no shared memory, no network, no folder with a secret, no process. */
import { type ChildProcess, execFileSync, spawn } from 'node:child_process';
import { once } from 'node:events';
import { existsSync, mkdtempSync, readdirSync, readFileSync, readlinkSync, rmSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { waitUntil } from '@kvtier/cli';
import { expect, it, onTestFinished } from 'vitest';
import { hostsMissing } from '../infra/hosts/hosts.ts';

const missing = hostsMissing();
if (missing !== undefined) console.warn(`SKIPPED: suites on hosts of their own that are stopped: ${missing}`);
const run = JSON.stringify(new URL('./run.ts', import.meta.url).href);

interface Started {
  readonly child: ChildProcess;
  /** For its temporary files. */
  readonly folder: string;
}

function start(args: readonly string[], env: NodeJS.ProcessEnv = {}): Started {
  const folder = mkdtempSync(join(tmpdir(), 'kvb-'));
  const host = '{ ensureSystemPackages: async () => {} }';
  const script = `const { main } = await import(${run}); process.exitCode = await main(${JSON.stringify(args)}, ${host})`;
  const child = spawn(process.execPath, ['--import', 'tsx', '--input-type=module', '-e', script], {
    stdio: ['ignore', 'ignore', 'inherit'],
    env: { ...process.env, TMPDIR: folder, ...env },
  });
  onTestFinished(() => {
    for (const pid of [child.pid!, ...childrenOf(child.pid!)]) kill(pid);
    rmSync(folder, { recursive: true, force: true });
  });
  return { child, folder };
}

async function stop({ child }: Started, signal: NodeJS.Signals = 'SIGTERM'): Promise<void> {
  const ended = once(child, 'exit');
  child.kill(signal);
  expect(await ended).toEqual(signal === 'SIGTERM' ? [143, null] : [null, signal]);
}

/** And theirs. */
function childrenOf(pid: number): number[] {
  try {
    const threads = readdirSync(`/proc/${pid}/task`);
    const own = threads.flatMap((thread) => readFileSync(`/proc/${pid}/task/${thread}/children`, 'latin1').split(' '));
    return own.flatMap((each) => (each === '' ? [] : [Number(each), ...childrenOf(Number(each))]));
  } catch {
    return []; // it has just ended
  }
}

const read = (path: string): string => {
  try {
    return readFileSync(path, 'latin1');
  } catch {
    return '';
  }
};
const isCalled = (word: string) => (pid: number) => read(`/proc/${pid}/cmdline`).includes(word);
/** One that has ended, and that nobody has asked for, is none. */
const isAlive = (pid: number): boolean => /\) [^Z]/.test(read(`/proc/${pid}/stat`));
const inMemory = (prefix: string): string[] => readdirSync('/dev/shm').filter((name) => name.startsWith(prefix));

/** Where the test fails, they do not outlive it. */
function afterwards(pids: readonly number[]): void {
  onTestFinished(() => {
    for (const pid of pids) if (isAlive(pid)) kill(pid);
  });
}

function kill(pid: number): void {
  try {
    process.kill(pid, 'SIGKILL');
  } catch {
    // it has just ended
  }
}

it('arena: no arena', async () => {
  const started = start(['arena']);
  const { pid } = started.child;
  await waitUntil('an arena', 120_000, async () => read(`/proc/${pid}/maps`).includes('/dev/shm/kvtier-bench-'));
  await stop(started);
  expect(inMemory(`kvtier-bench-${pid}`)).toEqual([]);
});

it.each(['SIGTERM', 'SIGKILL'] as const)('streams, %s: no process', async (signal) => {
  const started = start(['streams', '--clients=16', '--seconds=600']);
  const children = (): number[] => childrenOf(started.child.pid!);
  await waitUntil('clients', 120_000, async () => children().some(isCalled('streams/clients.ts')));
  const pids = children();
  afterwards(pids);
  expect(pids.filter(isCalled('streams/fake-engines.ts')).length).toBeGreaterThan(0);
  await stop(started, signal);
  await waitUntil('the end of all that it started', 30_000, async () => !pids.some(isAlive));
});

/** Serves until it is killed, and tells any client the same at once. */
const iperf3 = `#!${process.execPath}
if (process.argv[2] === '-s') setInterval(() => {}, 1e6);
else console.log('{"end":{"sum_received":{"bits_per_second":1e9},"cpu_utilization_percent":{"host_total":1,"remote_total":1}}}');
`;

it.skipIf(missing !== undefined)('peer: no network, no arena, no process', async () => {
  const bin = mkdtempSync(join(tmpdir(), 'kvb-bin-'));
  onTestFinished(() => rmSync(bin, { recursive: true, force: true }));
  writeFileSync(join(bin, 'iperf3'), iperf3, { mode: 0o755 });
  const before = inMemory('kvtier-bench-peer-');
  const started = start(['peer'], { PATH: `${bin}:${process.env.PATH}` });
  const pid = started.child.pid!;
  const spaces = (): string[] => readdirSync('/var/run/netns').filter((name) => name.startsWith(`kvb${pid}`));
  onTestFinished(() => {
    for (const space of spaces()) execFileSync('ip', ['netns', 'del', space]);
  });
  const hold = (each: number): boolean => read(`/proc/${each}/maps`).includes('/dev/shm/kvtier-bench-');
  await waitUntil('two nodes', 120_000, async () => childrenOf(pid).filter(hold).length === 2);
  const pids = childrenOf(pid);
  afterwards(pids);
  expect(pids.filter(isCalled('iperf3\0-s'))).toHaveLength(1);
  await stop(started);
  expect(spaces()).toEqual([]);
  expect(inMemory('kvtier-bench-peer-').filter((name) => !before.includes(name))).toEqual([]);
  await waitUntil('the end of all that it started', 30_000, async () => !pids.some(isAlive));
});

it.skipIf(missing !== undefined)('sharing: no arena, no secret, no process', async () => {
  const started = start(['sharing', 'demo', '1', '--gbit=1']);
  const placeOf = (): string | undefined => {
    const [folder] = readdirSync(started.folder).filter((name) => name.startsWith('kvs-'));
    const link = join(started.folder, folder ?? 'none', 'data-a/place.id');
    return existsSync(link.replace(/place\.id$/, '')) ? linked(link)?.split('-')[1] : undefined;
  };
  await waitUntil(
    'an arena',
    120_000,
    async () => placeOf() !== undefined && inMemory(`kvtier-${placeOf()}-`).length > 0,
  );
  const place = placeOf();
  const pids = childrenOf(started.child.pid!);
  afterwards(pids);
  await stop(started);
  expect(inMemory(`kvtier-${place}-`)).toEqual([]);
  expect(readdirSync(started.folder).filter((name) => name.startsWith('kvs-'))).toEqual([]);
  expect(pids.filter(isAlive)).toEqual([]);
});

function linked(path: string): string | undefined {
  try {
    return readlinkSync(path);
  } catch {
    return undefined;
  }
}
