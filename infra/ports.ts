/** Ports for servers of tests: below those that the kernel gives to outgoing connections, so that nobody takes them meanwhile. */
import { createServer } from 'node:net';

const host = '127.0.0.1';

/** A port that nothing listens on; the one 10,000 above it, which is a Redis Cluster's for its bus, is free, too. */
export async function freePort(): Promise<number> {
  for (;;) {
    const port = 15_000 + Math.floor(Math.random() * 7_000);
    if ((await isFree(port)) && (await isFree(port + 10_000))) return port;
  }
}

function isFree(port: number): Promise<boolean> {
  return new Promise((resolve) => {
    const server = createServer();
    server.once('error', () => resolve(false));
    server.listen(port, host, () => server.close(() => resolve(true)));
  });
}
