/**
 * A cache node in the list of members: its own record, made of its configuration and what it listens on; and the other nodes, which
 * are its peers as they come and go.
 */
import { isLoopback } from '@kvtier/config';
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
import { PeerChoice } from './peer-choice.ts';
import type { Peers } from './peers.ts';

type NodeRecord = Parameters<typeof announceNode>[0];
type Events = NodeRecord['events'];
type PeerPlace = { readonly host: string; readonly port: number };

export interface NodeMembershipOptions extends Omit<AnnounceOptions, 'log'> {
  readonly name: string;
  /** Where other nodes reach it; absent: where it listens for peers. */
  readonly peer?: PeerPlace | null | undefined;
  /** Where its KV events are heard; absent: where it publishes them. null: nowhere. */
  readonly events?: Events | undefined;
  /** Other nodes of the list are peers, too; absent: they are. */
  readonly followPeers?: boolean;
  /** Of the engines beside it; absent: theirs are in the list. */
  readonly role?: NodeRecord['role'];
}

/** How soon a node that has come is a peer. */
const pollMs = 500;
/** Of a record, which is bounded, for the names of peers. */
const maxNamesBytes = 5_000;
/** A change of the own record makes all others read the list anew: what comes within so long of another one is said with it. */
const gatherMs = 1_500;
/** Names of nodes that a line was written about. */
const maxSaid = 1_000;
const isWildcard = (host: string): boolean => /^(0\.0\.0\.0|::|\*)$/.test(host);
const isWildcardEndpoint = (endpoint: string): boolean => /^tcp:\/\/(\*|0\.0\.0\.0|\[::\]):/.test(endpoint);

/** `isAlone`: it fetches from nobody. Begins, and waits for nobody. KvError CONFIG: what can never work. */
export function joinCluster(
  { name, peer, events, redis, leaseMs, role }: NodeMembershipOptions,
  listening: { readonly peer: PeerPlace | null; readonly events: PublishedEvents | null },
  log: Log,
  isAlone = false,
): Announced {
  const at = peer === undefined ? listening.peer : peer;
  const eventsNow = () => announcedEvents(events, listening.events);
  const record = {
    ...{ name, peer: at && { host: at.host, port: at.port }, events: eventsNow() },
    ...(role !== undefined && { role }),
    ...(isAlone && { peers: [] }),
  };
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

/**
 * The other nodes of the list are peers from now on, as they come and go; in the clear on loopback and trusted networks only. Where some
 * of them are none, `member` says who is one, so that nobody awaits at this node what can come from there alone.
 */
export function followPeers(
  { name, redis }: NodeMembershipOptions,
  peers: Pick<Peers, 'setOthers'>,
  security: PeerSecurity,
  log: Log,
  member?: Pick<Announced, 'change'>,
): Pick<MemberReader, 'close'> {
  const mayAsk = (host: string): boolean =>
    security.encryption === 'tls' || security.trustedNetwork === true || isLoopback(host);
  const said = new Set<string>();
  const choice = new PeerChoice(name);
  let outside = 0;
  const says = member && new PeersSaid(member, log);
  const reader = new MemberReader({
    ...{ redis, pollMs, log },
    changed: ({ nodes, workers }) => {
      const others = nodes.filter((node) => node.name !== name && node.peer !== null);
      const open = others.filter(({ peer }) => !mayAsk(peer!.host));
      for (const node of open) {
        if (said.has(node.name)) continue;
        if (said.size < maxSaid) said.add(node.name);
        const reason = `${node.peer!.host} is not loopback: use "tls", or say "trustedNetwork": true`;
        log.warn({ peer: node.name, reason }, 'a node of the list is no peer');
      }
      const allowed = others.filter((node) => !open.includes(node));
      const over = Math.max(0, allowed.length - maxPeers);
      if (over !== outside) log.info({ nodes: allowed.length, maxPeers }, 'nodes of the list that are no peers');
      outside = over;
      const now = new Set(peers.setOthers(choice.order(allowed, workers).map(({ peer }) => peer!)).map(placeOf));
      const are = others.filter(({ peer }) => now.has(placeOf(peer!))).map((node) => node.name);
      says?.are(are.length < others.length ? are.sort() : undefined);
    },
    problem: (why) => {
      if (why !== undefined) log.warn({ reason: why }, 'the peers stay as they are');
    },
  });
  return {
    async close() {
      says?.close();
      await reader.close();
    },
  };
}

const placeOf = ({ host, port }: PeerPlace): string => `${host}:${port}`;

/** What the own record says of its peers: the first time at once, later changes together. */
class PeersSaid {
  readonly #member: Pick<Announced, 'change'>;
  readonly #log: Log;
  #names: string[] | undefined;
  #said = '';
  #timer: NodeJS.Timeout | undefined;
  #isWarned = false;

  constructor(member: Pick<Announced, 'change'>, log: Log) {
    this.#member = member;
    this.#log = log;
  }

  /** undefined: all others. */
  are(names: string[] | undefined): void {
    this.#names = this.#short(names);
    if (this.#timer === undefined) this.#say();
  }

  close(): void {
    clearTimeout(this.#timer);
  }

  #say(): void {
    this.#timer = undefined;
    const text = JSON.stringify(this.#names) ?? '';
    if (text === this.#said) return;
    this.#said = text;
    this.#member.change({ peers: this.#names });
    this.#timer = setTimeout(() => this.#say(), gatherMs);
    this.#timer.unref();
  }

  /** undefined: a record would not hold them, and without them it is one. More than there are peers: of nodes that share an address. */
  #short(names: string[] | undefined): string[] | undefined {
    if (names === undefined) return undefined;
    const bytes = Buffer.byteLength(JSON.stringify(names));
    if (names.length <= maxPeers && bytes <= maxNamesBytes) return names;
    const reason = `${names.length} names of ${bytes} bytes; a record holds ${maxPeers} of ${maxNamesBytes}`;
    if (!this.#isWarned) this.#log.warn({ reason }, 'this node cannot say which nodes it fetches from: shorten names');
    this.#isWarned = true;
    return undefined;
  }
}
