/** The life of a service process, on real processes with a real IPC channel. */
import { type ChildProcess, fork } from 'node:child_process';
import { once } from 'node:events';
import { mkdtempSync, rmSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { afterAll, expect, it, vi } from 'vitest';

/** Of conditions that hold at once, on a machine that does many other things. */
const patience = { timeout: 20_000 };

vi.setConfig({ testTimeout: 20_000 });

const folder = mkdtempSync(join(tmpdir(), 'kvtier-service-'));
afterAll(() => rmSync(folder, { recursive: true, force: true }));

const telemetry = new URL('./service.ts', import.meta.url).href;
const errors = new URL('../../errors/src/index.ts', import.meta.url).href;

/** A process whose service starts with `start`, the body of an async function. */
function service(name: string, start: string): ChildProcess & { said: () => string } {
  const file = join(folder, `${name}.mjs`);
  writeFileSync(
    file,
    `import { runService } from ${JSON.stringify(telemetry)};
     import { KvError } from ${JSON.stringify(errors)};
     const say = (text) => process.stdout.write(text + '\\n');
     runService(${JSON.stringify(name)}, async () => { ${start} });`,
  );
  const child = fork(file, { execArgv: ['--import', import.meta.resolve('tsx')], silent: true });
  let said = '';
  child.stdout!.on('data', (bytes) => (said += bytes));
  child.stderr!.on('data', (bytes) => (said += bytes));
  return Object.assign(child, { said: () => said });
}

const serving = `const timer = setInterval(() => {}, 1000);
  return { ready: { url: 'here' }, close: async () => { clearInterval(timer); say('closed'); } };`;

it.each(['SIGTERM', 'SIGINT'] as const)('says ready, closes in order at %s, exits with 0', async (signal) => {
  const child = service(`signal-${signal}`, serving);
  expect(await once(child, 'message')).toEqual([{ ready: { url: 'here' } }, undefined]);
  child.kill(signal);
  expect(await once(child, 'close')).toEqual([0, null]);
  expect(child.said()).toBe('closed\n');
});

it('closes when its supervisor is gone', async () => {
  const child = service('orphan', serving);
  await once(child, 'message');
  child.disconnect();
  expect(await once(child, 'exit')).toEqual([0, null]); // Node emits no 'close' after our own disconnect
  await vi.waitUntil(() => child.said() === 'closed\n', patience);
});

it('a start that fails is one line and exit code 1', async () => {
  const child = service('refused', `throw new KvError('LOCKED', '/d: held by pid 7; stop it');`);
  expect(await once(child, 'close')).toEqual([1, null]);
  expect(child.said()).toBe('refused: LOCKED: /d: held by pid 7; stop it\n');
});

it('a close that fails is one line and exit code 1', async () => {
  const child = service('unclosed', `return { ready: {}, close: async () => { throw new Error('disk is gone'); } };`);
  await once(child, 'message');
  child.kill('SIGTERM');
  expect(await once(child, 'close')).toEqual([1, null]);
  expect(child.said()).toBe('unclosed: while closing: disk is gone\n');
});
