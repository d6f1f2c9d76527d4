/** Which nodes are peers: all of them where they may, and else first those whose prompts others wait for. */

import { workerRecordSchema } from '@kvtier/config';
import { maxPeers } from '@kvtier/tiers/peer';
import { expect, it } from 'vitest';
import { PeerChoice } from './peer-choice.ts';

const names = (count: number): string[] => Array.from({ length: count }, (_, at) => `node-${at}`);
const workersOf = (roles: readonly ('prefill' | 'decode' | 'both' | 'none')[]) =>
  roles.flatMap((role, at) => {
    const worker = { name: `w${at}`, address: `10.0.0.${at}:1`, node: `node-${at}` };
    return role === 'none' ? [] : [workerRecordSchema.parse({ ...worker, role })];
  });
/** By node. */
const choices = (all: readonly string[]) => new Map(all.map((name) => [name, new PeerChoice(name)]));
const peersOf = (choice: PeerChoice, own: string, all: readonly string[], workers: ReturnType<typeof workersOf>) =>
  choice
    .order(
      all.filter((name) => name !== own).map((name) => ({ name })),
      workers,
    )
    .slice(0, maxPeers)
    .map(({ name }) => name);

it.each([18, 64, 65])('%i nodes: each is a peer of each other one, whatever their roles', (count) => {
  const all = names(count);
  for (const [own, choice] of choices(all))
    expect(peersOf(choice, own, all, []).sort()).toEqual(all.filter((name) => name !== own).sort());
});

it('200 nodes, 50 with workers that take prefill: each node beside a decode worker fetches from all 50', () => {
  const all = names(200);
  const workers = workersOf(all.map((_, at) => (at % 4 === 0 ? (at % 8 === 0 ? 'prefill' : 'both') : 'decode')));
  for (const [own, choice] of choices(all)) {
    const peers = peersOf(choice, own, all, workers);
    const lacking = all.filter((name, at) => at % 4 === 0 && name !== own && !peers.includes(name));
    expect([peers.length, lacking]).toEqual([64, []]);
  }
});

it.each([100, 200])(
  '%i nodes beside engines that are in no list: each fetches from all that say they take prefill',
  (count) => {
    const all = names(count).map((name, at) => ({
      name,
      role: at % 4 === 0 ? (at % 8 === 0 ? ('prefill' as const) : ('both' as const)) : ('decode' as const),
    }));
    for (const { name: own } of all) {
      const ordered = new PeerChoice(own)
        .order(
          all.filter(({ name }) => name !== own),
          [],
        )
        .slice(0, maxPeers);
      const lacking = all.filter((node, at) => at % 4 === 0 && node.name !== own && !ordered.includes(node));
      expect([ordered.length, lacking]).toEqual([64, []]);
    }
  },
);

it('a worker of the list knows better than the configuration of its node', () => {
  const nodes = names(2).map((name) => ({
    name,
    role: name === 'node-0' ? ('decode' as const) : ('prefill' as const),
  }));
  const order = (roles: readonly ('prefill' | 'decode' | 'none')[]) =>
    new PeerChoice('own').order(nodes, workersOf(roles)).map(({ name }) => name);
  expect([order(['none', 'none']), order(['prefill', 'decode'])]).toEqual([
    ['node-1', 'node-0'],
    ['node-0', 'node-1'],
  ]);
});

it('beyond that each node has a choice of its own, which stays as long as nobody comes or goes', () => {
  const all = names(200);
  const workers = workersOf(all.map(() => 'both' as const));
  const chosen = [...choices(all)].map(([own, choice]) => {
    const [first, again] = [peersOf(choice, own, all, workers), peersOf(choice, own, [...all].reverse(), workers)];
    expect(again).toEqual(first);
    return first;
  });
  expect(new Set(chosen.map((peers) => [...peers].sort().join())).size).toBe(200);
  // Nobody is chosen by hardly anybody, or by all.
  const times = all.map((name) => chosen.filter((peers) => peers.includes(name)).length);
  expect([Math.min(...times) > 32, Math.max(...times) < 128]).toEqual([true, true]);
});

it('a worker that is away for a moment changes no peer; one that comes back with another role does', () => {
  const all = names(100);
  const roles = all.map((_, at) => (at < 10 ? ('prefill' as const) : ('decode' as const)));
  const choice = new PeerChoice('node-99');
  const first = peersOf(choice, 'node-99', all, workersOf(roles));
  const away = roles.map((role, at) => (at === 3 ? ('none' as const) : role));
  expect(peersOf(choice, 'node-99', all, workersOf(away))).toEqual(first);
  const other = roles.map((role, at) => (at === 3 ? ('decode' as const) : role));
  expect(first.indexOf('node-3')).toBeLessThan(10);
  expect(peersOf(choice, 'node-99', all, workersOf(other)).slice(0, 9)).toEqual(
    first.slice(0, 10).filter((name) => name !== 'node-3'),
  );
});
