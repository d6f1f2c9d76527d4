/**
 * Members, made of pods and EndpointSlices; pure. Names of labels: llm-d (`llm-d.ai/role`), LeaderWorkerSet's DisaggregatedSet
 * (`disaggregatedset.x-k8s.io/role`, `/revision`), LeaderWorkerSet (only a group's leader serves); `kvtier.io/...` are ours
 * (docs/cluster.md has the table).
 *
 * A pod that is not ready, or that ends, is there and gets nothing new: it drains. One that does not run, or has no address yet, is
 * not there.
 */
import {
  curveKey,
  type EventSource,
  type KubernetesDiscoveryConfig,
  type NodeRecord,
  type WorkerRecord,
} from '@kvtier/config';
import type { EndpointSlice, Pod } from './objects.ts';

export type MemberRules = Pick<
  KubernetesDiscoveryConfig,
  'ports' | 'scheme' | 'eventsPort' | 'replayPort' | 'eventsTopic'
>;

export interface FoundMembers {
  readonly workers: WorkerRecord[];
  readonly nodes: NodeRecord[];
  /** What says something about itself that cannot be. */
  readonly ignored: { readonly name: string; readonly why: string }[];
}

/** `slices` undefined: pods speak for themselves. */
export function membersOf(
  pods: Iterable<Pod>,
  slices: Iterable<EndpointSlice> | undefined,
  rules: MemberRules,
): FoundMembers {
  const found: FoundMembers = { workers: [], nodes: [], ignored: [] };
  const places = placesOf(pods, slices, rules, found.ignored);
  for (const place of places) {
    try {
      add(found, place, rules);
    } catch (error) {
      found.ignored.push({ name: place.name, why: (error as Error).message });
    }
  }
  return found;
}

/** Where something listens. */
interface Place {
  readonly name: string;
  readonly host: string;
  readonly ports: readonly number[];
  readonly isReady: boolean;
  readonly pod: Pod | undefined;
}

function placesOf(
  pods: Iterable<Pod>,
  slices: Iterable<EndpointSlice> | undefined,
  rules: MemberRules,
  ignored: FoundMembers['ignored'],
): Place[] {
  const isThere = ({ isRunning, ip }: Pod): boolean => isRunning && ip !== undefined;
  if (slices === undefined) {
    return [...pods].filter(isThere).map((pod) => {
      const isReady = pod.isReady && !pod.isTerminating;
      return { name: pod.name, host: pod.ip!, ports: rules.ports, isReady, pod };
    });
  }
  const byName = new Map([...pods].map((pod) => [pod.name, pod]));
  const places = new Map<string, Place>();
  for (const slice of slices) {
    const known = slice.ports.filter((port) => rules.ports.includes(port));
    const ports = known.length > 0 ? known : slice.ports.length === 1 ? slice.ports : [];
    for (const endpoint of slice.endpoints) {
      const pod = endpoint.pod === undefined ? undefined : byName.get(endpoint.pod);
      // A pod that the selector does not name, or one that is not there yet, or not any more.
      if (endpoint.pod !== undefined && (pod === undefined || !isThere(pod))) continue;
      const name = pod?.name ?? endpoint.host.replaceAll(/[^A-Za-z0-9._-]/g, '-').replaceAll(/^[._-]+|[._-]+$/g, '');
      if (ports.length === 0) {
        const why = `none of the ports of EndpointSlice ${slice.name} is in discovery.ports`;
        ignored.push({ name, why });
        continue;
      }
      // A pod can be in several slices of one Service (a change on its way), and of several Services.
      const other = places.get(name);
      const isReady = endpoint.isReady && !(pod?.isTerminating ?? false);
      places.set(name, {
        ...{ name, host: hostOf(pod, endpoint.host, other?.host), pod },
        isReady: isReady || (other?.isReady ?? false),
        ports: [...new Set([...(other?.ports ?? []), ...ports])].sort((a, b) => a - b),
      });
    }
  }
  return [...places.values()];
}

/** Of a pod with addresses of both families, each in a slice of its own: its primary one, where it is among them; in whatever order they come. */
function hostOf(pod: Pod | undefined, host: string, other = host): string {
  if (pod?.ip === host || pod?.ip === other) return pod.ip;
  return host < other ? host : other;
}

