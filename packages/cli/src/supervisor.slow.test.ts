import { spawn } from 'node:child_process';
import { once } from 'node:events';
import { mkdtempSync, readFileSync, rmSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { fileURLToPath } from 'node:url';
import { afterEach, beforeEach, describe, expect, it, vi } from 'vitest';
import { bundled } from '../../../scripts/lib/test-programs.mjs';
import { type ServiceSpec, Supervisor } from './supervisor.ts';

/** Of conditions that hold at once, on a machine that does many other things. */
const patience = { timeout: 20_000 };

const serviceFile = fileURLToPath(new URL('./testing/service.mjs', import.meta.url));
const [supervisorFile] = await bundled(new URL('./supervisor.ts', import.meta.url));
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

function supervise(services: ServiceSpec[], limits = {}, options = {}) {
  const events: string[] = [];
  const lines: string[] = [];
  const supervisor = new Supervisor({
    services,
    onLine: (name, line) => lines.push(`${name}: ${line}`),
    onEvent: (message) => events.push(message),
    limits,
    ...options,
  });
  return { supervisor, events, lines };
}

/** A process that runs this module. */
const supervisorProcess = (script: string, before: readonly string[] = []) => {
  const [command, ...args] = [...before, process.execPath, '--input-type=module', '--eval', script];
  return spawn(command!, args, { stdio: ['ignore', 'pipe', 'inherit'] });
};

describe('supervisor', () => {
  it('starts all, hands on what they said, and stops them in the given order', async () => {
    const { supervisor, lines, events } = supervise([service('api'), service('engine'), service('node')]);
    const ready = await supervisor.start();
    expect([...ready]).toEqual([
      ['api', { name: 'api' }],
      ['engine', { name: 'engine' }],
      ['node', { name: 'node' }],
    ]);
    await vi.waitUntil(() => lines.length === 3, patience);
    const pids = [...supervisor.pids().values()];
    await supervisor.stop();
    expect(noted().slice(3)).toEqual(['api term', 'engine term', 'node term']);
    expect(pids.map(isAlive)).toEqual([false, false, false]);
    expect(lines.toSorted()).toEqual(['api: hello from api', 'engine: hello from engine', 'node: hello from node']);
    expect(events).toEqual([]);
  });

  it('restarts what dies, with a backoff that doubles', async () => {
    const { supervisor, events } = supervise([service('api'), service('node')], { backoffMinMs: 20 });
    await supervisor.start();
    const api = supervisor.pids().get('api');
    for (const life of [1, 2]) {
      process.kill(supervisor.pids().get('node')!, 'SIGKILL');
      await vi.waitUntil(() => events.length === life * 2, patience);
    }
    expect(supervisor.pids().get('api')).toBe(api);
    await supervisor.stop();
    expect(events).toEqual([
      'node was killed (SIGKILL); starting it again in 0.02 s',
      'node is back',
      'node was killed (SIGKILL); starting it again in 0.04 s',
      'node is back',
    ]);
  });

  it('what they share is looked after before one starts again: whose things went with it start again, too', async () => {
    // Asked before each start: the node's, the node's and so the engine's, the node's.
    const gone: (readonly string[] | Error)[] = [[], ['engine', 'node'], [], new Error('for good')];
    const lost: string[] = [];
    const restore = (): readonly string[] => {
      const next = gone.shift()!;
      if (next instanceof Error) throw next;
      return next;
    };
    const options = { restore, onLost: (error: Error) => lost.push(error.message) };
    const names = ['api', 'engine', 'node'];
    const { supervisor, events } = supervise(
      names.map((name) => service(name)),
      { backoffMinMs: 20 },
      options,
    );
    await supervisor.start();
    const pid = (name: string): number => supervisor.pids().get(name)!;
    const [api, engine] = [pid('api'), pid('engine')];
    process.kill(pid('node'), 'SIGKILL');
    await vi.waitUntil(() => events.includes('node is back'), patience);
    expect([pid('api'), pid('engine')]).toEqual([api, engine]);
    process.kill(pid('node'), 'SIGKILL');
    await vi.waitUntil(() => events.includes('engine is back'), patience);
    expect([pid('api'), pid('engine') === engine, lost]).toEqual([api, false, []]);
    process.kill(pid('node'), 'SIGKILL');
    await vi.waitUntil(() => lost.length > 0, patience);
    process.kill(api, 'SIGKILL');
    await vi.waitUntil(() => supervisor.pids().size === 1, patience);
    await supervisor.stop();
    expect([lost, gone]).toEqual([['for good'], []]);
    expect(events.filter((event) => event.startsWith('api'))).toEqual([]);
  });

  it('tries again what it has no files left to start', async () => {
    const script = `
      import { openSync, closeSync } from 'node:fs';
      import { Supervisor } from ${JSON.stringify(supervisorFile)};
      const taken = [];
      const onEvent = (text) => {
        console.log(text);
        if (text.includes('was killed')) try { for (;;) taken.push(openSync('/dev/null')); } catch {}
        if (text.includes('could not be started')) for (const file of taken.splice(0)) closeSync(file);
        if (text === 'node is back') supervisor.stop();
      };
      const supervisor = new Supervisor({ services: ${JSON.stringify([service('node')])}, onLine() {}, onEvent,
        limits: { backoffMinMs: 20 } });
      await supervisor.start();
      process.kill(supervisor.pids().get('node'), 'SIGKILL');`;
    const child = supervisorProcess(script, ['sh', '-c', 'ulimit -n 100; exec "$0" "$@"']);
    let said = '';
    child.stdout.on('data', (bytes) => (said += bytes));
    expect(await once(child, 'close')).toEqual([0, null]);
    expect(said.trimEnd().split('\n')).toEqual([
      'node was killed (SIGKILL); starting it again in 0.02 s',
      'node could not be started; starting it again in 0.04 s',
      'node is back',
    ]);
  });

  it('fails the start with the service’s own line and stops the others', async () => {
    const { supervisor } = supervise([service('api'), service('node', 'refuse')]);
    await expect(supervisor.start()).rejects.toMatchObject({
      message: 'node: LOCKED: the folder is held by another process',
      isFinal: false,
    });
    expect(supervisor.pids().size).toBe(0);
  });

  it('fails it for good where the service says that it was configured wrongly', async () => {
    const { supervisor } = supervise([service('api'), service('node', 'miswritten')]);
    await expect(supervisor.start()).rejects.toMatchObject({
      message: 'node: CONFIG: port: is required',
      isFinal: true,
    });
  });

  it('kills what does not end', async () => {
    const { supervisor } = supervise([service('api', 'deaf'), service('node')], { stopMs: 2_000 });
    await supervisor.start();
    const pids = [...supervisor.pids().values()];
    await supervisor.stop();
    expect(pids.map(isAlive)).toEqual([false, false]);
    expect(noted()).toContain('api term');
  });

  it('kills and starts again what is ready and then stands still', async () => {
    const { supervisor, events } = supervise([service('api', 'still'), service('node')], {
      pingMs: 100,
      silenceMs: 5_000, // a busy machine's node answers within it
      backoffMinMs: 20,
      stopMs: 300,
    });
    await supervisor.start();
    const node = supervisor.pids().get('node');
    await vi.waitUntil(() => events.length >= 3, patience);
    expect(supervisor.pids().get('node')).toBe(node);
    await supervisor.stop();
    expect(events.slice(0, 3)).toEqual([
      'api has not answered for 5 s; killing it',
      'api was killed (SIGKILL); starting it again in 0.02 s',
      'api is back',
    ]);
  });

  it('kills nobody for a standstill of its own', async () => {
    const script = `
      import { Supervisor } from ${JSON.stringify(supervisorFile)};
      const supervisor = new Supervisor({ services: ${JSON.stringify([service('api'), service('node')])}, onLine() {},
        onEvent: (text) => console.log(text), limits: { pingMs: 20, silenceMs: 2_000 } });
      process.on('SIGUSR2', () => setTimeout(() => supervisor.stop().then(() => console.log('stopped')), 500));
      await supervisor.start();
      console.log('up');`; // the last thing: from here on it may be stopped at any instruction
    const child = supervisorProcess(script);
    let said = '';
    child.stdout.on('data', (bytes) => (said += bytes));
    await vi.waitUntil(() => said === 'up\n', patience);
    for (let times = 0; times < 2; times++) {
      child.kill('SIGSTOP');
      await new Promise((resolve) => setTimeout(resolve, 2_500)); // the standstill is what is tested
      child.kill('SIGCONT');
    }
    child.kill('SIGUSR2');
    expect(await once(child, 'close')).toEqual([0, null]);
    expect(said).toBe('up\nstopped\n');
  });

  it('tells the last one to end after half of the time, however slow the others are', async () => {
    const { supervisor } = supervise([service('api', 'deaf'), service('engine', 'deaf'), service('node', 'slow')], {
      stopMs: 7_000,
    });
    await supervisor.start();
    const node = supervisor.pids().get('node')!;
    const begin = performance.now();
    const stopped = supervisor.stop();
    await vi.waitUntil(() => !isAlive(node), patience);
    const nodeMs = performance.now() - begin;
    supervisor.kill(); // the others, which would not end before their time is over
    await stopped;
    // By itself, and not by the SIGKILL for the others.
    expect(noted().slice(3)).toEqual(['api term', 'engine term', 'node term', 'node end']);
    expect(nodeMs).toBeGreaterThanOrEqual(4_400);
  });

  it('tells those of one stage to end together', async () => {
    const stages = { api: 0, 'engine-0': 1, 'engine-1': 1, 'engine-2': 1, node: 2 };
    const specs = Object.entries(stages).map(([name, stage]) => ({
      ...service(name, stage === 1 ? 'slow' : 'run'),
      stage,
    }));
    const { supervisor } = supervise(specs, { stopMs: 60_000 });
    await supervisor.start();
    await supervisor.stop();
    const ends = noted().slice(5);
    // All are told before the first of them has ended.
    expect([ends[0], ends.slice(1, 4).toSorted(), ends.slice(4, 7).toSorted(), ends[7]]).toEqual([
      'api term',
      ['engine-0 term', 'engine-1 term', 'engine-2 term'],
      ['engine-0 end', 'engine-1 end', 'engine-2 end'],
      'node term',
    ]);
  });

  it('takes a complaint under the name of the program for one of the member', async () => {
    const { supervisor, lines } = supervise([{ ...service('node', 'refuse'), name: 'node-1', program: 'node' }]);
    await expect(supervisor.start()).rejects.toThrow(/^node-1: LOCKED: the folder is held by another process$/);
    expect(lines).toEqual([]);
  });

  it('starts again what has ended though its output is still held open', async () => {
    const { supervisor, events } = supervise([service('node', 'holding')], { backoffMinMs: 20, lastWordsMs: 100 });
    await supervisor.start();
    const holders = (): number[] =>
      noted().flatMap((line) => [...line.matchAll(/ holder (\d+)/g)].map(([, pid]) => Number(pid)));
    try {
      supervisor.kill();
      await vi.waitUntil(() => events.length === 2, patience);
      expect(holders().map(isAlive)).toEqual([true, true]);
    } finally {
      await supervisor.stop();
      for (const pid of holders()) process.kill(pid, 'SIGKILL');
    }
    expect(events).toEqual(['node was killed (SIGKILL); starting it again in 0.02 s', 'node is back']);
  });

  it('tells its services when it is killed itself', async () => {
    const script = `
      import { Supervisor } from ${JSON.stringify(supervisorFile)};
      const supervisor = new Supervisor({ services: ${JSON.stringify([service('api'), service('node')])}, onLine() {}, onEvent() {} });
      await supervisor.start();
      console.log(JSON.stringify([...supervisor.pids().values()]));`;
    const child = supervisorProcess(script);
    const [text] = (await once(child.stdout, 'data')) as [Buffer];
    const pids = JSON.parse(text.toString()) as number[];
    expect(pids.map(isAlive)).toEqual([true, true]);
    child.kill('SIGKILL');
    await vi.waitUntil(() => pids.every((pid) => !isAlive(pid)), patience);
    expect(noted().slice(2).toSorted()).toEqual(['api orphan', 'node orphan']);
  });
});
