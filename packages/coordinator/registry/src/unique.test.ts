/** What a discovery may tell: each name and address once, the same choice whatever order members come in, bounded. */
import { maxMembers, type WorkerRecord } from '@kvtier/config';
import { Lines } from '@kvtier/membership/testing';
import fc from 'fast-check';
import { expect, it } from 'vitest';
import { workerNamed } from './testing/discovery-conformance.ts';
import { UniqueMembers } from './unique.ts';

it('keeps the first by name of those that share a name or an address, whatever their order', () => {
  const record = fc.record({ name: fc.constantFrom('a', 'b', 'c', 'd'), address: fc.constantFrom('x', 'y', 'z') });
  fc.assert(
    fc.property(fc.array(record, { maxLength: 8 }), (records) => {
      const workers = records.map(({ name, address }) => workerNamed(name, { address }));
      const told = new UniqueMembers(new Lines()).of({ workers, nodes: [] }).workers;
      // Naively: one after the other, in the order of names.
      const kept: WorkerRecord[] = [];
      for (const name of ['a', 'b', 'c', 'd']) {
        for (const worker of workers.filter((each) => each.name === name)) {
          if (!kept.some((other) => other.name === name || other.address === worker.address)) kept.push(worker);
        }
      }
      expect(told).toEqual(kept);
    }),
  );
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