function add(found: FoundMembers, place: Place, rules: MemberRules): void {
  const { host, isReady, pod } = place;
  const says = (key: string): string | undefined => {
    const name = `kvtier.io/${key}`;
    return pod?.annotations[name] ?? pod?.labels[name];
  };
  const port = (key: string, otherwise: number | null): number | null => {
    const text = says(key);
    if (text === undefined) return otherwise;
    return text === 'none' ? null : portOf(key, text);
  };
  const role = roleOf(pod);
  if (role === undefined) return;
  const kind = says('kind') ?? 'openai';
  if (kind !== 'kvtier' && kind !== 'openai') throw new Error(`kvtier.io/kind is ${cut(kind)}; kvtier or openai`);
  const ports =
    says('ports')
      ?.split(',')
      .map((text) => portOf('ports', text)) ?? place.ports;
  const ranks = ranksOf(says('events-ranks'), ports.length);
  const key = (name: string): string | undefined => keyOf(name, says(name));
  const eventsKey = key('events-key');
  const at = (number: number): string => `${host.includes(':') ? `[${host}]` : host}:${number}`;
  const source = (
    events: number | null,
    replay: number | null,
    topic: string,
    serverKey: string | undefined,
    rank = 0,
  ): EventSource | null =>
    events === null
      ? null
      : {
          endpoint: `tcp://${at(events + rank)}`,
          replayEndpoint: replay === null ? null : `tcp://${at(replay + rank)}`,
          topic,
          ...(serverKey !== undefined && { serverKey }),
        };
  const peerPort = port('peer-port', null);
  // An engine may publish in the clear where the node beside it does not.
  const nodeKey = key('node-events-key') ?? eventsKey;
  const nodeEvents = source(port('node-events-port', null), port('node-replay-port', null), '', nodeKey);
  const hasNode = peerPort !== null || nodeEvents !== null;
  const [eventsPort, replayPort] = [port('events-port', rules.eventsPort), port('replay-port', rules.replayPort)];
  const engineEvents = (rank: number): WorkerRecord['events'] => {
    const first = source(eventsPort, replayPort, says('events-topic') ?? rules.eventsTopic, eventsKey, rank);
    return first && ranks !== undefined ? { ...first, ranks } : first;
  };
  const workers = ports.map(
    (number, rank): WorkerRecord => ({
      name: ports.length === 1 ? place.name : `${place.name}.${number}`,
      kind,
      address: kind === 'kvtier' ? at(number) : `${rules.scheme}://${at(number)}`,
      role,
      draining: !isReady,
      node: hasNode ? place.name : null,
      // Ranks of one pod publish one after the other, as vLLM numbers them.
      events: engineEvents(rank),
      revision: pod?.labels['disaggregatedset.x-k8s.io/revision'] ?? '',
    }),
  );
  found.workers.push(...workers);
  if (!hasNode) return;
  const peer = peerPort === null ? null : { host, port: peerPort };
  found.nodes.push({ name: place.name, peer, events: nodeEvents });
}

/** undefined: it takes no requests of ours. */
function roleOf(pod: Pod | undefined): WorkerRecord['role'] | undefined {
  const labels = pod?.labels ?? {};
  // Of a group of pods that are one engine, the first one speaks.
  if ((labels['leaderworkerset.sigs.k8s.io/worker-index'] ?? '0') !== '0') return undefined;
  const own = labels['llm-d.ai/role'];
  if (own !== undefined) {
    if (own === 'encode') return undefined;
    if (own === 'prefill' || own === 'encode-prefill') return 'prefill';
    if (own === 'decode') return 'decode';
    if (own === 'prefill-decode' || own === 'encode-prefill-decode' || own === 'both') return 'both';
    throw new Error(`llm-d.ai/role is ${cut(own)}, which is no role`);
  }
  // Free names; these two mean what they say.
  const set = labels['disaggregatedset.x-k8s.io/role'];
  return set === 'prefill' || set === 'decode' ? set : 'both';
}

function portOf(key: string, text: string): number {
  const number = /^\s*\d{1,5}\s*$/.test(text) ? Number(text) : 0;
  if (number < 1 || number > 65_535) throw new Error(`kvtier.io/${key} is ${cut(text)}; a port is 1 to 65535`);
  return number;
}

/** Engines behind one port; of a pod with several ports each has one. */
function ranksOf(text: string | undefined, ports: number): number | undefined {
  if (text === undefined) return undefined;
  if (ports > 1)
    throw new Error(`kvtier.io/events-ranks is there beside ${ports} ports; leave it out, each is one rank`);
  const ranks = /^\s*\d{1,2}\s*$/.test(text) ? Number(text) : 0;
  if (ranks < 1 || ranks > 64) throw new Error(`kvtier.io/events-ranks is ${cut(text)}; ranks are 1 to 64`);
  return ranks;
}

function keyOf(name: string, text: string | undefined): string | undefined {
  if (text === undefined || curveKey.safeParse(text).success) return text;
  throw new Error(`kvtier.io/${name} is ${cut(text)}; a CURVE key is 40 characters of Z85`);
}

const cut = (text: string): string => JSON.stringify(text.slice(0, 60));
