/** Free ports of the loopback for what this machine's services listen on. */
import { readFileSync } from 'node:fs';
import { type AddressInfo, createServer } from 'node:net';
import { KvError } from '@kvtier/errors';

const lowest = 10_000;
const mostTries = 1_000;

/** The port; or for 0 one that is free. @throws Error of `listen` */
export async function probePort(host: string, port: number): Promise<number> {
  const probe = createServer();
  try {
    await new Promise<void>((resolve, reject) => {
      probe.once('error', reject);
      probe.listen(port, host, resolve);
    });
    return (probe.address() as AddressInfo).port;
  } finally {
    if (probe.listening) await new Promise((resolve) => probe.close(resolve));
  }
}

/**
 * So many ports that nothing listens on, below those that the kernel gives to outgoing connections: a service that is started again
 * finds its port as it left it. @throws KvError SETUP
 */
export async function lastingPorts(host: string, count: number): Promise<number[]> {
  const end = firstOfKernel();
  const ports = new Set<number>();
  for (let tries = 0; ports.size < count; tries++) {
    if (tries === mostTries)
      throw new KvError('SETUP', `${host}: no ${count} free ports from ${lowest} to ${end}; end some servers`);
    const port = lowest + Math.floor(Math.random() * (end - lowest));
    if (!ports.has(port) && (await probePort(host, port).catch(() => -1)) === port) ports.add(port);
  }
  return [...ports];
}

function firstOfKernel(): number {
  try {
    const first = Number.parseInt(readFileSync('/proc/sys/net/ipv4/ip_local_port_range', 'latin1'), 10);
    return first > lowest + mostTries ? first : 32_768;
  } catch {
    return 32_768;
  }
}
