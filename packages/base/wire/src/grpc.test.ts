/** gRPC helpers against real servers on Unix sockets. */
import { spawn } from 'node:child_process';
import { once } from 'node:events';
import {
  chmodSync,
  chownSync,
  mkdirSync,
  mkdtempSync,
  readdirSync,
  readFileSync,
  renameSync,
  rmSync,
  statSync,
  utimesSync,
  writeFileSync,
} from 'node:fs';
import { createServer } from 'node:net';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { type ServiceError, status } from '@grpc/grpc-js';
import { codes, KvError, type KvErrorCode } from '@kvtier/errors';
import { afterEach, beforeEach, expect, it } from 'vitest';
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
  const client = new EngineClient(address, clientCredentials(address), channelOptions);
  return new Promise<string>((resolve, reject) =>
    client.metrics({}, { deadline: deadlineAfter(5_000) } as never, (error: ServiceError | null, answer) =>
      error ? reject(error) : resolve(answer.prometheus),
    ),
  ).finally(() => client.close());
}

it('a Unix socket is private, and a live one is not replaced', async () => {
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

it('nothing is made outside of the socket’s own folder: the one above may be another user’s', async () => {
  const own = join(folder, 'own');
  mkdirSync(own, { mode: 0o700 });
  utimesSync(folder, 1_000, 1_000);
  const server = await serve(`unix:${own}/s`, () => 'one');
  expect(statSync(folder).mtimeMs).toBe(1_000_000);
  expect(readdirSync(own)).toEqual(['s']);
  await server.close();
});

it('a stale socket is replaced', async () => {
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

it('a file that is no socket stays where it is', async () => {
  const path = join(folder, 's');
  writeFileSync(path, 'of somebody');
  await expect(serve(`unix:${path}`, () => 'new')).rejects.toMatchObject({
    ...{ code: 'SETUP', message: `${path}: is there, and is no socket; choose another address` },
  });
  expect(readFileSync(path, 'utf8')).toBe('of somebody');
});

it('a server that is being started changes nothing that the process makes meanwhile', async () => {
  const modes = new Set<number>();
  let made = 0;
  let started = false;
  const make = (): void => {
    if (started) return;
    const path = join(folder, `made${made++}`);
    mkdirSync(path);
    modes.add(statSync(path).mode & 0o777);
    // Between any two steps of the start, and so that others have their turn.
    if (made < 1_000) (made % 10 === 0 ? setImmediate : process.nextTick)(make);
  };
  const server = await startGrpcServer(`unix:${join(folder, 's')}`, () => make());
  started = true;
  expect(made).toBeGreaterThan(5);
  expect(modes).toEqual(new Set([0o777 & ~process.umask()]));
  await server.close();
  expect(readdirSync(folder).filter((name) => !name.startsWith('made'))).toEqual([]);
});

it('of servers that start at once on one path, one serves', async () => {
  const address = `unix:${join(folder, 's')}`;
  const outcomes = await Promise.allSettled(['a', 'b', 'c'].map((name) => serve(address, () => name)));
  const running = outcomes.filter((outcome) => outcome.status === 'fulfilled');
  const refused = outcomes.filter((outcome) => outcome.status === 'rejected');
  expect(running).toHaveLength(1);
  expect(refused.map(({ reason }) => (reason as KvError).code)).toEqual(['LOCKED', 'LOCKED']);
  expect(['a', 'b', 'c']).toContain(await ask(address));
  await running[0]!.value.close();
});

it('a folder that others may write to, or that is another user’s, holds no socket', async () => {
  const address = `unix:${join(folder, 's')}`;
  for (const mode of [0o1777, 0o777, 0o770]) {
    chmodSync(folder, mode);
    await expect(serve(address, () => '')).rejects.toMatchObject({
      code: 'SETUP',
      message: expect.stringContaining('others may write there'),
    });
  }
  chmodSync(folder, 0o700);
  if (process.getuid!() !== 0) return;
  chownSync(folder, 65_534, 65_534);
  await expect(serve(address, () => '')).rejects.toMatchObject({
    code: 'SETUP',
    message: expect.stringContaining('belongs to user 65534'),
  });
});

// Needs another user.
it.runIf(process.getuid!() === 0)('a server of another user is not sent a byte', async () => {
  const path = join(folder, 's');
  chmodSync(folder, 0o777);
  const script = `
    require('node:net').createServer((socket) => {
      process.stdout.write('connected\\n');
      socket.on('data', (bytes) => process.stdout.write('heard ' + bytes.length + '\\n'));
      socket.on('error', () => {});
    }).listen(${JSON.stringify(path)}, () => process.stdout.write('listening\\n'));`;
  const other = spawn(process.execPath, ['-e', script], {
    uid: 65_534,
    gid: 65_534,
    stdio: ['ignore', 'pipe', 'inherit'],
  });
  let heard = '';
  other.stdout.on('data', (bytes) => (heard += bytes));
  await once(other.stdout, 'data');
  chmodSync(folder, 0o755);
  const refusals: KvError[] = [];
  const client = new EngineClient(
    `unix:${path}`,
    clientCredentials(`unix:${path}`, (why) => refusals.push(why)),
    channelOptions,
  );
  const failure = await new Promise<ServiceError | null>((resolve) =>
    client.metrics({}, { deadline: deadlineAfter(5_000) } as never, (error: ServiceError | null) => resolve(error)),
  );
  client.close();
  expect(fromStatus(failure).code).toBe('DISCONNECTED');
  expect(refusals[0]).toMatchObject({
    code: 'SETUP',
    message: `${path}: is served by a process of user 65534 (pid ${other.pid}), not by ours; end it or choose a private folder`,
  });
  // It may come to know of the connection after we have left.
  while (!heard.includes('connected')) await once(other.stdout, 'data');
  other.kill();
  await once(other, 'close');
  expect(heard).toMatch(/^listening\n(connected\n)+$/);
});

it('port 0 is replaced by the port; a port in use is LOCKED', async () => {
  const server = await serve('127.0.0.1:0', () => 'tcp');
  expect(server.address).toMatch(/^127\.0\.0\.1:[1-9]\d*$/);
  await expect(ask(server.address)).resolves.toBe('tcp');
  await expect(serve(server.address, () => '')).rejects.toMatchObject({ code: 'LOCKED' });
  await server.close();
});

it('a KvError crosses with code, retry and tier; other throws become IO', async () => {
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

it('nobody listening is DISCONNECTED and may be retried', async () => {
  const error = fromStatus(await ask(`unix:${join(folder, 'nobody')}`).catch((thrown: unknown) => thrown));
  expect(error).toMatchObject({ code: 'DISCONNECTED', retry: true });
  expect(fromStatus({ code: status.UNKNOWN, details: 'odd' })).toMatchObject({ code: 'IO', message: 'odd' });
});
