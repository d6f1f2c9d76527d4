/** Pods as gateways, sidecars and clients name them: "HOST:PORT". */
import { isIP } from 'node:net';
import type { WorkerRecord } from '@kvtier/config';

interface Endpoint {
  readonly text: string;
  readonly isAddress: boolean;
}

/** A record never changes: discovery makes new ones. */
const known = new WeakMap<WorkerRecord, Endpoint | undefined>();

/** undefined: it is no pod with OpenAI's API, and cannot be reached so. */
export const endpointOf = (record: WorkerRecord): string | undefined => read(record)?.text;

/** "IP:PORT" or "[IP]:PORT"; undefined, too, where its address has a name in place of an IP: gateways look up none. */
export function ipEndpointOf(record: WorkerRecord): string | undefined {
  const endpoint = read(record);
  return endpoint?.isAddress ? endpoint.text : undefined;
}

function read(record: WorkerRecord): Endpoint | undefined {
  if (known.has(record)) return known.get(record);
  const endpoint = made(record);
  known.set(record, endpoint);
  return endpoint;
}

function made({ kind, address }: WorkerRecord): Endpoint | undefined {
  if (kind !== 'openai' || !URL.canParse(address)) return undefined;
  const { protocol, hostname, port } = new URL(address);
  if (hostname === '' || (protocol !== 'http:' && protocol !== 'https:')) return undefined;
  const text = `${hostname.toLowerCase()}:${port || (protocol === 'http:' ? '80' : '443')}`;
  return { text, isAddress: isIP(hostname.replace(/^\[(.*)\]$/, '$1')) !== 0 };
}
