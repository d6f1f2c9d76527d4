/** Changes of tiers are told together, in their order, and soon. */
import type { TierChange } from '@kvtier/tiers';
import { afterEach, beforeEach, expect, it, vi } from 'vitest';
import { GatheredChanges } from './gathered-changes.ts';

beforeEach(() => void vi.useFakeTimers());
afterEach(() => void vi.useRealTimers());

const stub = (key: string) =>
  ({ key, digest: Buffer.alloc(32, key) }) as unknown as NonNullable<TierChange['namespace']>;
const [a, b] = [stub('a'), stub('b')];
const change = (kind: 'stored' | 'removed', namespace: typeof a, ...hashes: string[]): TierChange => ({
  ...{ kind, namespace },
  hashes: hashes as unknown as TierChange['hashes'],
});

function gathered(gatherMs = 5) {
  const all = new GatheredChanges(gatherMs);
  const said: string[] = [];
  const of = (tier: string) =>
    all.listener(({ kind, namespace, hashes }) => void said.push(`${tier} ${kind} ${namespace?.key} ${hashes.join()}`));
  return { all, said, arena: of('arena'), disk: of('disk') };
}

it('blocks that one tier says one by one are told together, 5 ms after the first', () => {
  const { said, arena } = gathered();
  arena(change('stored', a, 'h1'));
  vi.advanceTimersByTime(3);
  arena(change('stored', a, 'h2'));
  arena(change('stored', a, 'h3', 'h4'));
  vi.advanceTimersByTime(1);
  expect(said).toEqual([]);
  vi.advanceTimersByTime(1);
  expect(said).toEqual(['arena stored a h1,h2,h3,h4']);
  expect(vi.getTimerCount()).toBe(0);
});

it('what is not alike is told apart, in its order', () => {
  const { all, said, arena, disk } = gathered();
  arena(change('stored', a, 'h1'));
  arena(change('removed', a, 'h1'));
  arena(change('stored', a, 'h1'));
  disk(change('stored', a, 'h2'));
  disk(change('stored', b, 'h3'));
  arena({ kind: 'cleared', namespace: null, hashes: [] });
  all.flush();
  expect(said).toEqual([
    'arena stored a h1',
    'arena removed a h1',
    'arena stored a h1',
    'disk stored a h2',
    'disk stored b h3',
    'arena cleared undefined ',
  ]);
});

it('of very many none wait', () => {
  const { said, arena } = gathered();
  const many = Array.from({ length: 4_096 }, (_, at) => String(at));
  arena(change('stored', a, ...many));
  expect(said).toHaveLength(1);
});

it('with nothing to gather for, each is told at once', () => {
  const { said, arena } = gathered(0);
  arena(change('stored', a, 'h1'));
  arena(change('stored', a, 'h2'));
  expect(said).toEqual(['arena stored a h1', 'arena stored a h2']);
});
