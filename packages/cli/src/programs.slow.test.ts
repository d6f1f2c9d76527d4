/** The bundles, as they are started. */
import { spawn } from 'node:child_process';
import { once } from 'node:events';
import { mkdtempSync, readdirSync, rmSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { dirname, join } from 'node:path';
import { expect, it } from 'vitest';
import { program } from './programs.ts';

it('maps of a program, and of what programs share, are read before it is ready: no first failure waits for them', async () => {
  const folder = mkdtempSync(join(tmpdir(), 'kvtier-programs-'));
  const preload = join(folder, 'preload.cjs');
  writeFileSync(
    preload,
    `const nodeModule = require('node:module');
     const { findSourceMap } = nodeModule;
     nodeModule.findSourceMap = (path) => { process.send({ asked: path }); return findSourceMap(path); };
     nodeModule.syncBuiltinESMExports();`,
  );
  const args = program('coordinator');
  const config = { port: 0, discovery: { kind: 'static', workers: [] }, logLevel: 'error' };
  const child = spawn(process.execPath, ['--require', preload, ...args], {
    stdio: ['ignore', 'ignore', 'inherit', 'ipc'],
    env: { ...process.env, KVTIER_CONFIG: JSON.stringify(config) },
  });
  const asked: string[] = [];
  await new Promise<void>((resolve, reject) => {
    child.on('message', (message: { asked?: string; ready?: object }) => {
      if (message.asked !== undefined) asked.push(message.asked);
      if (message.ready !== undefined) resolve();
    });
    child.on('exit', (code) => reject(new Error(`the coordinator ended with ${code}`)));
  });
  const main = args.at(-1)!;
  const shared = join(dirname(main), '../../shared');
  const programs = readdirSync(shared).filter((file) => file.endsWith('.mjs'));
  expect(programs.length).toBeGreaterThan(0);
  expect(asked.sort()).toEqual([main, ...programs.map((file) => join(shared, file))].sort());
  child.removeAllListeners('exit');
  const ended = once(child, 'exit');
  child.kill('SIGTERM');
  expect(await ended).toEqual([0, null]);
  rmSync(folder, { recursive: true, force: true });
});
