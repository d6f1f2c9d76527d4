/** What tenants with a quota hold in a tier: whose it is, in which order it goes, and what memory it takes. */
import { setFlagsFromString } from 'node:v8';
import { runInNewContext } from 'node:vm';
import type { HashKey } from '@kvtier/identity';
import fc from 'fast-check';
import { expect, it } from 'vitest';
import { Account, TierRows } from './account.ts';
import { Counters } from './counters.ts';
import { Tenants } from './tenants.ts';
import { namespaceNamed } from './testing/bench.ts';

setFlagsFromString('--expose-gc');
const collect = runInNewContext('gc') as () => void;
const heapBytes = (): number => {
  collect();
  return process.memoryUsage().heapUsed;
};
const blockOf = (number: number): HashKey =>
  Buffer.from(Float64Array.of(number, number * 7, number * 13, number * 17).buffer).toString('latin1') as HashKey;

it('a random life: each tenant has its own order, of its own blocks, children before parents, whoever had a record before', () => {
  const step = fc.record({
    act: fc.constantFrom('add', 'add', 'add', 'touch', 'touch', 'remove', 'evict', 'clear'),
    tenant: fc.integer({ min: 1, max: 3 }),
    record: fc.oneof({ weight: 9, arbitrary: fc.nat(12) }, fc.constantFrom(5_000, 70_000, 2 ** 25)),
    parent: fc.nat(12),
    kept: fc.nat(12),
  });
  fc.assert(
    fc.property(fc.array(step, { maxLength: 120 }), (life) => {
      const tier = new TierRows();
      const accounts = [1, 2, 3].map((tenant) => new Account(tenant, 1, 100, tier));
      const spaces = [namespaceNamed('n'), namespaceNamed('m')];
      /** By tenant: records, the coldest first. */
      const orders: number[][] = [[], [], []];
      const bytesOf = (record: number): number => 1 + (record % 3);
      for (const [turn, { act, tenant, record, parent, kept }] of life.entries()) {
        const account = accounts[tenant - 1]!;
        const order = orders[tenant - 1]!;
        const holder = orders.findIndex((each) => each.includes(record));
        if (act === 'add') {
          account.add(record, spaces[record % 2]!, blockOf(record), bytesOf(record), turn % 3 === 0 ? -1 : parent);
          if (holder !== -1) continue; // each block once
          const above = turn % 3 === 0 ? -1 : order.indexOf(parent);
          order.splice(above === -1 ? order.length : above, 0, record);
        } else if (act === 'touch') {
          tier.touch(record);
          if (holder !== -1) orders[holder] = [...orders[holder]!.filter((each) => each !== record), record];
        } else if (act === 'remove' && holder === tenant - 1) {
          account.remove(account.rowOf(record));
          orders[holder] = order.filter((each) => each !== record);
        } else if (act === 'evict') {
          const { rows } = tier;
          const victim = account.coldest((row) => rows.recordOf(row) !== kept);
          const expected = order.find((each) => each !== kept);
          expect(victim === undefined ? undefined : rows.recordOf(victim)).toBe(expected);
          if (victim === undefined || expected === undefined) continue;
          expect([rows.namespaceOf(victim), rows.hashOf(victim)]).toEqual([spaces[expected % 2], blockOf(expected)]);
          account.remove(victim);
          orders[tenant - 1] = order.filter((each) => each !== expected);
        } else if (act === 'clear') {
          tier.rows.clear();
          for (const [at, each] of accounts.entries()) {
            each.bytes = 0;
            orders[at] = [];
          }
        }
        const seen: number[][] = [[], [], []];
        tier.rows.checkIntegrity((ring, row) => seen[ring - 1]!.push(tier.rows.recordOf(row)));
        expect(seen).toEqual(orders);
        const sums = orders.map((each) => each.reduce((sum, one) => sum + bytesOf(one), 0));
        expect(accounts.map(({ bytes }) => bytes)).toEqual(sums);
      }
    }),
    { numRuns: 300 },
  );
});

