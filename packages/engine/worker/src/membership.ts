/** An engine worker's own record in the list of members: what it says of itself, from its configuration and what it listens on. */
import type { WorkerMembership } from '@kvtier/config';
import { KvError } from '@kvtier/errors';
import { type Announced, announcedEvents, announceWorker, type PublishedEvents } from '@kvtier/membership';
import { type Logger, tellRenewed } from '@kvtier/telemetry';

/** What is listened on, and is not where anybody could connect to. */
const isWildcard = (address: string): boolean => /^(tcp:\/\/)?(\*|0\.0\.0\.0|\[::\]):/.test(address);

/** Begins, and waits for nobody. KvError CONFIG: what can never work. */
export function joinCluster(
  membership: WorkerMembership,
  listening: { readonly address: string; readonly events: PublishedEvents | null },
  log: Logger,
): Announced {
  const { redis, leaseMs, name, role, node, revision } = membership;
  const address = membership.address ?? listening.address;
  const eventsNow = () => announcedEvents(membership.events, listening.events);
  const events = eventsNow();
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
  const servers = {
    ...redis,
    place: 'membership.redis',
    onProblem: tellRenewed(log, 'membership: passwords, certificates'),
  };
  const announced = announceWorker(record, { redis: servers, leaseMs, log });
  listening.events?.onServerKey(() => announced.change({ events: eventsNow() }));
  return announced;
}
