/**
 * Members, made of pods and EndpointSlices; pure. Names of labels: llm-d (`llm-d.ai/role`), LeaderWorkerSet's DisaggregatedSet
 * (`disaggregatedset.x-k8s.io/role`, `/revision`), LeaderWorkerSet (only a group's leader serves); `kvtier.io/...` are ours
 * (docs/cluster.md has the table).
 *
 * A cache node is in its engine's pod, or in one of its own on the same host (a DaemonSet's), which engines' pods say that they use.
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
  const each = (name: string, add: () => void): void => {
    try {
      add();
    } catch (error) {
      found.ignored.push({ name, why: (error as Error).message });
    }
  };
  const engines: Pod[] = [];
  /** By the host: the names of their records. */
  const hostNodes = new Map<string, string>();
  for (const pod of pods) {
    if (sayingOf(pod)('kind') === 'cache-node') each(pod.name, () => addHostNode(found, pod, hostNodes));
    else engines.push(pod);
  }
  for (const place of placesOf(engines, slices, rules, found.ignored))
    each(place.name, () => add(found, place, rules, hostNodes));
  return found;
}

/** What its annotations or labels say. */
const sayingOf = (pod: Pod | undefined) => (key: string) => {
  const name = `kvtier.io/${key}`;
  return pod?.annotations[name] ?? pod?.labels[name];
};

const isThere = ({ isRunning, ip }: Pod): boolean => isRunning && ip !== undefined;

/** A cache node in a pod of its own. */
function addHostNode(found: FoundMembers, pod: Pod, hostNodes: Map<string, string>): void {
  if (!isThere(pod) || pod.isTerminating) return;
  const { name, hostName } = pod;
  const record = nodeOf(name, pod.ip!, sayingOf(pod));
  if (record === undefined)
    throw new Error(
      'kvtier.io/kind is cache-node, and neither kvtier.io/node-events-port nor kvtier.io/peer-port is said',
    );
  const other = hostName === undefined ? undefined : hostNodes.get(hostName);
  if (other !== undefined)
    throw new Error(`is on host ${hostName} beside the cache node ${other}; one of a host counts`);
  if (hostName !== undefined) hostNodes.set(hostName, name);
  found.nodes.push(record);
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
      // Who may write slices may not write pods, which say where they are by themselves.
      const isForeign = pod !== undefined && !pod.ips.includes(endpoint.host);
      if (isForeign) {
        const what = `EndpointSlice ${slice.name} has it at ${endpoint.host}, which is no address of the pod`;
        ignored.push({ name, why: `${what}; that is ignored, and its own is taken` });
      }
      const host = isForeign ? pod.ip! : endpoint.host;
      // A pod can be in several slices of one Service (a change on its way), and of several Services.
      const other = places.get(name);
      // What a slice says of another address says nothing of this one.
      const isReady = (isForeign ? pod.isReady : endpoint.isReady) && !(pod?.isTerminating ?? false);
      places.set(name, {
        ...{ name, host: hostOf(pod, host, other?.host), pod },
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

type Says = (key: string) => string | undefined;

function portSaid(says: Says, key: string, otherwise: number | null): number | null {
  const text = says(key);
  if (text === undefined) return otherwise;
  return text === 'none' ? null : portOf(key, text);
}

/** As many as the configuration may have (`KubernetesDiscoveryConfig.ports`): each is a worker, with connections of its own. */
const maxPorts = 8;

function portsSaid(says: Says): number[] | undefined {
  const texts = says('ports')?.split(',');
  if (texts !== undefined && texts.length > maxPorts)
    throw new Error(`kvtier.io/ports has ${texts.length} ports; ${maxPorts} at most`);
  return texts?.map((text) => portOf('ports', text));
}

const at = (host: string, port: number): string => `${host.includes(':') ? `[${host}]` : host}:${port}`;

function sourceAt(
  host: string,
  events: number | null,
  replay: number | null,
  topic: string,
  serverKey: string | undefined,
): EventSource | null {
  if (events === null) return null;
  return {
    endpoint: `tcp://${at(host, events)}`,
    replayEndpoint: replay === null ? null : `tcp://${at(host, replay)}`,
    topic,
    ...(serverKey !== undefined && { serverKey }),
  };
}

/** The cache node that a pod has; undefined: none. */
function nodeOf(name: string, host: string, says: Says): NodeRecord | undefined {
  const peerPort = portSaid(says, 'peer-port', null);
  // An engine may publish in the clear where the node beside it does not.
  const key = keyOf('node-events-key', says('node-events-key')) ?? keyOf('events-key', says('events-key'));
  const [port, replay] = [portSaid(says, 'node-events-port', null), portSaid(says, 'node-replay-port', null)];
  const events = sourceAt(host, port, replay, '', key);
  if (peerPort === null && events === null) return undefined;
  return { name, peer: peerPort === null ? null : { host, port: peerPort }, events };
}

/** Of an engine's pod that has no cache node: the one of its host, where it says so. */
function hostNodeOf(pod: Pod | undefined, hostNodes: ReadonlyMap<string, string>): string | null {
  const which = sayingOf(pod)('node');
  if (which === undefined) return null;
  if (which !== 'host') throw new Error(`kvtier.io/node is ${cut(which)}; host, or nothing`);
  return hostNodes.get(pod?.hostName ?? '') ?? null;
}

function add(found: FoundMembers, place: Place, rules: MemberRules, hostNodes: ReadonlyMap<string, string>): void {
  const { host, isReady, pod } = place;
  const says = sayingOf(pod);
  const role = roleOf(pod);
  if (role === undefined) return;
  const kind = says('kind') ?? 'openai';
  if (kind !== 'kvtier' && kind !== 'openai')
    throw new Error(`kvtier.io/kind is ${cut(kind)}; kvtier, openai or cache-node`);
  const ports = portsSaid(says) ?? place.ports;
  const ranks = ranksOf(says('events-ranks'), ports.length);
  const eventsKey = keyOf('events-key', says('events-key'));
  const node = nodeOf(place.name, host, says);
  const nodeName = node?.name ?? hostNodeOf(pod, hostNodes);
  const [eventsPort, replayPort] = [
    portSaid(says, 'events-port', rules.eventsPort),
    portSaid(says, 'replay-port', rules.replayPort),
  ];
  const engineEvents = (rank: number): WorkerRecord['events'] => {
    const after = (port: number | null): number | null => port && port + rank;
    const topic = says('events-topic') ?? rules.eventsTopic;
    const first = sourceAt(host, after(eventsPort), after(replayPort), topic, eventsKey);
    return first && ranks !== undefined ? { ...first, ranks } : first;
  };
  const workers = ports.map(
    (number, rank): WorkerRecord => ({
      name: ports.length === 1 ? place.name : `${place.name}.${number}`,
      kind,
      address: kind === 'kvtier' ? at(host, number) : `${rules.scheme}://${at(host, number)}`,
      role,
      draining: !isReady,
      node: nodeName,
      // Ranks of one pod publish one after the other, as vLLM numbers them.
      events: engineEvents(rank),
      revision: pod?.labels['disaggregatedset.x-k8s.io/revision'] ?? '',
    }),
  );
  found.workers.push(...workers);
  if (node !== undefined) found.nodes.push(node);
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
