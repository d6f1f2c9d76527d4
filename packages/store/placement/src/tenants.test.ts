/** Whose quota a tenant has, and of whom it is known what its blocks take. */
import type { HashKey, Namespace } from '@kvtier/identity';
import { beforeEach, expect, it } from 'vitest';
import { Counters } from './counters.ts';
import { maxNamespaces, Tenants, type TenantsOptions } from './tenants.ts';
import { Bench, chain, namespaceNamed, settled } from './testing/bench.ts';

/** Numbers of blocks, as an index has them. */
const records = new Map<string, number>();
const recordOf = ({ key }: Namespace, hash: HashKey): number => {
  const name = key + hash;
  const record = records.get(name) ?? records.size;
  records.set(name, record);
  return record;
};
beforeEach(() => records.clear());

const tenantsWith = (quotas: TenantsOptions['quotas'], tierNames = ['arena'], rest: Partial<TenantsOptions> = {}) =>
  new Tenants({
    ...{ quotas, tierNames, counters: new Counters(), recordOf },
    ...{ parentOf: () => null, isPinned: () => false, makeRoom: () => false, evict: () => {} },
    ...rest,
  });
/** A tier lists the block, which is this tenant's. */
const store = (tenants: Tenants, bit: number, namespace: Namespace, hash: HashKey, owner: number): void =>
  tenants.stored(bit, recordOf(namespace, hash), namespace, hash, owner);
const [hash] = chain('x', 1);

it.each(['constructor', '__proto__', 'toString', 'anybody'])('a tenant named %s has everybody’s quota', (name) => {
  const tenants = tenantsWith({ '*': { arena: 10 } });
  const id = tenants.open(name, namespaceNamed('n'), 4);
  expect([tenants.reserve(id, 0, 8), tenants.reserve(id, 0, 8)]).toEqual([true, false]);
});

it('knows the namespaces that were used last, however many come', () => {
  const tenants = tenantsWith({ '*': { arena: 1_000 } });
  const [used, unused] = [namespaceNamed('used'), namespaceNamed('unused')];
  const id = tenants.open('t', unused, 4);
  tenants.open('t', used, 4);
  for (let i = 0; i < maxNamespaces - 2; i++) tenants.open('t', namespaceNamed(`n${i}`), 4);
  store(tenants, 0, used, hash!, id);
  tenants.open('t', namespaceNamed('last'), 4);
  store(tenants, 0, unused, hash!, id);
  store(tenants, 0, used, chain('y', 1)[0]!, id);
  expect(tenants.gauges()).toEqual({ 'quota.bytes.arena.t': 8 });
});

it.each([0.1, 4])(
  'an attach that is refused for blocks of %s bytes changes nothing of what a tenant holds',
  async (bytes) => {
    const bench = new Bench(32, {}, { plans: { disk: { write: 'none' } }, quotas: { '*': { arena: 8 } } });
    const engine = bench.engine('n', { tenant: 'a' });
    const attach = () => bench.store.open(engine.namespace, bytes, 16, { tenant: 'b' });
    expect(attach).toThrow(expect.objectContaining({ code: 'PROTOCOL' }));
    for (const name of 'abcdefghijklmnopqrst') {
      engine.put(chain(name, 1));
      await settled();
    }
    expect(bench.arena.stats().blocks).toBe(8);
    expect(bench.store.stats().counters).toMatchObject({ 'quota.bytes.arena.a': 8, 'quota.evicted.arena': 12 });
    expect(Object.keys(bench.store.stats().counters)).not.toContain('quota.bytes.arena.b');
  },
);

it('a tier that has lost all costs no turn that grows with what it held, and is empty for everybody', () => {
  const lower = ['disk', 'redis', 's3'];
  const tenants = tenantsWith({ '*': Object.fromEntries(lower.map((tier) => [tier, 1e6])) }, ['arena', ...lower]);
  const namespace = namespaceNamed('n');
  const id = tenants.open('t', namespace, 4);
  const blocks = chain('x', 100_000);
  const tookMs = lower.map((_, at) => {
    const bit = at + 1;
    for (const one of blocks) store(tenants, bit, namespace, one, id);
    const began = performance.now();
    tenants.cleared(bit);
    return performance.now() - began;
  });
  expect(Object.values(tenants.gauges())).toEqual([0, 0, 0]);
  expect(Math.min(...tookMs)).toBeLessThan(10); // of three: others use this machine, too
  // What comes anew counts anew, and what is left of before is no block of it.
  for (const one of blocks.slice(0, 3)) store(tenants, 1, namespace, one, id);
  for (const at of [0, 5]) tenants.removed(1, recordOf(namespace, blocks[at]!));
  expect(tenants.gauges()['quota.bytes.disk.t']).toBe(8);
});

it('at its quota a tenant passes over what it has pinned once, not with each block', () => {
  const [pinned, free] = [1_000, 200];
  const kept = new Set(chain('p', pinned));
  const evicted: string[] = [];
  let looks = 0;
  const tenants = tenantsWith({ '*': { arena: pinned + free } }, ['arena'], {
    isPinned: (_, name) => ++looks > 0 && kept.has(name),
    evict: (_bit, _namespace, name) => evicted.push(name),
  });
  const namespace = namespaceNamed('n');
  const id = tenants.open('t', namespace, 1);
  for (const one of [...kept, ...chain('x', free)]) store(tenants, 0, namespace, one, id);
  for (let block = 0; block < free; block++) expect(tenants.reserve(id, 0, 1)).toBe(true);
  expect(evicted).toEqual(chain('x', free));
  expect(looks).toBe(pinned + free);
  expect(tenants.reserve(id, 0, 1)).toBe(false);
  kept.clear();
  expect([tenants.reserve(id, 0, 1), evicted.at(-1)]).toEqual([true, 'p0']);
});

it('a tenant at its quota looks at all its blocks again only where one of them was let go', () => {
  const namespace = namespaceNamed('n');
  const own = chain('p', 100);
  const kept = new Set(own);
  let looks = 0;
  let letGo: (() => void) | undefined;
  const tenants: Tenants = tenantsWith({ '*': { arena: 100 } }, ['arena'], {
    isPinned: (_, name) => ++looks > 0 && kept.has(name),
    makeRoom: () => {
      tenants.unpinned(namespace, chain('other', 1)[0]!);
      letGo?.();
      return true;
    },
  });
  const id = tenants.open('t', namespace, 1);
  for (const one of own) store(tenants, 0, namespace, one, id);
  expect([tenants.reserve(id, 0, 1), looks]).toEqual([false, 100]);
  letGo = () => {
    kept.delete(own[7]!);
    tenants.unpinned(namespace, own[7]!);
  };
  expect(tenants.reserve(id, 0, 1)).toBe(true);
});
