/** A chain that grows more slowly than the arena turns over: what its blocks stand on is named once, and is in use all the while. */
import { policyNames } from '@kvtier/eviction';
import { type HashKey, headerBytes } from '@kvtier/identity';
import { ArenaTier } from '@kvtier/tiers';
import { hashNamed, namespaceNamed, TestBench } from '@kvtier/tiers/testing';
import { afterEach, describe, expect, it, vi } from 'vitest';
import type { Holdings } from './holdings.ts';
import type { StoreOptions } from './parts.ts';
import { Store } from './store.ts';
import { ManualClock, silent } from './testing/model.ts';

const slots = 512;
const payloadBytes = 4096 - headerBytes;
const n = namespaceNamed('n');
const names = (name: string, count: number): HashKey[] =>
  Array.from({ length: count }, (_, at) => hashNamed(`${name}${at}`));

let close = (): void => {};
afterEach(() => close());

function storeOf(more: Partial<StoreOptions> & { readonly policy?: (typeof policyNames)[number] } = {}) {
  const { policy, ...options } = more;
  const arenaBytes = (slots + 1) * 4096;
  const bench = new TestBench(arenaBytes);
  const clock = new ManualClock();
  const order = policy === undefined ? {} : { policy };
  const arena = new ArenaTier({ arena: bench.arena, arenaBytes, nowUs: () => clock.nowUs(), ...order });
  const refresh = vi.spyOn(arena, 'refresh');
  const verify = async (_: unknown, blocks: readonly unknown[]): Promise<boolean[]> => blocks.map(() => true);
  const store = new Store({ arena, lower: [], readHeader: () => undefined, verify, clock, log: silent, ...options });
  close = () => {
    refresh.mockRestore();
    bench.dispose();
  };
  return { arena, store, refresh };
}

/** Reserves and commits at once; why blocks were refused. */
function put(session: Holdings, parent: HashKey | null, hashes: readonly HashKey[]): string[] {
  const taken = session.reserve(parent, hashes);
  const own = taken.flatMap(({ slot }) => slot ?? []);
  session.commit(
    own,
    own.map(() => 0n),
  );
  return taken.flatMap(({ reason }) => reason || []);
}

describe.each(policyNames)('%s', (policy) => {
  it('an answer of two turnovers is held from its prompt on', () => {
    const { arena, store, refresh } = storeOf({ policy });
    const session = store.open(n, payloadBytes, 16);
    const chain = names('prompt', 16);
    expect(put(session, null, chain)).toEqual([]);
    for (let step = 0; step < 64; step++) {
      expect(put(session, null, names(`others ${step}.`, slots / 32))).toEqual([]);
      const next = hashNamed(`answer ${step}`);
      expect(put(session, chain.at(-1)!, [next])).toEqual([]);
      chain.push(next);
    }
    expect(arena.lookup(n, chain)).toBe(chain.length);
    // A few times a turnover, and each time from the root on.
    expect(refresh.mock.calls.length).toBeLessThanOrEqual(9);
    for (const [, hashes] of refresh.mock.calls) expect(hashes).toEqual(chain.slice(0, hashes.length));
    // It is not kept for ever: nothing is said of one that has ended, and none of this was a use.
    for (let step = 0; step < 40; step++) put(session, null, names(`later ${step}.`, slots / 32));
    expect(arena.lookup(n, chain)).toBe(0);
    arena.checkIntegrity();
  });

  it('is told before there is made room for what follows', () => {
    const { arena, store } = storeOf({ policy });
    const session = store.open(n, payloadBytes, 16);
    const chain = names('prompt', 16);
    expect(put(session, null, chain)).toEqual([]);
    for (let step = 0; arena.stats().blocks < slots; step++) put(session, null, [hashNamed(`others ${step}`)]);
    expect(arena.lookup(n, chain)).toBe(16);
    const next = names('answer', 32);
    expect(put(session, chain.at(-1)!, next)).toEqual([]);
    expect(arena.lookup(n, [...chain, ...next])).toBe(48);
  });

  // By frequency what is hot stays, and the rest turns over the sooner.
  it.each(policy === 'lfu' ? [50, 70] : [50, 70, 85])(
    'beside %d percent of the arena that are used all the time',
    (percent) => {
      const { arena, store } = storeOf({ policy });
      const session = store.open(n, payloadBytes, 16);
      const hot = Array.from({ length: Math.floor((slots * percent) / 1600) }, (_, at) => names(`hot ${at}.`, 16));
      for (const one of hot) expect(put(session, null, one)).toEqual([]);
      const chain = names('prompt', 16);
      for (let step = 0; step < 240; step++) {
        if (step % 4 === 0) for (const one of hot) store.lookup(session.state, one);
        expect(put(session, null, names(`others ${step}.`, 8))).toEqual([]);
        // The arena has turned over: how soon is known.
        if (step === 140) expect(put(session, null, chain)).toEqual([]);
        if (step <= 140) continue;
        const next = hashNamed(`answer ${step}`);
        if (step % 4 === 0) chain.push(next);
        if (step % 4 === 0) expect(put(session, chain.at(-2)!, [next])).toEqual([]);
      }
      expect(arena.lookup(n, chain)).toBe(chain.length);
    },
  );

  it('of which its end alone is used', () => {
    const { arena, store } = storeOf({ policy });
    const session = store.open(n, payloadBytes, 16);
    const chain = names('prompt', 16);
    expect(put(session, null, chain)).toEqual([]);
    for (let step = 0; step < 64; step++) {
      expect(put(session, null, names(`others ${step}.`, slots / 32))).toEqual([]);
      store.lookup(session.state, chain.slice(8));
      const next = hashNamed(`answer ${step}`);
      expect(put(session, chain.at(-1)!, [next])).toEqual([]);
      chain.push(next);
    }
    expect(arena.lookup(n, chain)).toBe(chain.length);
  });

  it('what many follow is told a few times a turnover', () => {
    const { arena, store, refresh } = storeOf({ policy });
    const session = store.open(n, payloadBytes, 16);
    const chain = names('prompt', 16);
    expect(put(session, null, chain)).toEqual([]);
    for (let step = 0; step < slots; step++) {
      expect(put(session, chain.at(-1)!, [hashNamed(`answer ${step}`)])).toEqual([]);
    }
    expect(refresh.mock.calls.length).toBeLessThanOrEqual(4);
    expect(refresh).toHaveBeenCalled();
    expect(arena.lookup(n, chain)).toBe(16);
  });
});

