/** What pods and EndpointSlices mean, case by case. */
import { describe, expect, it } from 'vitest';
import { type MemberRules, membersOf } from './members.ts';
import { type EndpointSlice, type Pod, parsePod, parseSlice } from './objects.ts';

const rules: MemberRules = { ports: [8000], scheme: 'http', eventsPort: 5557, replayPort: null, eventsTopic: '' };

const pod = (
  name: string,
  {
    labels = {},
    annotations = {},
    ip = '10.1.0.1',
    ips = [] as string[],
    phase = 'Running',
    ready = true,
    ends = false,
    host = '',
  } = {},
): Pod =>
  parsePod({
    ...(host === '' ? {} : { spec: { nodeName: host } }),
    metadata: {
      name,
      resourceVersion: '1',
      labels,
      annotations,
      ...(ends ? { deletionTimestamp: '2026-01-01T00:00:00Z' } : {}),
    },
    status: {
      phase,
      ...(ip === '' ? {} : { podIP: ip }),
      ...(ips.length === 0 ? {} : { podIPs: ips.map((ip) => ({ ip })) }),
      conditions: [{ type: 'Ready', status: ready ? 'True' : 'False' }],
    },
  });

const only = (one: Pod, change: Partial<MemberRules> = {}) => {
  const { workers, nodes, ignored } = membersOf([one], undefined, { ...rules, ...change });
  expect(ignored).toEqual([]);
  return { workers, nodes };
};

it('a pod of vLLM that says nothing of itself', () => {
  expect(only(pod('vllm-0')).workers).toEqual([
    {
      ...{ name: 'vllm-0', kind: 'openai', address: 'http://10.1.0.1:8000', role: 'both', draining: false, node: null },
      events: { endpoint: 'tcp://10.1.0.1:5557', replayEndpoint: null, topic: '' },
      revision: '',
    },
  ]);
  expect(only(pod('six', { ip: 'fd00::1' })).workers[0]).toMatchObject({
    address: 'http://[fd00::1]:8000',
    events: { endpoint: 'tcp://[fd00::1]:5557' },
  });
});

describe('role and revision', () => {
  it.each([
    ['prefill', 'prefill'],
    ['decode', 'decode'],
    ['prefill-decode', 'both'],
    ['encode-prefill', 'prefill'],
    ['encode-prefill-decode', 'both'],
    ['both', 'both'],
  ])('llm-d.ai/role=%s is %s', (label, role) => {
    expect(only(pod('a', { labels: { 'llm-d.ai/role': label } })).workers[0]!.role).toBe(role);
  });

  it.each([
    ['an encoder', { 'llm-d.ai/role': 'encode' }],
    ['a follower of a group', { 'leaderworkerset.sigs.k8s.io/worker-index': '1' }],
  ])('%s takes no requests', (_, labels) => {
    expect(only(pod('a', { labels }))).toEqual({ workers: [], nodes: [] });
  });

  it('of a DisaggregatedSet, after llm-d’s own word', () => {
    const labels = { 'disaggregatedset.x-k8s.io/role': 'decode', 'disaggregatedset.x-k8s.io/revision': 'r7' };
    expect(only(pod('a', { labels })).workers[0]).toMatchObject({ role: 'decode', revision: 'r7' });
    const both = { ...labels, 'llm-d.ai/role': 'prefill', 'leaderworkerset.sigs.k8s.io/worker-index': '0' };
    expect(only(pod('a', { labels: both })).workers[0]).toMatchObject({ role: 'prefill', revision: 'r7' });
    const other = { 'disaggregatedset.x-k8s.io/role': 'workers' };
    expect(only(pod('a', { labels: other })).workers[0]).toMatchObject({ role: 'both', revision: '' });
  });
});

it.each([
  ['ready', {}, false],
  ['not ready', { ready: false }, true],
  ['terminating', { ends: true }, true],
])('a pod that is %s', (_, state, draining) => {
  expect(only(pod('a', state)).workers[0]!.draining).toBe(draining);
});

it.each([
  ['pending', { phase: 'Pending' }],
  ['failed', { phase: 'Failed' }],
  ['without an address', { ip: '' }],
])('a pod that is %s is not there', (_, state) => {
  expect(only(pod('a', state)).workers).toEqual([]);
});

