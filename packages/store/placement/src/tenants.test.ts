/** Whose quota a tenant has, and of whom it is known what its blocks take. */
import { expect, it } from 'vitest';
import { Counters } from './counters.ts';
import { maxNamespaces, Tenants } from './tenants.ts';
import { chain, namespaceNamed } from './testing/bench.ts';

const tenantsWith = (quotas: ConstructorParameters<typeof Tenants>[0]['quotas']): Tenants =>
  new Tenants({
    ...{ quotas, tierNames: ['arena'], counters: new Counters() },
    ...{ parentOf: () => null, isPinned: () => false, evict: () => {} },
  });
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
  tenants.stored(0, used, hash!, id);
  tenants.open('t', namespaceNamed('last'), 4);
  tenants.stored(0, unused, hash!, id);
  tenants.stored(0, used, chain('y', 1)[0]!, id);
  expect(tenants.gauges()).toEqual({ 'quota.bytes.arena.t': 8 });
});
