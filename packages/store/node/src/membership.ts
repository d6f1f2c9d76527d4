/**
 * A cache node in the list of members: its own record, made of its configuration and what it listens on; and the other nodes, which
 * are its peers as they come and go.
 */
import { createHash } from 'node:crypto';
import { KvError } from '@kvtier/errors';
import {
  type Announced,
  type AnnounceOptions,
  announcedEvents,
  announceNode,
  MemberReader,
  type PublishedEvents,
} from '@kvtier/membership';
import type { Log } from '@kvtier/runtime';
import type { PeerSecurity } from '@kvtier/tiers';
import { maxPeers } from '@kvtier/tiers/peer';
import type { Peers } from './peers.ts';

type Events = Parameters<typeof announceNode>[0]['events'];
type PeerPlace = { readonly host: string; readonly port: number };

export interface NodeMembershipOptions extends Omit<AnnounceOptions, 'log'> {
  readonly name: string;
  /** Where other nodes reach it; absent: where it listens for peers. */
  readonly peer?: PeerPlace | null | undefined;
  /** Where its KV events are heard; absent: where it publishes them. null: nowhere. */
  readonly events?: Events | undefined;
  /** Other nodes of the list are peers, too; absent: they are. */
  readonly followPeers?: boolean;
}

/** How soon a node that has come is a peer. */
const pollMs = 500;
/** Names of nodes that a line was written about. */
const maxSaid = 1_000;
const isWildcard = (host: string): boolean => /^(0\.0\.0\.0|::|\*)$/.test(host);
const isWildcardEndpoint = (endpoint: string): boolean => /^tcp:\/\/(\*|0\.0\.0\.0|\[::\]):/.test(endpoint);
const isLoopback = (host: string): boolean => host === '::1' || /^127\./.test(host) || host === 'localhost';

/** Begins, and waits for nobody. KvError CONFIG: what can never work. */
export function joinCluster(
  { name, peer, events, redis, leaseMs }: NodeMembershipOptions,
  listening: { readonly peer: PeerPlace | null; readonly events: PublishedEvents | null },
  log: Log,
): Announced {
  const at = peer === undefined ? listening.peer : peer;
  const eventsNow = () => announcedEvents(events, listening.events);
  const record = { name, peer: at && { host: at.host, port: at.port }, events: eventsNow() };
  const refuse = (key: string, place: string): KvError =>
    new KvError('CONFIG', `membership.${key}: ${place} is no address to connect to; give one that others reach`);
  if (record.peer !== null && isWildcard(record.peer.host)) {
    throw refuse('peer', `${record.peer.host}:${record.peer.port}`);
  }
  for (const place of [record.events?.endpoint, record.events?.replayEndpoint]) {
    if (place != null && isWildcardEndpoint(place)) throw refuse('events', place);
  }
  const announced = announceNode(record, { redis, leaseMs, log });
  listening.events?.onServerKey(() => announced.change({ events: eventsNow() }));
  return announced;
}

/** The other nodes of the list are peers from now on, as they come and go; in the clear on loopback and trusted networks only. */
export function followPeers(
  { name, redis }: NodeMembershipOptions,
  peers: Pick<Peers, 'setOthers'>,
  security: PeerSecurity,
  log: Log,
): MemberReader {
  const mayAsk = (host: string): boolean =>
    security.encryption === 'tls' || security.trustedNetwork === true || isLoopback(host);
  const said = new Set<string>();
  return new MemberReader({
    ...{ redis, pollMs, log },
    changed: ({ nodes }) => {
      const others = nodes.filter((node) => node.name !== name && node.peer !== null);
      const open = others.filter(({ peer }) => !mayAsk(peer!.host));
      for (const node of open) {
        if (said.has(node.name)) continue;
        if (said.size < maxSaid) said.add(node.name);
        const reason = `${node.peer!.host} is not loopback: use "tls", or say "trustedNetwork": true`;
        log.warn({ peer: node.name, reason }, 'a node of the list is no peer');
      }
      const allowed = others.filter((node) => !open.includes(node));
      if (allowed.length > maxPeers)
        log.warn({ nodes: allowed.length, maxPeers }, 'some nodes of the list are no peers');
      peers.setOthers(nearest(name, allowed).map(({ peer }) => peer!));
    },
    problem: (why) => {
      if (why !== undefined) log.warn({ reason: why }, 'the peers stay as they are');
    },
  });
}

/** Where there are too many for one: another choice at each node, and the same as long as nobody comes or goes. */
function nearest<T extends { readonly name: string }>(own: string, nodes: readonly T[]): T[] {
  const distance = (other: string): string => createHash('sha256').update([own, other].sort().join('\0')).digest('hex');
  return nodes
    .map((node) => ({ node, far: distance(node.name) }))
    .sort((a, b) => (a.far < b.far ? -1 : 1))
    .map(({ node }) => node);
}