it('engines behind one port of a pod, as many as it says', () => {
  const of = (ranks: string, more = {}) =>
    pod('a', { annotations: { 'kvtier.io/events-ranks': ranks, 'kvtier.io/events-port': '6001', ...more } });
  const events = { endpoint: 'tcp://10.1.0.1:6001', replayEndpoint: null, topic: '', ranks: 4 };
  expect(only(of('4')).workers[0]!.events).toEqual(events);
  expect(only(of('4', { 'kvtier.io/events-port': 'none' })).workers[0]!.events).toBeNull();
  const refused = (one: Pod) => membersOf([one], undefined, rules).ignored.map(({ why }) => why);
  for (const ranks of ['0', '65', 'four'])
    expect(refused(of(ranks))).toEqual([`kvtier.io/events-ranks is "${ranks}"; ranks are 1 to 64`]);
  expect(refused(of('2', { 'kvtier.io/ports': '8000,8001' }))).toEqual([
    'kvtier.io/events-ranks is there beside 2 ports; leave it out, each is one rank',
  ]);
});

it('a pod has eight ports at most, as the configuration has; with more it is none, and others are what they are', () => {
  const of = (name: string, ports: number) =>
    pod(name, { annotations: { 'kvtier.io/ports': Array.from({ length: ports }, (_, at) => 8000 + at).join() } });
  const { workers, ignored } = membersOf([of('nine', 9), of('eight', 8), pod('one')], undefined, rules);
  expect(ignored).toEqual([{ name: 'nine', why: 'kvtier.io/ports has 9 ports; 8 at most' }]);
  expect(workers.map(({ name }) => name)).toEqual([
    ...Array.from({ length: 8 }, (_, at) => `eight.${8000 + at}`),
    'one',
  ]);
});

it('a pod of ours with its cache node, by its annotations', () => {
  const annotations = {
    'kvtier.io/ports': '7000',
    'kvtier.io/events-port': '6001',
    'kvtier.io/replay-port': '6002',
    'kvtier.io/events-topic': 'kv@a',
    'kvtier.io/peer-port': '7100',
    'kvtier.io/node-events-port': '6003',
    'kvtier.io/node-replay-port': '6004',
  };
  expect(only(pod('a', { labels: { 'kvtier.io/kind': 'kvtier' }, annotations }))).toEqual({
    workers: [
      {
        ...{
          name: 'a',
          kind: 'kvtier',
          address: '10.1.0.1:7000',
          role: 'both',
          draining: false,
          node: 'a',
          revision: '',
        },
        events: { endpoint: 'tcp://10.1.0.1:6001', replayEndpoint: 'tcp://10.1.0.1:6002', topic: 'kv@a' },
      },
    ],
    nodes: [
      {
        ...{ name: 'a', peer: { host: '10.1.0.1', port: 7100 } },
        events: { endpoint: 'tcp://10.1.0.1:6003', replayEndpoint: 'tcp://10.1.0.1:6004', topic: '' },
      },
    ],
  });
});

