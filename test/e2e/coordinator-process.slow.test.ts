/** The coordinator as a process: one clear line for what cannot work, a ready message, a clean end. */
import { type ChildProcess, spawn } from 'node:child_process';
import { once } from 'node:events';
import { mkdtempSync, rmSync, writeFileSync } from 'node:fs';
import { createServer } from 'node:net';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { program } from '@kvtier/cli';
import { ScriptedEngine, say } from '@kvtier/registry/testing';
import { afterEach, beforeEach, describe, expect, it } from 'vitest';

const modelDir = join(import.meta.dirname, '../../models/demo/model');

let dir: string;
let engine: ScriptedEngine;
let child: ChildProcess | undefined;
beforeEach(async () => {
  dir = mkdtempSync(join(tmpdir(), 'kvtier-coordinator-'));
  engine = new ScriptedEngine(`unix:${dir}/engine.sock`, modelDir);
  engine.script = say([200], 'length');
  await engine.start();
});
afterEach(async () => {
  if (child?.exitCode === null && child.signalCode === null) {
    child.kill('SIGKILL');
    await once(child, 'exit');
  }
  await engine.stop();
  rmSync(dir, { recursive: true, force: true });
});

function start(config: unknown): { child: ChildProcess; stderr: () => string } {
  const file = join(dir, 'config.json');
  writeFileSync(file, JSON.stringify(config));
  const started = spawn(process.execPath, [...program('coordinator'), '--config', file], {
    stdio: ['ignore', 'inherit', 'pipe', 'ipc'],
  });
  let stderr = '';
  started.stderr!.on('data', (bytes) => (stderr += bytes));
  child = started;
  return { child: started, stderr: () => stderr };
}

describe('coordinator process', () => {
  it('says ready with its URL, serves, and ends on SIGTERM', async () => {
    const { child: process } = start({ port: 0, engine: `unix:${dir}/engine.sock`, logLevel: 'warn' });
    const [message] = (await once(process, 'message')) as [{ ready: { url: string } }];
    const response = await fetch(`${message.ready.url}/v1/completions`, {
      method: 'POST',
      headers: { 'content-type': 'application/json' },
      body: JSON.stringify({ prompt: 'a', max_tokens: 1 }),
    });
    expect(response.status).toBe(200);
    process.kill('SIGTERM');
    expect(await once(process, 'exit')).toEqual([0, null]);
  });

  it('a taken port is one line and exit code 1', async () => {
    const holder = createServer().listen(0, '127.0.0.1');
    await once(holder, 'listening');
    const { port } = holder.address() as { port: number };
    const { child: process, stderr } = start({ port, engine: `unix:${dir}/engine.sock`, logLevel: 'warn' });
    expect(await once(process, 'close')).toEqual([1, null]);
    expect(stderr()).toBe(
      `coordinator: LOCKED: 127.0.0.1:${port}: another process listens there; choose another port with --port, or port in its configuration\n`,
    );
    holder.close();
  });

  it('a model without a tokenizer is one line and exit code 1', async () => {
    engine.description = { ...engine.description, modelDir: dir };
    const { child: process, stderr } = start({ port: 0, engine: `unix:${dir}/engine.sock`, logLevel: 'error' });
    expect(await once(process, 'close')).toEqual([1, null]);
    expect(stderr()).toMatch(/^coordinator: MODEL: .*tokenizer\.json: cannot be read \(ENOENT\).*\n$/);
  });

  it('refuses to listen beyond this machine in plain text', async () => {
    const { child: process, stderr } = start({ host: '0.0.0.0', port: 0, engine: 'unix:/x', logLevel: 'error' });
    expect(await once(process, 'close')).toEqual([78, null]);
    expect(stderr()).toMatch(/^coordinator: CONFIG: .*tls: 0\.0\.0\.0 is not loopback: .*\n$/);
  });
});