it('what a tenant with a quota holds lies outside of V8’s heap', () => {
  const count = 200_000;
  const evicted: number[] = [];
  const tenants: Tenants = new Tenants({
    ...{ quotas: { '*': { disk: count } }, tierNames: ['arena', 'disk'], counters: new Counters() },
    ...{ recordOf: () => -1, parentOf: () => null, isPinned: () => false, makeRoom: () => false },
    evict: (_bit, _namespace, hash) => evicted.push(Buffer.from(hash, 'latin1').readDoubleLE(0)),
  });
  const namespace = namespaceNamed('n');
  const id = tenants.open('t', namespace, 1);
  const before = heapBytes();
  for (let record = 0; record < count; record++) tenants.stored(1, record, namespace, blockOf(record), id);
  expect((heapBytes() - before) / count).toBeLessThan(16); // by name, in a Map, it took 175
  expect(tenants.gauges()['quota.bytes.disk.t']).toBe(count);
  expect([tenants.reserve(id, 1, 1), tenants.reserve(id, 1, 1), evicted]).toEqual([true, true, [0, 1]]);
  for (let record = 2; record < count; record++) tenants.removed(1, record);
  expect(tenants.gauges()['quota.bytes.disk.t']).toBe(0);
});

it.each([
  { where: 'side by side', count: 1 << 16, stride: 1 },
  { where: 'scattered over an index of 8 million', count: 1 << 14, stride: 512 },
])('takes at most 72 bytes a block, whose records lie $where, and no memory for what has gone', ({ count, stride }) => {
  const tier = new TierRows();
  const account = new Account(1, 1, count, tier);
  const empty = tier.rows.bytes;
  const records = Array.from({ length: count }, (_, at) => at * stride);
  for (const record of records) account.add(record, namespaceNamed('n'), blockOf(record), 1, -1);
  expect(tier.rows.bytes - empty).toBeLessThan(72 * count);
  for (const record of records) account.remove(account.rowOf(record));
  expect(tier.rows.bytes - empty).toBeLessThan(100);
});

it('a thousand that are left of a hundred thousand take the memory of some thousands', () => {
  const tier = new TierRows();
  const account = new Account(1, 1, 1, tier);
  const [count, left] = [100_000, 1_000];
  const empty = tier.rows.bytes;
  for (let record = 0; record < count; record++) account.add(record, namespaceNamed('n'), blockOf(record), 1, -1);
  for (let record = left; record < count; record++) account.remove(account.rowOf(record));
  expect(tier.rows.bytes - empty).toBeLessThan(256 * left); // one chunk of rows, and where they are found
  tier.rows.checkIntegrity(() => {});
  expect([account.bytes, tier.rows.recordOf(account.coldest(() => true)!)]).toEqual([left, 0]);
});

it('takes about the memory of the most that were there at a time, whichever go and come', () => {
  const tier = new TierRows();
  const account = new Account(1, 1, 1, tier);
  const [held, changes] = [10_000, 100_000];
  const add = (record: number): void => account.add(record, namespaceNamed('n'), blockOf(record), 1, -1);
  for (let record = 0; record < held; record++) add(record * 7);
  const { bytes } = tier.rows;
  for (let turn = 0; turn < changes; turn++) {
    account.remove(account.rowOf(((turn * 7_919) % held) * 7 + Math.floor(turn / held) * 70_000));
    add(((turn * 7_919) % held) * 7 + Math.floor(turn / held + 1) * 70_000);
  }
  expect(tier.rows.count).toBe(held);
  expect(tier.rows.bytes).toBeLessThan(1.1 * bytes);
  tier.rows.checkIntegrity(() => {});
});

it('holds more blocks than a Map of V8’s can have entries', () => {
  const [first, count] = [2 ** 24 - 2, 6];
  const tier = new TierRows();
  const account = new Account(1, 1, 100, tier);
  for (let record = first; record < first + count; record++)
    account.add(record, namespaceNamed('n'), blockOf(record), 1, -1);
  const coldest = account.coldest((row) => tier.rows.recordOf(row) > first + 2)!;
  expect([tier.rows.recordOf(coldest), account.bytes]).toEqual([first + 3, count]);
});