describe('a cache node in a pod of its own', () => {
  const annotations = { 'kvtier.io/kind': 'cache-node', 'kvtier.io/node-events-port': '6003' };
  const engine = (name: string, host: string, node = 'host') =>
    pod(name, { host, annotations: { 'kvtier.io/node': node } });

  it('serves the pods of its host that say so, in whatever order they come', () => {
    const [a, b] = [
      pod('node-a', { host: 'a', ip: '10.2.0.1', annotations }),
      pod('node-b', { host: 'b', annotations }),
    ];
    const pods = [engine('e1', 'a'), a, engine('e2', 'a'), engine('e3', 'c'), pod('e4', { host: 'a' }), b];
    const slice: EndpointSlice = {
      ...{ name: 'engines', ports: [8000] },
      endpoints: [{ host: '10.1.0.1', pod: 'e1', isReady: true }],
    };
    for (const [slices, wanted] of [
      [undefined, { e1: 'node-a', e2: 'node-a', e3: null, e4: null }],
      [[slice], { e1: 'node-a' }],
    ] as const) {
      const { workers, nodes, ignored } = membersOf(pods, slices, rules);
      expect([Object.fromEntries(workers.map(({ name, node }) => [name, node])), ignored]).toEqual([wanted, []]);
      const events = (host: string) => ({ endpoint: `tcp://${host}:6003`, replayEndpoint: null, topic: '' });
      expect(nodes).toEqual([
        { name: 'node-a', peer: null, events: events('10.2.0.1') },
        { name: 'node-b', peer: null, events: events('10.1.0.1') },
      ]);
    }
  });

  it('is none while it ends, beside another one, or where nobody can reach it', () => {
    const ends = pod('old', { host: 'a', annotations, ends: true });
    const others = ['x', 'y'].map((name) => pod(name, { host: 'a', annotations }));
    const silent = pod('silent', { host: 'b', annotations: { 'kvtier.io/kind': 'cache-node' } });
    const { workers, nodes, ignored } = membersOf(
      [ends, ...others, silent, engine('e', 'a'), engine('f', 'a', 'x')],
      undefined,
      rules,
    );
    expect([workers.map(({ name, node }) => [name, node]), nodes.map(({ name }) => name)]).toEqual([
      [['e', 'x']],
      ['x'],
    ]);
    expect(ignored).toEqual([
      { name: 'y', why: 'is on host a beside the cache node x; one of a host counts' },
      {
        name: 'silent',
        why: 'kvtier.io/kind is cache-node, and neither kvtier.io/node-events-port nor kvtier.io/peer-port is said',
      },
      { name: 'f', why: 'kvtier.io/node is "x"; host, or nothing' },
    ]);
  });
});

it('the node of a pod publishes with its own key, else with that of the pod', () => {
  const [pods, nodes] = ['p'.repeat(40), 'n'.repeat(40)];
  const ports = { 'kvtier.io/node-events-port': '6003' };
  const keysOf = (annotations: object): (string | undefined)[] => {
    const { workers, nodes: found } = only(pod('a', { annotations: { ...ports, ...annotations } }));
    return [workers[0]!.events?.serverKey, found[0]!.events?.serverKey];
  };
  expect(keysOf({ 'kvtier.io/events-key': pods })).toEqual([pods, pods]);
  // vLLM publishes in the clear, and the node beside it does not.
  expect(keysOf({ 'kvtier.io/node-events-key': nodes })).toEqual([undefined, nodes]);
  expect(keysOf({ 'kvtier.io/events-key': pods, 'kvtier.io/node-events-key': nodes })).toEqual([pods, nodes]);
});

it('each port is a worker, and their events are numbered as vLLM numbers ranks', () => {
  const { workers } = only(pod('a'), { ports: [8000, 8001], replayPort: 5600 });
  expect(workers.map(({ name, address, events }) => [name, address, events?.endpoint, events?.replayEndpoint])).toEqual(
    [
      ['a.8000', 'http://10.1.0.1:8000', 'tcp://10.1.0.1:5557', 'tcp://10.1.0.1:5600'],
      ['a.8001', 'http://10.1.0.1:8001', 'tcp://10.1.0.1:5558', 'tcp://10.1.0.1:5601'],
    ],
  );
  expect(only(pod('a', { annotations: { 'kvtier.io/events-port': 'none' } })).workers[0]!.events).toBeNull();
});

it.each([
  [{ 'kvtier.io/kind': 'vllm' }, 'kvtier.io/kind is "vllm"; kvtier, openai or cache-node'],
  [{ 'llm-d.ai/role': 'cook' }, 'llm-d.ai/role is "cook", which is no role'],
  [{ 'kvtier.io/ports': '8000,x' }, 'kvtier.io/ports is "x"; a port is 1 to 65535'],
  [{ 'kvtier.io/node-events-key': 'x' }, 'kvtier.io/node-events-key is "x"; a CURVE key is 40 characters of Z85'],
  [{ 'kvtier.io/peer-port': '70000' }, 'kvtier.io/peer-port is "70000"; a port is 1 to 65535'],
])('%j is ignored with its reason', (labels, why) => {
  expect(membersOf([pod('a', { labels })], undefined, rules)).toEqual({
    workers: [],
    nodes: [],
    ignored: [{ name: 'a', why }],
  });
});

