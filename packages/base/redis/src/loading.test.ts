/** A server that is back and loads its data. */
import { once } from 'node:events';
import { createServer, type Socket } from 'node:net';
import { expect, it } from 'vitest';
import { freePort } from '../../../../infra/ports.ts';
import { RedisClient } from './client.ts';

it('is said to be not ready, whatever was before, and is used soon after it is, whatever time it named', async () => {
  const port = await freePort();
  const settings = {
    mode: 'single',
    servers: [`redis://127.0.0.1:${port}`],
    database: 0,
    timeLimitMs: 20_000,
  } as const;
  const client = new RedisClient(settings, () => {}, 50);
  let isLoading = true;
  const sockets = new Set<Socket>();
  const server = createServer((socket) => {
    sockets.add(socket);
    // INFO, and nothing else.
    socket.on('data', () => {
      const text = isLoading ? 'loading:1\r\nloading_eta_seconds:3600\r\n' : 'loading:0\r\n';
      socket.write(`$${text.length}\r\n${text}\r\n`);
    });
    socket.on('error', () => {});
  });
  try {
    await expect(client.ready(100)).rejects.toThrow('ECONNREFUSED');
    await once(server.listen(port, '127.0.0.1'), 'listening');
    await expect(client.ready(2_000)).rejects.toMatchObject({
      ...{ code: 'DEADLINE', retry: true },
      message:
        'redis: the server is connected and not ready; it may be loading its data: wait, or check that it speaks Redis',
    });
    isLoading = false;
    await client.ready(5_000);
    expect(client.isReady).toBe(true);
  } finally {
    client.close();
    for (const socket of sockets) socket.destroy();
    server.close();
  }
});
