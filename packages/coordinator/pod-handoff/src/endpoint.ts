/** Pods as gateways, sidecars and clients name them: "HOST:PORT". */
import type { WorkerRecord } from '@kvtier/config';

/** A record never changes: discovery makes new ones. */
const known = new WeakMap<WorkerRecord, string | undefined>();

/** undefined: it is no pod with OpenAI's API, and cannot be reached so. */
export function endpointOf(record: WorkerRecord): string | undefined {
  if (known.has(record)) return known.get(record);
  const endpoint = read(record);
  known.set(record, endpoint);
  return endpoint;
}

function read({ kind, address }: WorkerRecord): string | undefined {
  if (kind !== 'openai' || !URL.canParse(address)) return undefined;
  const { protocol, hostname, port } = new URL(address);
  if (hostname === '' || (protocol !== 'http:' && protocol !== 'https:')) return undefined;
  return `${hostname.toLowerCase()}:${port || (protocol === 'http:' ? '80' : '443')}`;
}
