/** What files of infra/kubernetes ask to be changed in each other, behind "#", and what they say of a host: it can be done as it is written. */
import { loadAllYaml } from '@kubernetes/client-node';
import { coordinatorSchema, parseConfig } from '@kvtier/config';
import { expect, it } from 'vitest';
import {
  all,
  containersOf,
  coordinatorJson,
  files,
  type Labels,
  type Manifest,
  named,
  nodeConfigOf,
  selects,
  textOf,
  workloads,
} from '../testing/manifests.ts';

/** The coordinator's configuration with the section that a file's head has for it. */
function withSectionOf(file: string) {
  const text = textOf(`kubernetes/${file}`);
  const [, name, body] = /^# {5}("\w+": )(\{\n(?:# {5,}.*\n)+?# {5}\})$/m.exec(text)!;
  const section = JSON.parse(`{${name}${body!.replaceAll(/^#/gm, '')}}`) as object;
  return parseConfig(coordinatorSchema, { ...coordinatorJson(), ...section }, file);
}
const of = (kind: string, name: string): Manifest =>
  all.find(({ manifest }) => manifest.kind === kind && manifest.metadata.name === name)!.manifest;

/** Rules of network-policy.yaml with those that are left out. */
const policies = loadAllYaml(
  textOf('kubernetes/network-policy.yaml').replaceAll(/^( +)# (- from:| {2}ports:)/gm, '$1$2'),
) as Manifest[];
const openOf = (name: string): number[] => [
  ...new Set(
    policies
      .find(({ metadata }) => metadata.name === name)!
      .spec.ingress.flatMap(({ ports = [] }) => ports.map(({ port }) => port)),
  ),
];

it('gateways ask the endpoint picker where its section has it listen, and bring requests where discovery finds pods', () => {
  const { endpointPicker, discovery } = withSectionOf('endpoint-picker.yaml');
  if (discovery?.kind !== 'kubernetes') throw new Error('the coordinator looks for pods');
  expect(endpointPicker).toMatchObject({ host: '0.0.0.0', trustedNetwork: true, health: null });
  const { ports, selector } = of('Service', 'kvtier-endpoint-picker').spec;
  expect(ports).toMatchObject([{ port: endpointPicker!.port, targetPort: endpointPicker!.port }]);
  expect(named('kvtier-coordinator').metadata.labels).toMatchObject(selector);
  const pool = of('InferencePool', 'engines').spec;
  expect(pool.endpointPickerRef).toMatchObject({ name: 'kvtier-endpoint-picker', port: { number: ports[0]!.port } });
  expect(pool.targetPorts.map(({ number }) => number)).toEqual(discovery.ports);
  const isOf = (labels: Labels): boolean =>
    Object.entries(pool.selector.matchLabels).every(([label, value]) => labels[label] === value);
  // Nodes of hosts are found as well, and answer no requests.
  const found = workloads.filter(({ manifest }) => selects(discovery.pods, manifest.spec.template.metadata.labels));
  const kinds = found.map(({ manifest: { metadata, spec } }) => [metadata.name, isOf(spec.template.metadata.labels)]);
  expect(Object.fromEntries(kinds)).toEqual({
    ...{ 'engine-with-kvtier': true, prefill: true, decode: true, 'kvtier-cache-node': false },
  });
  expect(openOf('kvtier-coordinator')).toContain(endpointPicker!.port);
});

it('KEDA asks where the section has the scaler listen, and its head names all that has to be changed', () => {
  const { planner } = withSectionOf('scaler.yaml');
  expect(of('Service', 'kvtier-planner').spec.ports).toMatchObject([{ port: planner.scaler!.port }]);
  expect(openOf('kvtier-coordinator')).toContain(planner.scaler!.port);
  for (const file of ['scaler.yaml', 'endpoint-picker.yaml'])
    expect(textOf(`kubernetes/${file}`)).toContain('network-policy.yaml where that is applied');
});

it('rules that are left out are rules: of gateways, KEDA and peers', () => {
  expect(openOf('kvtier-coordinator').toSorted()).toEqual([8443, 9002, 9004, 9005]);
  expect(openOf('kvtier-engines').toSorted()).toEqual([5557, 5558, 5657, 5658, 7400, 7401, 8000, 9006]);
  expect(openOf('kvtier-cache-node').toSorted()).toEqual([5657, 5658, 7400, 7401, 9006]);
});

it('cache-node.yaml says how much of the host’s memory its arena takes, at a restart, too', () => {
  const text = files.find(({ name }) => name === 'cache-node.yaml')!.text;
  const node = containersOf(named('kvtier-cache-node')).find(({ name }) => name === 'cache-node')!;
  const gib = nodeConfigOf(node).arena.bytes / 2 ** 30;
  const [, once, , twice] = /5 % \((\d+) GiB of the (\d+) here\), and twice that \((\d+) GiB\)/.exec(text)!;
  expect([Number(once), Number(twice)]).toEqual([Math.ceil(gib * 1.05), Math.ceil(gib * 2.1)]);
  expect(Number(/remount,size=(\d+)G \/dev\/shm/.exec(text)![1])).toBeGreaterThan(gib * 2.1);
});

it('prefill and decode are sidecar.yaml, and nodes that are peers of each other', () => {
  const [alone, prefill, decode] = ['engine-with-kvtier', 'prefill', 'decode'].map(named);
  expect(decode!.spec).toEqual(prefill!.spec);
  const roles = [prefill, decode].map((template) => template!.metadata.labels);
  expect(roles.map((labels) => labels['llm-d.ai/role'])).toEqual(['prefill', 'decode']);

  const node = containersOf(prefill!).find(({ name }) => name === 'cache-node')!;
  const { peers, membership, ...rest } = nodeConfigOf(node);
  const { peers: none, membership: nowhere, ...own } = nodeConfigOf(containersOf(alone!)[0]!);
  // Coordinators hear where by the pod; it listens on all addresses, which would name none in the list.
  expect(membership!.events).toBeNull();
  expect([rest, none, nowhere]).toEqual([own, null, null]);
  expect(peers).toMatchObject({ listen: { host: '0.0.0.0', port: 7400, dataPort: 7401 } });
  // Each under its pod's name and address, which Kubernetes tells; the coordinator knows the node by the same name and port.
  expect(membership).toMatchObject({ name: 'pod-0', peer: { host: '10.0.0.7', port: 7400 }, followPeers: true });
  // Pods are in no list: their nodes say what the label says to the coordinator.
  expect(membership!.role).toBe('prefill');
  const labelled = node.env!.find(({ name }) => name === 'POD_ROLE');
  expect(labelled).toMatchObject({ valueFrom: { fieldRef: { fieldPath: "metadata.labels['llm-d.ai/role']" } } });
  for (const labels of roles) expect(labels['kvtier.io/peer-port']).toBe(String(peers!.listen!.port));

  // What else there is besides sidecar.yaml's: two secrets, two ports, two names.
  const added = new Set(['peers', 'redis']);
  const without = <T extends { readonly name: string }>(list: readonly T[]): T[] =>
    list.filter(({ name }) => !added.has(name));
  expect(without(prefill!.spec.volumes)).toEqual(alone!.spec.volumes);
  const [itsNode, itsEngine] = containersOf(alone!);
  expect(containersOf(prefill!)[1]).toEqual(itsEngine);
  const { env: _, ports, volumeMounts, ...same } = node;
  const { env: __, ports: itsPorts, volumeMounts: itsMounts, ...itsSame } = itsNode!;
  expect([same, without(volumeMounts)]).toEqual([itsSame, itsMounts]);
  expect(ports!.slice(0, itsPorts!.length)).toEqual(itsPorts);
  const files = [membership!.redis.passwordFile!, membership!.redis.tls!.caFile!];
  if (peers!.security.encryption !== 'none') throw new Error('no shared secret');
  for (const file of [...files, peers!.security.secretFile])
    expect(volumeMounts.filter(({ mountPath }) => file.startsWith(`${mountPath}/`))).toHaveLength(1);
  expect(workloads.filter(({ name }) => name === 'prefill-decode.yaml')).toHaveLength(2);
});
