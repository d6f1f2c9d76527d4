/** The life of a service process, on real processes with a real IPC channel. */
import { type ChildProcess, fork } from 'node:child_process';
import { once } from 'node:events';
import { closeSync, mkdtempSync, openSync, readFileSync, rmSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { afterAll, describe, expect, it, vi } from 'vitest';
import { bundled } from '../../../../scripts/lib/test-programs.mjs';
import { serviceHelp } from './service-arguments.ts';
import { hungCall } from './testing/hung-call.ts';
import { TurnWatch } from './testing/turn-watch.ts';
import { version } from './version.ts';

/** Of conditions that hold at once, on a machine that does many other things. */
const patience = { timeout: 20_000 };

vi.setConfig({ testTimeout: 60_000 });

const folder = mkdtempSync(join(tmpdir(), 'kvtier-service-'));
afterAll(() => rmSync(folder, { recursive: true, force: true }));

const [telemetry, telemetryIndex, errors, binding] = await bundled(
  ...['./service.ts', './index.ts', '../../errors/src/index.ts'].map((file) => new URL(file, import.meta.url)),
  new URL(import.meta.resolve('@kvtier/data-plane')),
);

/** A killed process that nobody has reaped yet holds nothing any more. */
function isRunning(pid: number): boolean {
  try {
    const stat = readFileSync(`/proc/${pid}/stat`, 'utf8');
    return !['Z', 'X'].includes(stat.slice(stat.lastIndexOf(')') + 2)[0]!);
  } catch {
    return false;
  }
}

/** Of processor time that it has used: 10 ms each. */
function ticksOf(pid: number): number {
  const fields = readFileSync(`/proc/${pid}/stat`, 'utf8').split(') ')[1]!.split(' ');
  return Number(fields[11]) + Number(fields[12]);
}

/** A process whose service starts with `start`, the body of an async function. */
function service(
  name: string,
  start: string,
  nodeOptions = '',
  imports = '',
  unread = false,
  args: readonly string[] = [],
): ChildProcess & { said: () => string } {
  const file = join(folder, `${name}.mjs`);
  writeFileSync(
    file,
    `import { runService } from ${JSON.stringify(telemetry)};
     import { KvError } from ${JSON.stringify(errors)};
     import { native } from ${JSON.stringify(binding)};
     ${imports}
     const say = (text) => process.stdout.write(text + '\\n');
     runService(${JSON.stringify(name)}, async (given) => { ${start} }, () => []);`,
  );
  const child = fork(file, args, {
    env: { ...process.env, NODE_OPTIONS: nodeOptions },
    silent: true,
  });
  let said = '';
  child.stdout!.on('data', (bytes) => (said += bytes));
  if (!unread) child.stderr!.on('data', (bytes) => (said += bytes));
  return Object.assign(child, { said: () => said });
}

const serving = `const timer = setInterval(() => {}, 1000);
  return { ready: { url: 'here' }, close: async () => { clearInterval(timer); say('closed'); } };`;

it.each(['SIGTERM', 'SIGINT', 'SIGHUP'] as const)('says ready, closes in order at %s, exits with 0', async (signal) => {
  const child = service(`signal-${signal}`, serving);
  expect(await once(child, 'message')).toEqual([{ ready: { url: 'here' } }, undefined]);
  child.kill(signal);
  expect(await once(child, 'close')).toEqual([0, null]);
  expect(child.said()).toBe('closed\n');
});

it('says at its end how long the turns of its event loop took since it was ready', async () => {
  const spin = (ms: number): string => `const end = native.threadCpuMs() + ${ms}; while (native.threadCpuMs() < end);`;
  const quick = service('quick', `${spin(120)} ${serving}`);
  const slow = service('slow', `setTimeout(() => { ${spin(120)} say('spun'); }, 300); ${serving}`);
  const watches = [quick, slow].map((child) => new TurnWatch(child));
  await Promise.all([once(quick, 'message'), vi.waitUntil(() => slow.said() === 'spun\n', patience)]);
  for (const child of [quick, slow]) child.kill('SIGTERM');
  await Promise.all([once(quick, 'close'), once(slow, 'close')]);
  expect(() => watches[0]!.check('quick')).not.toThrow();
  expect(() => watches[1]!.check('slow')).toThrow(
    /^slow: 1 turns of its event loop above 50 ms, the longest 1[1-9]\d ms$/,
  );
});

it('closes when its supervisor is gone', async () => {
  const child = service('orphan', serving);
  await once(child, 'message');
  child.disconnect();
  expect(await once(child, 'exit')).toEqual([0, null]); // Node emits no 'close' after our own disconnect
  await vi.waitUntil(() => child.said() === 'closed\n', patience);
});

it('ends by SIGKILL when something keeps the event loop after the grace', async () => {
  const start = `endProcessAfter(1, 100, 'stuck'); setTimeout(() => { for (;;); }, 20); ${serving}`;
  const child = service('stuck', start, '', `import { endProcessAfter } from ${JSON.stringify(telemetry)};`);
  expect(await once(child, 'close')).toEqual([null, 'SIGKILL']);
  expect(child.said()).toBe('stuck: still there 1100 ms after it failed; killed\n');
  const free = service(
    'free',
    start.replaceAll('for (;;);', ''),
    '',
    `import { endProcessAfter } from ${JSON.stringify(telemetry)};`,
  );
  expect(await once(free, 'close')).toEqual([1, null]);
});

it('a start that fails is one line and exit code 1', async () => {
  const child = service('refused', `throw new KvError('LOCKED', '/d: held by pid 7; stop it');`);
  expect(await once(child, 'close')).toEqual([1, null]);
  expect(child.said()).toBe('refused: LOCKED: /d: held by pid 7; stop it\n');
});

it('a configuration that cannot work is exit code 78: another start does no better', async () => {
  const ended = async (more: string) => {
    const child = service('unmended', `throw new KvError('CONFIG', 'c.json: port: is required; correct it'${more});`);
    const [code] = await once(child, 'close');
    expect(child.said()).toBe('unmended: CONFIG: c.json: port: is required; correct it\n');
    return code as number;
  };
  expect(await ended(', { isFinal: true }')).toBe(78);
  // A certificate that is being renewed, a clock that is not set yet, a folder that is not mounted: the next start may do better.
  expect(await ended('')).toBe(1);
});

it('one that is not ready yet is closed before its end; a start that fails late is a failed start', async () => {
  const begins = (how: string) => serving.replace('close:', `begun: ${how}, close:`);
  const child = service('beginning', `say('listens'); ${begins('new Promise(() => {})')}`);
  const messages: unknown[] = [];
  child.on('message', (message) => messages.push(message));
  await vi.waitUntil(() => child.said().includes('listens'), patience);
  child.kill('SIGTERM');
  expect(await once(child, 'close')).toEqual([0, null]);
  expect(child.said()).toBe('listens\nclosed\n');
  expect(messages.some((message) => 'ready' in (message as object))).toBe(false);
  const late = service('late', begins(`Promise.reject(new KvError('MODEL', '/m: cannot be read'))`));
  expect(await once(late, 'close')).toEqual([1, null]);
  expect(late.said()).toBe('late: MODEL: /m: cannot be read\n');
});

it('an option that it does not know is refused before it starts; --version and --help are answers', async () => {
  const ran = async (...args: string[]) => {
    const child = service('asked', `say('started'); ${serving}`, '', '', false, args);
    return { code: (await once(child, 'close'))[0] as number, said: child.said() };
  };
  expect(await ran('--conf', 'c.json')).toEqual({
    code: 78,
    said: 'asked: CONFIG: command line: --conf: unknown option; did you mean --config?\n',
  });
  expect(await ran('--version')).toEqual({ code: 0, said: `asked ${version}\n` });
  expect(await ran('--help')).toEqual({ code: 0, said: serviceHelp('asked') });
});

it('what the command line says is given to the start', async () => {
  const child = service('given', `say(given.configFile); ${serving}`, '', '', false, ['--config=c.json']);
  await once(child, 'message');
  child.kill('SIGTERM');
  await once(child, 'close');
  expect(child.said()).toBe('c.json\nclosed\n');
});

it('a close that fails is one line and exit code 1', async () => {
  const child = service('unclosed', `return { ready: {}, close: async () => { throw new Error('disk is gone'); } };`);
  await once(child, 'message');
  child.kill('SIGTERM');
  expect(await once(child, 'close')).toEqual([1, null]);
  expect(child.said()).toBe('unclosed: while closing: disk is gone\n');
});

it('what nobody caught is told with its stack, and is the end with exit code 1', async () => {
  const thrown = service('thrown', `setTimeout(() => { throw new Error('a defect') }, 50); ${serving}`);
  expect(await once(thrown, 'close')).toEqual([1, null]);
  expect(thrown.said()).toMatch(/^thrown: uncaughtException, a defect: Error: a defect\n {4}at .*thrown\.mjs/);
  const rejected = service('rejected', `setTimeout(() => Promise.reject(new Error('a defect')), 50); ${serving}`);
  expect(await once(rejected, 'close')).toEqual([1, null]);
  expect(rejected.said()).toMatch(/^rejected: unhandledRejection, a defect: Error: a defect\n {4}at .*rejected\.mjs/);
});

// From here on side by side: two of them wait for the deadline of a service.
describe.concurrent('with a file system call that hangs', () => {
  const hangs = hungCall(folder, '.mjs');

  it('ends at SIGTERM with exit code 0', async () => {
    const child = service('hung', serving, hangs);
    await once(child, 'message');
    child.kill('SIGTERM');
    expect(await once(child, 'close')).toEqual([0, null]);
    expect(child.said()).toBe('closed\n');
  });

  it('ends when its supervisor is gone', async () => {
    const child = service('hung-orphan', serving, hangs);
    await once(child, 'message');
    child.disconnect();
    expect(await once(child, 'exit')).toEqual([0, null]);
  });

  it('ends with 1 when it crashes, and when it cannot start', async () => {
    const child = service('hung-crash', serving, hangs);
    await once(child, 'message');
    child.kill('SIGUSR2');
    expect(await once(child, 'close')).toEqual([1, null]);
    expect(child.said()).toMatch(/^hung-crash: uncaughtException, a defect: Error: injected\n/);
    const refused = service('hung-refused', `throw new KvError('LOCKED', '/d: held');`, hangs);
    expect(await once(refused, 'close')).toEqual([1, null]);
  });

  it('a close that waits for it ends at the deadline with a line, and so does one that stands still', async () => {
    const waits = service('waits', `return { ready: {}, close: () => new Promise(() => {}) };`, hangs);
    const stands = service('stands', `return { ready: {}, close: async () => { for (;;); } };`, hangs);
    await Promise.all([once(waits, 'message'), once(stands, 'message')]);
    const begin = performance.now();
    for (const child of [waits, stands]) child.kill('SIGTERM');
    const ends = await Promise.all([once(waits, 'close'), once(stands, 'close')]);
    expect(ends).toEqual([
      [null, 'SIGKILL'],
      [null, 'SIGKILL'],
    ]);
    expect(performance.now() - begin).toBeLessThan(12_000);
    expect(waits.said()).toBe('waits: not closed 8 s after SIGTERM; killed\n');
    expect(stands.said()).toBe('stands: not closed 8 s after SIGTERM; killed\n');
  });

  it('one whose loop stands still ends, too, when its supervisor was killed', async () => {
    const file = join(folder, 'supervisor.mjs');
    const still = join(folder, 'still.mjs');
    const stands = `setTimeout(() => { for (;;); }, 100); return { ready: { pid: process.pid }, close: async () => {} };`;
    service('still', stands).kill('SIGKILL'); // its file stays
    writeFileSync(
      file,
      `import { fork } from 'node:child_process';
       const child = fork(${JSON.stringify(still)});
       child.on('message', (message) => process.send(message));`,
    );
    const supervisor = fork(file, { silent: true });
    const [message] = (await once(supervisor, 'message')) as [{ ready: { pid: number } }];
    const standsFrom = ticksOf(message.ready.pid) + 20; // it does nothing else: it stands still by then
    await vi.waitUntil(() => ticksOf(message.ready.pid) > standsFrom, patience);
    supervisor.kill('SIGKILL');
    await vi.waitUntil(() => !isRunning(message.ready.pid), { timeout: 15_000 });
  });
});

it.concurrent('a reader that stopped reading does not stop it: lines beyond a bound are dropped and counted', async () => {
  const flood = `const log = createLogger('flood', 'info');
    for (let i = 0; i < 20_000; i++) log.info({ i }, 'x'.repeat(200));
    ${serving}`;
  const child = service('flood', flood, '', `import { createLogger } from ${JSON.stringify(telemetryIndex)};`, true);
  expect(await once(child, 'message')).toEqual([{ ready: { url: 'here' } }, undefined]);
  let said = '';
  child.stderr!.on('data', (bytes) => (said += bytes));
  await vi.waitUntil(() => /lines were dropped/.test(said), patience);
  child.kill('SIGTERM');
  expect(await once(child, 'close')).toEqual([0, null]);
  const lines = said
    .trimEnd()
    .split('\n')
    .map((line) => JSON.parse(line) as { i?: number; msg: string });
  const kept = lines.filter(({ i }) => i !== undefined).length;
  expect(kept).toBeGreaterThan(1_000);
  const counted = lines.flatMap(
    ({ msg }) => /^(\d+) lines were dropped: nobody read them in time$/.exec(msg)?.[1] ?? [],
  );
  expect(kept + counted.reduce((sum, count) => sum + Number(count), 0)).toBe(20_000);
});

it.concurrent('the first line of its log says which version starts, from level info on', async () => {
  const imports = `import { serviceLogger } from ${JSON.stringify(telemetryIndex)};`;
  const said = async (level: string): Promise<string> => {
    const child = service(`log-${level}`, `serviceLogger('log', '${level}').warn('later'); ${serving}`, '', imports);
    await once(child, 'message');
    child.kill('SIGTERM');
    await once(child, 'close');
    return child.said();
  };
  const [first, second] = (await said('info'))
    .split('\n')
    .map((line) => JSON.parse(line.startsWith('{') ? line : '{}'));
  expect([first, second]).toMatchObject([
    { name: 'log', version, node: process.version, msg: 'starts' },
    { msg: 'later' },
  ]);
  expect(await said('warn')).not.toContain('starts');
});

it.concurrent('lines to a file are all there at its end', async () => {
  service(
    'to-file',
    `const log = createLogger('to-file', 'info');
    for (let i = 0; i < 2_000; i++) log.info({ i }, 'x'.repeat(200));
    ${serving}`,
    '',
    `import { createLogger } from ${JSON.stringify(telemetryIndex)};`,
  ).kill('SIGKILL'); // its file stays
  const log = join(folder, 'to-file.log');
  const fd = openSync(log, 'a');
  const child = fork(join(folder, 'to-file.mjs'), {
    stdio: ['ignore', 'ignore', fd, 'ipc'],
  });
  closeSync(fd);
  await once(child, 'message');
  child.kill('SIGTERM');
  expect(await once(child, 'exit')).toEqual([0, null]);
  const lines = readFileSync(log, 'utf8')
    .trimEnd()
    .split('\n')
    .map((line) => (JSON.parse(line) as { i: number }).i);
  expect(lines).toEqual(Array.from({ length: 2_000 }, (_, i) => i));
});
