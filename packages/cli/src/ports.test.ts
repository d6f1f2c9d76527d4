import { once } from 'node:events';
import { type AddressInfo, createServer } from 'node:net';
import { expect, it } from 'vitest';
import { lastingPorts, probePort } from './ports.ts';

const host = '127.0.0.1';

it('are free, different, and below those of outgoing connections', async () => {
  const ports = await lastingPorts(host, 8);
  expect(new Set(ports).size).toBe(8);
  for (const port of ports) {
    expect(port).toBeGreaterThanOrEqual(10_000);
    expect(port).toBeLessThan(32_768);
    expect(await probePort(host, port)).toBe(port);
  }
});

it('are not free where somebody listens', async () => {
  const server = createServer().listen(0, host);
  await once(server, 'listening');
  await expect(probePort(host, (server.address() as AddressInfo).port)).rejects.toThrow('EADDRINUSE');
  server.close();
});
