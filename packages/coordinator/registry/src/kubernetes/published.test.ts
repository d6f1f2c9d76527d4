/** What nodes of infra/kubernetes hold is heard: they publish it with tokens, their pods say where, and pages say the same. */
import { readFileSync } from 'node:fs';
import { coordinatorSchema, parseConfig } from '@kvtier/config';
import { describe, expect, it } from 'vitest';
import {
  type Container,
  containersOf,
  coordinatorJson,
  infra,
  type Labels,
  named,
  nodeConfigOf,
  podsOf,
  portsOf,
  selects,
  textOf,
} from '../testing/manifests.ts';
import { membersOf } from './members.ts';

const { discovery, kvEvents } = parseConfig(coordinatorSchema, coordinatorJson(), 'coordinator.json');
if (discovery?.kind !== 'kubernetes') throw new Error('the coordinator looks for pods');
const rules = discovery;
const nodeIn = (workload: string): Container =>
  containersOf(named(workload)).find(({ name }) => name === 'cache-node')!;
const pageOf = (name: string): string => readFileSync(new URL(`../docs/${name}`, infra), 'utf8');
const GiB = 2 ** 30;
const bytesOf = (size: string): number => Number(/^(\d+)Gi$/.exec(size)![1]) * GiB;

/** As its events are heard in the pod's address. */
const heardOf = (workload: string) => {
  const { endpoint, replayEndpoint, topic } = nodeConfigOf(nodeIn(workload)).kvEvents!;
  const [events, replay] = [endpoint, replayEndpoint!].map((place) => place.replace('*', '10.0.0.7'));
  return { endpoint: events, replayEndpoint: replay, topic };
};

describe.each([
  ['engine-with-kvtier', null],
  ['prefill', { host: '10.0.0.7', port: 7400 }],
  ['decode', { host: '10.0.0.7', port: 7400 }],
])('%s', (workload, peer) => {
  it('says where the node beside its engine publishes', () => {
    const found = membersOf(podsOf([workload, named(workload).metadata]), undefined, rules);
    expect(found.ignored).toEqual([]);
    expect(found.nodes).toEqual([{ name: workload, peer, events: heardOf(workload) }]);
    expect(found.workers.map(({ name, node }) => [name, node])).toEqual([[workload, workload]]);
  });
});

it('a node of a host is found, and an engine’s pod that says what cache-node.yaml asks for is beside it', () => {
  const asked = /^# {3}annotations: +\{ (kvtier\.io\/node): (\w+) \}$/m.exec(textOf('kubernetes/cache-node.yaml'))!;
  const { labels } = named('engine-with-kvtier').metadata;
  const engine: { labels: Labels; annotations: Labels } = { labels, annotations: { [asked[1]!]: asked[2]! } };
  const node = named('kvtier-cache-node').metadata;
  expect([labels, node.labels].map((all) => selects(rules.pods, all))).toEqual([true, true]);
  const found = membersOf(podsOf(['engine', engine], ['node', node]), undefined, rules);
  expect(found.ignored).toEqual([]);
  expect(found.nodes).toEqual([{ name: 'node', peer: null, events: heardOf('kvtier-cache-node') }]);
  expect(found.workers.map(({ name, node: beside }) => [name, beside])).toEqual([['engine', 'node']]);
});

describe.each(['engine-with-kvtier', 'prefill', 'decode', 'kvtier-cache-node'])('the node of %s', (workload) => {
  const node = nodeIn(workload);
  const { arena, kvEvents: published } = nodeConfigOf(node);

  it('publishes at ports of its own, on a network that the coordinator trusts, too', () => {
    const ports = new Map(node.ports!.map(({ name, containerPort }) => [name, containerPort]));
    const own = [ports.get('node-events'), ports.get('node-replay')];
    expect([published!.endpoint, published!.replayEndpoint]).toEqual(own.map((port) => `tcp://*:${port}`));
    expect(new Set(portsOf(named(workload)).values()).size).toBe(portsOf(named(workload)).size);
    expect([published!.trustedNetwork, kvEvents.trustedNetwork]).toEqual([true, true]);
  });

  it('has the memory for tokens, beside two arenas and 1 GiB', () => {
    const size = named(workload).spec.volumes.find(({ name }) => name === 'kvtier')!.emptyDir?.sizeLimit;
    const arenas = size === undefined ? Math.ceil((2.1 * arena.bytes) / GiB) * GiB : bytesOf(size);
    const { requests, limits } = node.resources!;
    const roundUp = (bytes: number): number => Math.ceil(bytes / GiB) * GiB;
    expect(bytesOf(limits.memory)).toBe(roundUp(arenas + published!.tokenIdBytes + GiB));
    expect(bytesOf(requests.memory)).toBe(roundUp(arena.bytes + published!.tokenIdBytes + 2 * GiB));
  });
});

it('tokens take as much as the files and the page say', () => {
  const page = pageOf('sidecar.md');
  const rows = [...page.matchAll(/^\| `([\w-]+\.yaml)`[^|]*\| (\d+) GiB \| (\d+) MiB \| (\d+) KiB \|$/gm)];
  const said = rows.map(([, file, ...numbers]) => [file, ...numbers.map(Number)]);
  const made = [
    ['sidecar.yaml', 'engine-with-kvtier'],
    ['cache-node.yaml', 'kvtier-cache-node'],
  ].map(([file, workload]) => {
    const { arena, disk, kvEvents: its } = nodeConfigOf(nodeIn(workload!));
    const held = arena.bytes + disk!.bytes!;
    // 384 bytes of a block of 16 tokens.
    const tokens = (its!.tokenIdBytes / 384) * 16;
    return [file, held / GiB, its!.tokenIdBytes / 2 ** 20, Math.ceil(held / tokens / 1_024)];
  });
  expect(said).toEqual(made);
});

it('cluster.md and routing.md say the ports, the annotations and the selector of the files', () => {
  const page = pageOf('cluster.md');
  const section = page.slice(page.indexOf('**What the cache node beside a pod holds**')).split('\n## ')[0]!;
  const published = nodeConfigOf(nodeIn('engine-with-kvtier')).kvEvents!;
  const shown = JSON.parse(/```json\n(.*?)\n```/s.exec(section)![1]!) as { readonly kvEvents: object };
  expect(published).toMatchObject(shown.kvEvents);
  expect(shown.kvEvents).toEqual({
    ...{ endpoint: 'tcp://*:5657', replayEndpoint: 'tcp://*:5658', trustedNetwork: true, tokenIdBytes: 268_435_456 },
  });
  const { annotations } = named('engine-with-kvtier').metadata;
  for (const [key, port] of Object.entries(annotations).filter(([name]) => name.startsWith('kvtier.io/')))
    expect(section).toContain(`\`${key}: "${port}"\``);
  expect(section).toContain(`\`"${rules.pods}"\``);
  const [, events, replay] = /"endpoint": "tcp:\/\/\*:(\d+)", "replayEndpoint": "tcp:\/\/\*:(\d+)"/.exec(
    pageOf('routing.md'),
  )!;
  expect([`tcp://*:${events}`, `tcp://*:${replay}`]).toEqual([published.endpoint, published.replayEndpoint]);
});
