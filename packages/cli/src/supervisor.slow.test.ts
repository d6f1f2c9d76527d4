import { spawn } from 'node:child_process';
import { once } from 'node:events';
import { mkdtempSync, readFileSync, rmSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { fileURLToPath } from 'node:url';
import { afterEach, beforeEach, describe, expect, it, vi } from 'vitest';
import { type ServiceSpec, Supervisor } from './supervisor.ts';

/** Of conditions that hold at once, on a machine that does many other things. */
const patience = { timeout: 20_000 };

const serviceFile = fileURLToPath(new URL('./testing/service.mjs', import.meta.url));
let folder: string;
let log: string;
beforeEach(() => {
  folder = mkdtempSync(join(tmpdir(), 'kvtier-supervisor-'));
  log = join(folder, 'log');
});
afterEach(() => rmSync(folder, { recursive: true, force: true }));

const service = (name: string, mode = 'run'): ServiceSpec => ({
  name,
  nodeArgs: [serviceFile],
  env: { NAME: name, MODE: mode, LOG: log },
});
const noted = (): string[] => readFileSync(log, 'utf8').trim().split('\n');
const isAlive = (pid: number): boolean => {
  try {
    return process.kill(pid, 0);
  } catch {
    return false;
  }
};

function supervise(services: ServiceSpec[], limits = {}) {
  const events: string[] = [];
  const lines: string[] = [];
  const supervisor = new Supervisor({
    services,
    onLine: (name, line) => lines.push(`${name}: ${line}`),
    onEvent: (message) => events.push(message),
    limits,
  });
  return { supervisor, events, lines };
}

describe('supervisor', () => {
  it('starts all, hands on what they said, and stops them in the given order', async () => {
    const { supervisor, lines, events } = supervise([service('door'), service('engine'), service('node')]);
    const ready = await supervisor.start();
    expect([...ready]).toEqual([
      ['door', { name: 'door' }],
      ['engine', { name: 'engine' }],
      ['node', { name: 'node' }],
    ]);
    await vi.waitUntil(() => lines.length === 3, patience);
    const pids = [...supervisor.pids().values()];
    await supervisor.stop();
    expect(noted().slice(3)).toEqual(['door term', 'engine term', 'node term']);
    expect(pids.map(isAlive)).toEqual([false, false, false]);
    expect(lines.toSorted()).toEqual(['door: hello from door', 'engine: hello from engine', 'node: hello from node']);
    expect(events).toEqual([]);
  });

  it('restarts what dies, with a backoff that doubles', async () => {
    const { supervisor, events } = supervise([service('door'), service('node')], { backoffMinMs: 20 });
    await supervisor.start();
    const door = supervisor.pids().get('door');
    for (const life of [1, 2]) {
      process.kill(supervisor.pids().get('node')!, 'SIGKILL');
      await vi.waitUntil(() => events.length === life * 2, { timeout: 10_000 });
    }
    expect(supervisor.pids().get('door')).toBe(door);
    await supervisor.stop();
    expect(events).toEqual([
      'node was killed (SIGKILL); starting it again in 0.02 s',
      'node is back',
      'node was killed (SIGKILL); starting it again in 0.04 s',
      'node is back',
    ]);
  });

  it('fails the start with the service’s own line and stops the others', async () => {
    const { supervisor } = supervise([service('door'), service('node', 'refuse')]);
    await expect(supervisor.start()).rejects.toThrow(/^node: LOCKED: the folder is held by another process$/);
    expect(supervisor.pids().size).toBe(0);
  });

  it('kills what does not end', async () => {
    const { supervisor } = supervise([service('door', 'deaf'), service('node')], { stopMs: 300 });
    await supervisor.start();
    const pids = [...supervisor.pids().values()];
    await supervisor.stop();
    expect(pids.map(isAlive)).toEqual([false, false]);
    expect(noted()).toContain('door term');
  });

  it('tells its services when it is killed itself', async () => {
    const script = `
      import { Supervisor } from ${JSON.stringify(new URL('./supervisor.ts', import.meta.url).href)};
      const supervisor = new Supervisor({ services: ${JSON.stringify([service('door'), service('node')])}, onLine() {}, onEvent() {} });
      await supervisor.start();
      console.log(JSON.stringify([...supervisor.pids().values()]));`;
    const child = spawn(
      process.execPath,
      ['--import', import.meta.resolve('tsx'), '--input-type=module', '--eval', script],
      { stdio: ['ignore', 'pipe', 'inherit'] },
    );
    const [text] = (await once(child.stdout, 'data')) as [Buffer];
    const pids = JSON.parse(text.toString()) as number[];
    expect(pids.map(isAlive)).toEqual([true, true]);
    child.kill('SIGKILL');
    await vi.waitUntil(() => pids.every((pid) => !isAlive(pid)), { timeout: 10_000 });
    expect(noted().slice(2).toSorted()).toEqual(['door orphan', 'node orphan']);
  });
});
