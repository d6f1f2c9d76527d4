/** Static discovery: the conformance suite, and its configuration. */
import { discoverySchema, parseConfig, type WorkerRecord } from '@kvtier/config';
import { Lines } from '@kvtier/membership/testing';
import { describe, expect, it } from 'vitest';
import { createDiscovery } from './index.ts';
import { StaticDiscovery } from './static-discovery.ts';
import { discoveryConformance, Heard, type Source, workerNamed } from './testing/discovery-conformance.ts';

async function makeSource(): Promise<Source> {
  let members = { workers: [] as WorkerRecord[], nodes: [] as never[] } as ConstructorParameters<
    typeof StaticDiscovery
  >[0];
  const opened: StaticDiscovery[] = [];
  const set = async (next: typeof members): Promise<void> => {
    members = next;
    for (const each of opened) each.replace(members);
  };
  const without = (name: string) => ({
    workers: members.workers.filter((each) => each.name !== name),
    nodes: members.nodes.filter((each) => each.name !== name),
  });
  const source: Source = {
    open: (log) => {
      const discovery = new StaticDiscovery(members, log);
      discovery.replace(members);
      opened.push(discovery);
      return discovery;
    },
    join: async (worker, node) => {
      const { workers, nodes } = without(worker.name);
      await set({ workers: [...workers, worker], nodes: node === undefined ? nodes : [...nodes, node] });
    },
    drain: async (name) => {
      const workers = members.workers.map((each) => (each.name === name ? { ...each, draining: true } : each));
      await set({ ...members, workers });
    },
    leave: async (name) => await set(without(name)),
    twin: async (worker) => await set({ ...members, workers: [...members.workers, { ...worker, role: 'decode' }] }),
    // Its records have been parsed; what is left that cannot be is another worker's address.
    nonsense: async (name) =>
      await set({
        ...members,
        workers: [...members.workers, workerNamed(name, { address: workerNamed('a').address })],
      }),
    close: async () => {},
  };
  return source;
}

describe('static discovery', () => {
  discoveryConformance(makeSource);

  it('is made from its configuration', async () => {
    const value = { kind: 'static', workers: [{ name: 'a', address: 'unix:/run/a' }], nodes: [{ name: 'n' }] };
    const discovery = createDiscovery(parseConfig(discoverySchema, value, 'test'), new Lines());
    const heard = new Heard();
    await discovery.start(heard);
    await heard.until(() => heard.changes > 0, 'members');
    expect(heard.members).toEqual({
      workers: [
        {
          ...{ name: 'a', kind: 'kvtier', address: 'unix:/run/a', role: 'both', draining: false, node: null },
          events: null,
          revision: '',
        },
      ],
      nodes: [{ name: 'n', peer: null, events: null }],
    });
    await discovery.close();
  });

  it.each([
    [
      'two workers of one name',
      {
        workers: [
          { name: 'a', address: 'x:1' },
          { name: 'a', address: 'x:2' },
        ],
      },
      'workers.1.name: a is there twice; give each a name of its own',
    ],
    [
      'two nodes of one name',
      { nodes: [{ name: 'n' }, { name: 'n' }] },
      'nodes.1.name: n is there twice; give each a name of its own',
    ],
    [
      'a name that is none',
      { workers: [{ name: 'a b', address: 'x:1' }] },
      'workers.0.name: a name of letters, digits, ".", "_" and "-"',
    ],
  ])('refuses %s', (_, change, line) => {
    expect(() => parseConfig(discoverySchema, { kind: 'static', ...change }, 'test')).toThrow(
      expect.objectContaining({ code: 'CONFIG', message: `test: ${line}; correct it and start again` }),
    );
  });
});
