/** The hosts that other tests stand on: as fast as they were asked to be, cut and healed, and nothing left of them. */
import { type ChildProcess, execFileSync, spawn } from 'node:child_process';
import { once } from 'node:events';
import { readFileSync } from 'node:fs';
import { createInterface } from 'node:readline';
import { fileURLToPath } from 'node:url';
import { afterEach, expect, it, vi } from 'vitest';
import { type Hosts, hosts, hostsMissing } from '../../infra/hosts/hosts.ts';

const missing = hostsMissing();
if (missing !== undefined) console.warn(`SKIPPED: hosts of a cluster: ${missing}`);
const harness = fileURLToPath(new URL('../../infra/hosts/hosts.ts', import.meta.url));
const port = 7500;

let cluster: Hosts<'a' | 'b' | 'c'> | undefined;
afterEach(async () => {
  await cluster?.close();
  cluster = undefined;
});

/** Who connects gets so many bytes as fast as they go, and then the end. */
const giver = (bytes: number): string => `
  require('node:net').createServer((socket) => socket.on('error', () => {}).end(Buffer.alloc(${bytes})))
    .listen(${port}, '0.0.0.0', () => console.log('up'));`;
/** At each line asks there, and says how long it took, or that nothing came. */
const taker = (host: string): string => `
  require('node:readline').createInterface({ input: process.stdin }).on('line', () => {
    const begin = performance.now();
    let bytes = 0;
    const socket = require('node:net').connect(${port}, '${host}').setTimeout(2_000, () => socket.destroy());
    socket.on('data', (chunk) => (bytes += chunk.length)).on('error', () => {});
    socket.on('close', () => console.log(JSON.stringify({ bytes, ms: performance.now() - begin })));
  });
  console.log('up');`;

async function started(child: ChildProcess): Promise<() => Promise<{ bytes: number; ms: number }>> {
  const lines = createInterface({ input: child.stdout! });
  await once(lines, 'line');
  return async () => {
    const answered = once(lines, 'line');
    child.stdin!.write('\n');
    return JSON.parse(((await answered) as [string])[0]);
  };
}

const spawned = (on: 'a' | 'b' | 'c', script: string) =>
  started(cluster!.spawn(on, [process.execPath, '-e', script], { stdio: ['pipe', 'pipe', 'inherit'] }));
const spaces = (): string[] => execFileSync('ip', ['netns', 'list'], { encoding: 'utf8' }).split('\n');
const statOf = (pid: string): string => {
  try {
    return readFileSync(`/proc/${pid}/stat`, 'latin1');
  } catch {
    return '';
  }
};
const left = (pid: number): string[] => spaces().filter((name) => name.startsWith(`kvthost-${pid}-`));

it.skipIf(missing !== undefined)('are as fast as asked, cut, healed and slowed', async () => {
  const bytes = 20e6;
  cluster = await hosts(['a', 'b', 'c'], { gbit: 0.5 });
  await spawned('a', giver(bytes));
  const [fromB, fromC] = await Promise.all(['b', 'c'].map((on) => spawned(on as 'b', taker(cluster!.address('a')))));
  const shaped = await fromB!();
  expect(shaped.bytes).toBe(bytes);
  expect(shaped.ms).toBeGreaterThan(280); // 320 without what a bucket lets through at once
  await cluster.rate(null);
  const free = [(await fromB!()).ms, (await fromB!()).ms, (await fromB!()).ms];
  expect(Math.min(...free)).toBeLessThan(shaped.ms);
  await cluster.cut('a', 'b');
  expect([(await fromB!()).bytes, (await fromC!()).bytes]).toEqual([0, bytes]);
  await cluster.heal('a', 'b');
  await cluster.cut('a');
  expect([(await fromB!()).bytes, (await fromC!()).bytes]).toEqual([0, 0]);
  await cluster.heal('a');
  expect([(await fromB!()).bytes, (await fromC!()).bytes]).toEqual([bytes, bytes]);
  const far = await spawned('b', taker(await cluster.slowWay('b', 'a', [port], 50)));
  const { bytes: came, ms } = await far();
  expect(came).toBe(bytes);
  expect(ms).toBeGreaterThanOrEqual(100);
});

it.skipIf(missing !== undefined)('leave nothing, also of a process that is killed', async () => {
  const script = `
    import { hosts } from ${JSON.stringify(harness)};
    const cluster = await hosts(['a', 'b']);
    const child = cluster.spawn('a', ['sleep', '60'], { stdio: 'ignore' });
    console.log(child.pid);`;
  const loader = import.meta.resolve('tsx');
  const dying = spawn(process.execPath, ['--import', loader, '--input-type=module', '--eval', script], {
    stdio: ['ignore', 'pipe', 'inherit'],
  });
  const [line] = (await once(createInterface({ input: dying.stdout! }), 'line')) as [string];
  expect(left(dying.pid!)).toHaveLength(3);
  await vi.waitUntil(() => statOf(line).includes('(sleep)'), { timeout: 20_000 });
  dying.kill('SIGKILL');
  await once(dying, 'exit');
  cluster = await hosts(['a', 'b', 'c']);
  expect(left(dying.pid!)).toEqual([]);
  await vi.waitUntil(() => statOf(line) === '' || statOf(line).includes('(sleep) Z'), { timeout: 20_000 });
  expect(left(process.pid)).toHaveLength(4);
  await cluster.close();
  expect(left(process.pid)).toEqual([]);
});
