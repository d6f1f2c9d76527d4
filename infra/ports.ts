/** Ports for servers of tests: below those that the kernel gives to outgoing connections, so that nobody takes them meanwhile. */
import { createServer } from 'node:net';

const host = '127.0.0.1';
/** Test files that run at a time draw from lanes of their own: between the look and the server others would take it. */
const [first, lanes, lanePorts] = [15_000, 5, 1_400];
const lane = Number(process.env.VITEST_POOL_ID ?? 0) % lanes;
const given = new Set<number>();

/** A port that nothing listens on; the one 10,000 above it, which is a Redis Cluster's for its bus, is free, too. */
export async function freePort(): Promise<number> {
  for (;;) {
    const port = first + lane * lanePorts + Math.floor(Math.random() * lanePorts);
    if (given.has(port)) continue;
    given.add(port);
    if (given.size >= lanePorts / 2) given.clear();
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