it('of a tenant with a quota the turnover is that of its quota', () => {
  const { arena, store } = storeOf({ quotas: { small: { arena: 64 * payloadBytes } } });
  const session = store.open(n, payloadBytes, 16, { tenant: 'small' });
  const chain = names('prompt', 8);
  expect(put(session, null, chain)).toEqual([]);
  for (let step = 0; step < 32; step++) {
    expect(put(session, null, names(`others ${step}.`, 8))).toEqual([]);
    const next = hashNamed(`answer ${step}`);
    expect(put(session, chain.at(-1)!, [next])).toEqual([]);
    chain.push(next);
  }
  expect(arena.lookup(n, chain)).toBe(chain.length);
});

it('a long chain is told piece by piece, once; and one that says to be its own parent does not keep the node', () => {
  const { arena, store, refresh } = storeOf({ limits: { touchBatchBlocks: 64, maxTouchBlocks: 300 } });
  const session = store.open(n, payloadBytes, 16);
  const chain = names('prompt', 200);
  expect(put(session, null, chain)).toEqual([]);
  for (let step = 0; step < 10; step++) put(session, null, names(`others ${step}.`, 16));
  const answer = names('answer', 3);
  expect(put(session, chain.at(-1)!, answer.slice(0, 1))).toEqual([]);
  expect(refresh.mock.calls.map(([, hashes]) => hashes)).toEqual([
    chain.slice(136),
    chain.slice(72, 136),
    chain.slice(8, 72),
    chain.slice(0, 8),
  ]);
  for (const at of [1, 2]) expect(put(session, answer[at - 1]!, [answer[at]!])).toEqual([]);
  expect(refresh).toHaveBeenCalledTimes(4);
  // a → b → a
  const [a, b] = names('circle', 2) as [HashKey, HashKey];
  put(session, null, [a, b]);
  arena.remove(n, [a], 'corrupt');
  put(session, b, [a]);
  for (let step = 0; step < 10; step++) put(session, null, names(`more ${step}.`, 16));
  refresh.mockClear();
  expect(put(session, a, [hashNamed('after the circle')])).toEqual([]);
  expect(refresh.mock.calls.flatMap(([, hashes]) => hashes).length).toBe(300);
});
