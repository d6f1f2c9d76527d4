/** gRPC helpers against real servers on Unix sockets. */
import { mkdtempSync, renameSync, rmSync, statSync } from 'node:fs';
import { createServer } from 'node:net';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { type ServiceError, status } from '@grpc/grpc-js';
import { codes, KvError, type KvErrorCode } from '@kvtier/errors';
import { afterEach, beforeEach, expect, test } from 'vitest';
import {
  channelOptions,
  clientCredentials,
  deadlineAfter,
  EngineClient,
  EngineService,
  fromStatus,
  startGrpcServer,
  toStatus,
  unary,
} from './grpc.ts';

let folder: string;
beforeEach(() => {
  folder = mkdtempSync(join(tmpdir(), 'kvtier-grpc-'));
});
afterEach(() => rmSync(folder, { recursive: true }));

function serve(address: string, metrics: () => string) {
  return startGrpcServer(address, (server) =>
    server.addService(EngineService, {
      describe: unary(() => Promise.reject(new KvError('MODEL', 'none here'))),
      generate: (call: { end(): void }) => call.end(),
      resetPrefixCache: unary(() => ({ done: true })),
      pinPrefix: unary(() => ({ pinnedTokens: 0 })),
      unpinPrefix: unary(() => ({ done: false })),
      metrics: unary(() => ({ prometheus: metrics() })),
    }),
  );
}

function ask(address: string): Promise<string> {
  const client = new EngineClient(address, clientCredentials(), channelOptions);
  return new Promise<string>((resolve, reject) =>
    client.metrics({}, { deadline: deadlineAfter(5_000) } as never, (error: ServiceError | null, answer) =>
      error ? reject(error) : resolve(answer.prometheus),
    ),
  ).finally(() => client.close());
}

test('a Unix socket is private, and a live one is not replaced', async () => {
  const address = `unix:${join(folder, 's')}`;
  const umask = process.umask();
  const server = await serve(address, () => 'one');
  expect(process.umask()).toBe(umask);
  expect(statSync(join(folder, 's')).mode & 0o777).toBe(0o600);
  await expect(ask(address)).resolves.toBe('one');
  await expect(serve(address, () => 'two')).rejects.toMatchObject({ code: 'LOCKED' });
  await expect(ask(address)).resolves.toBe('one');
  await server.close();
});

test('a stale socket is replaced', async () => {
  const path = join(folder, 's');
  // A socket whose server is gone without unlinking: bind elsewhere, rename, close.
  const dead = createServer().listen(join(folder, 'other'));
  await new Promise((resolve) => dead.once('listening', resolve));
  renameSync(join(folder, 'other'), path);
  await new Promise((resolve) => dead.close(resolve));
  const server = await serve(`unix:${path}`, () => 'new');
  await expect(ask(`unix:${path}`)).resolves.toBe('new');
  await server.close();
});

test('port 0 is replaced by the port; a port in use is LOCKED', async () => {
  const server = await serve('127.0.0.1:0', () => 'tcp');
  expect(server.address).toMatch(/^127\.0\.0\.1:[1-9]\d*$/);
  await expect(ask(server.address)).resolves.toBe('tcp');
  await expect(serve(server.address, () => '')).rejects.toMatchObject({ code: 'LOCKED' });
  await server.close();
});

test('a KvError crosses with code, retry and tier; other throws become IO', async () => {
  const failing = await serve(`unix:${join(folder, 'f')}`, () => {
    throw new KvError('BUSY', 'queue is full', { retry: true, tier: 'disk' });
  });
  const error = fromStatus(await ask(failing.address).catch((thrown: unknown) => thrown));
  expect(error).toMatchObject({ code: 'BUSY', message: 'queue is full', retry: true, tier: 'disk' });
  await failing.close();
  expect(fromStatus(toStatus(new Error('boom')))).toMatchObject({ code: 'IO', message: 'boom' });
  for (const code of Object.keys(codes) as KvErrorCode[]) {
    expect(fromStatus(toStatus(new KvError(code, 'x'))).code).toBe(code);
  }
});

test('nobody listening is DISCONNECTED and may be retried', async () => {
  const error = fromStatus(await ask(`unix:${join(folder, 'nobody')}`).catch((thrown: unknown) => thrown));
  expect(error).toMatchObject({ code: 'DISCONNECTED', retry: true });
  expect(fromStatus({ code: status.UNKNOWN, details: 'odd' })).toMatchObject({ code: 'IO', message: 'odd' });
});
