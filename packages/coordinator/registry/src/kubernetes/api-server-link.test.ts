/** What is shown to an API server; the rest is in kubernetes-discovery.slow.test.ts. */
import { once } from 'node:events';
import { mkdtempSync, rmSync, writeFileSync } from 'node:fs';
import { createServer } from 'node:http';
import type { AddressInfo, Socket } from 'node:net';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { afterEach, beforeEach, expect, it, vi } from 'vitest';
import { ApiServerLink } from './api-server-link.ts';

const never = new AbortController().signal;
const shown: (string | undefined)[] = [];
let taken = 'Bearer one';
/** Told of each connection that it does not answer. */
let onSilent: ((socket: Socket) => void) | undefined;
const server = createServer(({ headers, socket }, response) => {
  if (onSilent !== undefined) return onSilent(socket);
  shown.push(headers.authorization);
  response.writeHead(headers.authorization === taken ? 200 : 401).end('{"kind":"List"}');
});
let folder: string;
let link: ApiServerLink;

/** A kubeconfig of a cluster at `place`, with a user of this token. */
const write = (token: string, place = server.address() as AddressInfo): void =>
  writeFileSync(
    join(folder, 'config'),
    JSON.stringify({
      ...{ apiVersion: 'v1', kind: 'Config', 'current-context': 'x' },
      clusters: [
        { name: 'c', cluster: { server: `http://127.0.0.1:${place.port}`, 'insecure-skip-tls-verify': true } },
      ],
      users: [{ name: 'u', user: { token } }],
      contexts: [{ name: 'x', context: { cluster: 'c', user: 'u' } }],
    }),
  );
const get = (): Promise<unknown> => link.get('/api/v1/pods', {}, never);

beforeEach(async () => {
  vi.useFakeTimers({ toFake: ['performance'] });
  taken = 'Bearer one';
  shown.length = 0;
  server.listen(0, '127.0.0.1');
  await once(server, 'listening');
  folder = mkdtempSync(join(tmpdir(), 'kvtier-kubeconfig-'));
  write('one');
  link = await ApiServerLink.open({ kubeconfig: join(folder, 'config'), timeLimitMs: 20_000 });
});
afterEach(() => {
  onSilent = undefined;
  vi.useRealTimers();
  rmSync(folder, { recursive: true });
  server.closeAllConnections();
  server.close();
});

it('a token in the file that was replaced is read when the old one is refused', async () => {
  await expect(get()).resolves.toEqual({ kind: 'List' });
  write('two');
  taken = 'Bearer two';
  vi.advanceTimersByTime(60_000);
  await expect(get()).resolves.toEqual({ kind: 'List' });
  await get();
  expect(shown).toEqual(['Bearer one', 'Bearer one', 'Bearer two', 'Bearer two']);
});

it('the file is read once a second at most, and what cannot be read changes nothing', async () => {
  taken = 'Bearer three';
  await expect(get()).rejects.toMatchObject({ status: 401 });
  vi.advanceTimersByTime(1_000);
  write('two');
  for (let i = 0; i < 3; i++) await expect(get()).rejects.toMatchObject({ status: 401 });
  expect(shown).toEqual(['one', 'one', 'two', 'two', 'two'].map((token) => `Bearer ${token}`));
  vi.advanceTimersByTime(1_000);
  writeFileSync(join(folder, 'config'), '{');
  await expect(get()).rejects.toMatchObject({ status: 401 });
  expect(shown).toHaveLength(6);
});

it('the user of another cluster is shown to nobody', async () => {
  vi.advanceTimersByTime(60_000);
  taken = 'Bearer two';
  write('two', { port: 1 } as AddressInfo);
  await expect(get()).rejects.toMatchObject({ status: 401 });
  expect(shown).toEqual(['Bearer one']);
});

it('a watch that is not answered in time leaves no connection', async () => {
  const impatient = await ApiServerLink.open({ kubeconfig: join(folder, 'config'), timeLimitMs: 100 });
  const closed = new Promise<unknown>((resolve) => {
    onSilent = (socket) => void once(socket, 'close').then(resolve);
  });
  const options = { limitMs: 60_000, signal: never, onOpen: () => {} };
  await expect(impatient.watch('/api/v1/pods', {}, options, () => {})).rejects.toThrow(/no answer within 100 ms/);
  await closed;
});
