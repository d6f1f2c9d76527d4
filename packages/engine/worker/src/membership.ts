/** An engine worker's own record in the list of members: what it says of itself, from its configuration and what it listens on. */
import type { EventSource, WorkerMembership } from '@kvtier/config';
import { KvError } from '@kvtier/errors';
import { type Announced, announceWorker } from '@kvtier/membership';
import type { Logger } from '@kvtier/telemetry';

/** What is listened on, and is not where anybody could connect to. */
const isWildcard = (address: string): boolean => /^(tcp:\/\/)?(\*|0\.0\.0\.0|\[::\]):/.test(address);

/** Begins, and waits for nobody. KvError CONFIG: what can never work. */
export function joinCluster(
  membership: WorkerMembership,
  listening: { readonly address: string; readonly events: EventSource | null },
  log: Logger,
): Announced {
  const { redis, leaseMs, name, role, node, revision } = membership;
  const address = membership.address ?? listening.address;
  const events = membership.events === undefined ? listening.events : membership.events;
  for (const [key, place] of [
    ['address', address],
    ['events', events?.endpoint],
    ['events', events?.replayEndpoint],
  ] as const) {
    if (place != null && isWildcard(place)) {
      throw new KvError(
        'CONFIG',
        `membership.${key}: ${place} is no address to connect to; give one that others reach`,
      );
    }
  }
  const record = { name, kind: 'kvtier', address, role, draining: false, node, events, revision } as const;
  return announceWorker(record, { redis, leaseMs, log });
}