describe('EndpointSlices', () => {
  const slice = (
    endpoints: readonly { pod?: string; host: string; ready?: boolean; terminating?: boolean }[],
    ports: readonly number[] = [8000],
    name = 's',
  ): EndpointSlice =>
    parseSlice({
      metadata: { name, resourceVersion: '1' },
      endpoints: endpoints.map(({ pod, host, ...conditions }) => ({
        ...{ addresses: [host], conditions },
        ...(pod === undefined ? {} : { targetRef: { kind: 'Pod', name: pod } }),
      })),
      ports: ports.map((port) => ({ port, protocol: 'TCP' })),
    });
  const states = (pods: readonly Pod[], slices: readonly EndpointSlice[]) => {
    const { workers, ignored } = membersOf(pods, slices, rules);
    return { workers: workers.map(({ name, address, draining }) => `${name} ${address} ${draining}`), ignored };
  };

  it('say which pods serve, where, and whether they are ready', () => {
    const pods = [pod('a'), pod('b', { ip: '10.1.0.2' }), pod('c', { ip: '10.1.0.3' }), pod('elsewhere')];
    const all = slice([
      { pod: 'a', host: '10.1.0.1' },
      { pod: 'b', host: '10.1.0.2', ready: false },
      { pod: 'c', host: '10.1.0.3', ready: true, terminating: true },
      { pod: 'unknown', host: '10.1.0.4' },
      { host: '10.9.0.1' },
    ]);
    expect(states(pods, [all])).toEqual({
      workers: [
        'a http://10.1.0.1:8000 false',
        'b http://10.1.0.2:8000 true',
        'c http://10.1.0.3:8000 true',
        '10.9.0.1 http://10.9.0.1:8000 false',
      ],
      ignored: [],
    });
  });

  it('of several that have the pod, one that says ready is enough; the ports are of all', () => {
    const two = [
      slice([{ pod: 'a', host: '10.1.0.1', ready: false }]),
      slice([{ pod: 'a', host: '10.1.0.1' }], [9000], 't'),
    ];
    expect(states([pod('a')], two).workers).toEqual([
      'a.8000 http://10.1.0.1:8000 false',
      'a.9000 http://10.1.0.1:9000 false',
    ]);
  });

  it('of two families, the pod’s primary address, whichever slice comes last', () => {
    const four = slice([{ pod: 'a', host: '10.1.0.1' }], [8000], 'four');
    const six = slice([{ pod: 'a', host: 'fd00::1' }], [8000], 'six');
    const addressesOf = (one: Pod): string[] =>
      [
        [four, six],
        [six, four],
      ].flatMap((slices) => membersOf([one], slices, rules).workers.map(({ address }) => address));
    const ips = ['10.1.0.1', 'fd00::1'];
    expect(addressesOf(pod('a', { ip: '10.1.0.1', ips }))).toEqual(Array(2).fill('http://10.1.0.1:8000'));
    expect(addressesOf(pod('a', { ip: 'fd00::1', ips }))).toEqual(Array(2).fill('http://[fd00::1]:8000'));
    // A Service of one family: what it says.
    expect(states([pod('a', { ip: '10.1.0.1', ips })], [six])).toEqual({
      workers: ['a http://[fd00::1]:8000 false'],
      ignored: [],
    });
  });

  it('whatever they say, a pod is at an address of its own', () => {
    const foreign = slice([
      { pod: 'a', host: '10.66.6.6' },
      { pod: 'b', host: '10.1.0.2' },
      { pod: 'c', host: '10.1.0.4' },
    ]);
    const pods = [pod('a'), pod('b', { ip: '10.1.0.2' }), pod('c', { ip: '10.1.0.3', ips: ['10.1.0.3', '10.1.0.4'] })];
    expect(states(pods, [foreign])).toEqual({
      workers: ['a http://10.1.0.1:8000 false', 'b http://10.1.0.2:8000 false', 'c http://10.1.0.4:8000 false'],
      ignored: [
        {
          name: 'a',
          why: 'EndpointSlice s has it at 10.66.6.6, which is no address of the pod; that is ignored, and its own is taken',
        },
      ],
    });
  });

  it('with several ports, those that are configured', () => {
    expect(states([pod('a')], [slice([{ pod: 'a', host: '10.1.0.1' }], [9090, 8000])]).workers).toHaveLength(1);
    expect(states([pod('a')], [slice([{ pod: 'a', host: '10.1.0.1' }], [9090, 9091])])).toEqual({
      workers: [],
      ignored: [{ name: 'a', why: 'none of the ports of EndpointSlice s is in discovery.ports' }],
    });
  });
});
