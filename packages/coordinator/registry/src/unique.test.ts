/** What a discovery may tell: each name and address once, the same choice whatever order members come in, bounded. */
import { maxMembers, type WorkerRecord } from '@kvtier/config';
import { Lines } from '@kvtier/membership/testing';
import fc from 'fast-check';
import { expect, it } from 'vitest';
import { workerNamed } from './testing/discovery-conformance.ts';
import { UniqueMembers } from './unique.ts';

it('of those that share a name or an address keeps who was told before, else the first by name, whatever their order', () => {
  const record = fc.record({ name: fc.constantFrom('a', 'b', 'c', 'd'), address: fc.constantFrom('x', 'y', 'z') });
  fc.assert(
    fc.property(fc.array(fc.array(record, { maxLength: 8 }), { maxLength: 5 }), (seen) => {
      const unique = new UniqueMembers(new Lines());
      const isSame = (a: WorkerRecord, b: WorkerRecord): boolean => a.name === b.name && a.address === b.address;
      let before: WorkerRecord[] = [];
      for (const records of seen) {
        const workers = records.map(({ name, address }) => workerNamed(name, { address }));
        // Naively: those that stay, then one after the other, in the order of names.
        const kept = workers.filter((each, at) => {
          const isFirst = workers.findIndex((other) => isSame(each, other)) === at;
          return isFirst && before.some((old) => isSame(old, each));
        });
        for (const name of ['a', 'b', 'c', 'd']) {
          for (const worker of workers.filter((each) => each.name === name)) {
            if (!kept.some((other) => other.name === name || other.address === worker.address)) kept.push(worker);
          }
        }
        before = kept.sort((a, b) => a.name.localeCompare(b.name));
        expect(unique.of({ workers, nodes: [] }).workers).toEqual(before);
      }
    }),
  );
});

it('a newcomer takes no address and no name from one that is there, until that one is gone', () => {
  const lines = new Lines();
  const unique = new UniqueMembers(lines);
  const [old, thief, twin] = [workerNamed('b', { address: 'x' }), workerNamed('a', { address: 'x' }), workerNamed('b')];
  const told = (...workers: WorkerRecord[]) => unique.of({ workers, nodes: [] }).workers;
  expect(told(old)).toEqual([old]);
  expect(told(thief, old)).toEqual([old]);
  expect(told(twin, thief, old)).toEqual([old]);
  expect(lines.all).toEqual([
    'warn a member is ignored {"member":"worker a","reason":"it has the address of worker b (x)"}',
    'warn a member is ignored {"member":"worker b","reason":"there is another of this name; give each worker a name of its own"}',
  ]);
  expect(told(twin, thief)).toEqual([thief, twin]);
  const node = (name: string, port: number) => ({ name, peer: { host: 'h', port }, events: null });
  const nodes = (...all: ReturnType<typeof node>[]) => unique.of({ workers: [], nodes: all as never }).nodes;
  expect(nodes(node('m', 1))).toEqual([node('m', 1)]);
  expect(nodes(node('m', 2), node('m', 1))).toEqual([node('m', 1)]);
});

it('says once why one is ignored, and again when it has been gone meanwhile', () => {
  const lines = new Lines();
  const unique = new UniqueMembers(lines);
  const both = { workers: [workerNamed('a', { address: 'x' }), workerNamed('b', { address: 'x' })], nodes: [] };
  for (const members of [both, both, { workers: both.workers.slice(0, 1), nodes: [] }, both]) unique.of(members);
  const line = 'warn a member is ignored {"member":"worker b","reason":"it has the address of worker a (x)"}';
  expect(lines.all).toEqual([line, line]);
});

it('takes no more than fit', () => {
  const lines = new Lines();
  const workers = Array.from({ length: maxMembers }, (_, i) =>
    workerNamed(`w${String(i).padStart(5, '0')}`, { address: `x${i}` }),
  );
  const nodes = ['m', 'n'].map((name) => ({ name, peer: null, events: null }));
  const told = new UniqueMembers(lines).of({ workers: workers.slice(1), nodes: [nodes[1]!, nodes[0]!] });
  expect([told.workers.length, told.nodes.map(({ name }) => name)]).toEqual([maxMembers - 1, ['m']]);
  expect(lines.all).toEqual([
    `warn a member is ignored {"member":"node n","reason":"there are more than ${maxMembers} members; split the cluster"}`,
  ]);
});
