/** Servers at which something else is spoken than the configuration says: one line that tells what, and how to mend it. */
import { mkdtempSync, readFileSync, rmSync } from 'node:fs';
import { createServer as createHttp } from 'node:http';
import net, { type AddressInfo, type Socket } from 'node:net';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { createServer as createTls } from 'node:tls';
import { ownCertificate } from '@kvtier/config/testing';
import { afterAll, expect, it } from 'vitest';
import { RedisClient } from './client.ts';

const dir = mkdtempSync(join(tmpdir(), 'kvtier-speech-'));
afterAll(() => rmSync(dir, { recursive: true }));
ownCertificate(dir, 'own');
const [cert, key] = ['pem', 'key'].map((kind) => readFileSync(join(dir, `own.${kind}`)));

const answering = (answer: string) => (socket: Socket) =>
  void socket.on('error', () => {}).on('data', () => socket.write(answer, 'latin1'));
const servers: Readonly<Record<string, () => net.Server>> = {
  HTTP: () => createHttp((_, response) => response.end()),
  HTTPS: () => createTls({ cert, key }, answering('HTTP/1.1 400 Bad Request\r\n\r\n')),
  'plain Redis': () => net.createServer(answering('-ERR Protocol error\r\n')),
  'TLS with an alert': () => net.createServer(answering('\x15\x03\x03\x00\x02\x02\x0a')),
  'TLS without a word': () => createTls({ cert, key }),
  'what closes': () =>
    net.createServer((socket) => void socket.on('error', () => {}).on('data', () => socket.destroy())),
  'TLS that resets': () =>
    net.createServer((socket) => void socket.on('error', () => {}).on('data', () => socket.resetAndDestroy())),
  'what waits': () => net.createServer((socket) => void socket.on('error', () => {}).resume()),
  SSH: () => net.createServer((socket) => void socket.on('error', () => {}).write('SSH-2.0-x\r\n')),
};

async function said(what: string, scheme: string): Promise<string> {
  const server = servers[what]!();
  const open = new Set<Socket>();
  server.on('connection', (socket) => open.add(socket));
  await new Promise<void>((resolve) => server.listen(0, '127.0.0.1', resolve));
  const { port } = server.address() as AddressInfo;
  const tls = scheme === 'rediss' ? { caFile: join(dir, 'own.pem') } : undefined;
  const place = { mode: 'single', servers: [`${scheme}://127.0.0.1:${port}`], database: 0 } as const;
  const client = new RedisClient({ ...place, timeLimitMs: 500, tls }, () => {});
  try {
    return await client.ready(what === 'what waits' ? 1_000 : 400).then(
      () => 'ready',
      ({ code, message }) => `${code} ${message}`,
    );
  } finally {
    client.close();
    for (const socket of open) socket.destroy();
    server.close();
  }
}

const port = 'name the port of Redis in servers';
it.each([
  ['HTTP', 'redis', `IO redis: the server answers in HTTP, not in Redis' protocol; ${port}`],
  ['HTTPS', 'rediss', `IO redis: the server answers in HTTP, not in Redis' protocol; ${port}`],
  ['SSH', 'redis', `IO redis: the server does not answer in Redis' protocol; ${port}`],
  ['TLS with an alert', 'redis', 'IO redis: the server answers in TLS; write rediss: in servers'],
  [
    'TLS without a word',
    'redis',
    'DEADLINE redis: the server ends every connection without a word; write rediss: if it speaks TLS at this port',
  ],
  [
    'plain Redis',
    'rediss',
    'CONFIG redis: the server does not answer in TLS; write redis: in servers, without tls, or name its port for TLS',
  ],
  [
    'HTTP',
    'rediss',
    'CONFIG redis: the server does not answer in TLS; write redis: in servers, without tls, or name its port for TLS',
  ],
  [
    'what closes',
    'rediss',
    'IO redis: the server ended the connection before TLS was spoken; write redis: in servers if it speaks none',
  ],
  ['TLS that resets', 'redis', 'IO redis: read ECONNRESET; write rediss: in servers if they speak TLS at this port'],
  [
    'what waits',
    'rediss',
    'IO redis: connect ETIMEDOUT; check that servers can be reached; write redis: if they speak no TLS at this port',
  ],
])('%s, asked by %s:', async (what, scheme, line) => expect(await said(what, scheme)).toBe(line));
