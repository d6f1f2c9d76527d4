/** Where KV events may be published, as a configuration is read and as a socket is bound. Names: ZeroMQ's. */

/** sockaddr_un. */
const maxIpcPathBytes = 107;
const tcp = /^tcp:\/\/(\[[^\]]+\]|[^:]+):(\d+|\*)$/;

/** As it stands in an endpoint. */
export const isLoopbackHost = (host: string): boolean =>
  host === 'localhost' || host === '[::1]' || /^127\.\d{1,3}\.\d{1,3}\.\d{1,3}$/.test(host);

/** What lets others than this host in. */
export interface Openness {
  readonly hasCurve: boolean;
  readonly trustedNetwork: boolean;
}

/** Why it cannot be bound, or may not be open to others, and how to mend it; undefined: it can. */
export function unbindable(endpoint: string, { hasCurve, trustedNetwork }: Openness): string | undefined {
  const path = /^ipc:\/\/(.+)$/.exec(endpoint)?.[1];
  if (path !== undefined) {
    const isLong = Buffer.byteLength(path) > maxIpcPathBytes;
    return isLong ? `its path is longer than ${maxIpcPathBytes} bytes; choose a shorter one` : undefined;
  }
  const [, host, port] = tcp.exec(endpoint) ?? [];
  if (host === undefined || Number(port) > 65_535) return 'not an endpoint; write ipc:///PATH or tcp://127.0.0.1:PORT';
  if (hasCurve || trustedNetwork || isLoopbackHost(host)) return undefined;
  return 'open to the network; bind to 127.0.0.1, configure "curve", or say "trustedNetwork": true';
}
