/** A client that stands still, its connection open: what it had of the engine ends, and what others have does not. */
import { type ChildProcess, spawn } from 'node:child_process';
import { once } from 'node:events';
import { mkdtempSync, rmSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import type { GenerateRequest } from '@kvtier/scheduler';
import {
  clientCredentials,
  EngineClient,
  EngineService,
  startGrpcServer,
  type GenerateRequest as WireRequest,
} from '@kvtier/wire/grpc';
import { expect, it, onTestFinished, vi } from 'vitest';
import { engineService, liveness } from './service.ts';

const patience = { timeout: 60_000 };
/** What is promised is gone so long after its owner. */
const goneMs = 2_000;
/** The machine does other things, too; gRPC's own limits are 20 s. */
const busyMs = 10_000;

const request = (requestId: string): WireRequest => ({
  ...{ requestId, promptTokenIds: [1], maxTokens: 4, temperature: 0, topK: 0, topP: 1, seed: 1n, ignoreEos: true },
  ...{ stopTokenIds: [], cacheSalt: '', loraName: '' },
});

/** Another process that has one request open. */
function stranger(address: string): ChildProcess {
  const script = `
    const { clientCredentials, EngineClient } = await import('@kvtier/wire/grpc');
    const client = new EngineClient(${JSON.stringify(address)}, clientCredentials(${JSON.stringify(address)}));
    client.generate({ ...${JSON.stringify({ ...request('frozen'), seed: undefined })} }).on('error', () => {}).on('data', () => {});
  `;
  return spawn(process.execPath, ['--import', 'tsx', '--input-type=module', '-e', script], {
    cwd: import.meta.dirname,
    stdio: ['ignore', 'ignore', 'inherit'],
  });
}

it('the limits of a silent client are within what is promised', () => {
  const { 'grpc.keepalive_time_ms': timeMs, 'grpc.keepalive_timeout_ms': limitMs } = liveness;
  expect(timeMs + limitMs).toBeLessThan(goneMs);
});

it('its calls end within two seconds; a client that lives keeps its own', { timeout: 120_000 }, async () => {
  const folder = mkdtempSync(join(tmpdir(), 'kvtier-liveness-'));
  const submitted: string[] = [];
  const aborted: string[] = [];
  const engine = {
    submit: ({ requestId }: GenerateRequest) => void submitted.push(requestId),
    abort: (id: string) => aborted.push(id) > 0,
  };
  const metrics = { observeEnd: () => {} };
  const watches = { over: () => {}, begun: () => {}, taken: () => {} };
  const parts = { engine, metrics, watches, describe: () => ({}), prefetches: {} };
  const service = engineService(parts as unknown as Parameters<typeof engineService>[0]);
  const server = await startGrpcServer(`unix:${join(folder, 's')}`, (grpc) => grpc.addService(EngineService, service), {
    channel: liveness,
  });
  const client = new EngineClient(server.address, clientCredentials(server.address));
  const child = stranger(server.address);
  onTestFinished(async () => {
    child.kill('SIGKILL');
    if (child.exitCode === null && child.signalCode === null) await once(child, 'exit');
    client.close();
    await server.close(0);
    rmSync(folder, { recursive: true });
  });
  client.generate(request('lives')).on('error', () => {});
  await vi.waitUntil(() => submitted.length === 2, patience);
  const nameOf = (id: string): string => id.split('@')[0]!;
  expect(submitted.map(nameOf).sort()).toEqual(['frozen', 'lives']);
  expect(aborted).toEqual([]);
  child.kill('SIGSTOP');
  const atMs = performance.now();
  await vi.waitUntil(() => aborted.length > 0, patience);
  expect(aborted.map(nameOf)).toEqual(['frozen']);
  expect(performance.now() - atMs).toBeLessThan(goneMs + busyMs);
  child.kill('SIGCONT');
  expect(aborted).toHaveLength(1);
});
