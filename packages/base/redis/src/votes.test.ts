/** Which answers end a connection, and which do not. */
import { expect, it } from 'vitest';
import { Votes } from './votes.ts';

/** What each answer in turn, `[sentinel, place, what it had said]`, does to a connection to `a`; last, that no more are waited for. */
const given = (sentinels: number, ...answers: (readonly [string, string, string?])[]): boolean[] => {
  const votes = new Votes('a', sentinels);
  return [...answers.map(([sentinel, place, before]) => votes.cast(sentinel, sentinel, place, before)), votes.close()];
};

it('more for one other place end it, as soon as who is missing cannot change that', () => {
  expect(given(3, ['1', 'b'], ['2', 'b'])).toEqual([false, true, true]);
  expect(given(3, ['1', 'b'], ['2', 'a'], ['3', 'b'])).toEqual([false, false, true, true]);
  expect(given(5, ['1', 'b'], ['2', 'c'], ['3', 'a'], ['4', 'd'], ['5', 'a'])).toEqual(Array(6).fill(false));
  expect(given(1, ['1', 'b', 'b'])).toEqual([true, true]);
});

it('fewer do not, and as many only where one of them was not heard before', () => {
  expect(given(3, ['1', 'b'], ['2', 'a'], ['3', 'a'])).toEqual([false, false, false, false]);
  expect(given(2, ['1', 'a', 'a'], ['2', 'b'])).toEqual([false, true, true]);
  expect(given(2, ['1', 'a', 'a'], ['2', 'b', 'b'])).toEqual([false, false, false]);
});

it('who is missing counts for it until nobody waits any longer', () => {
  expect(given(3, ['1', 'b', 'b'])).toEqual([false, true]);
  expect(given(3, ['1', 'a', 'a'], ['2', 'b', 'b'])).toEqual([false, false, false]);
});

it('one that says otherwise than before is enough, and one that comes to ours is not against it', () => {
  expect(given(3, ['1', 'a', 'a'], ['2', 'a', 'a'], ['3', 'b', 'a'])[2]).toBe(true);
  expect(given(3, ['1', 'a', 'b'], ['2', 'a'], ['3', 'b', 'b'])).toEqual([false, false, false, false]);
});

it('one that is asked by two names has one voice, that of its last answer', () => {
  const votes = new Votes('a', 4);
  const cast = (sentinel: string, voter: string, place: string): boolean => votes.cast(sentinel, voter, place, place);
  expect([cast('1', 'i', 'b'), cast('i', 'i', 'b'), cast('2', '2', 'a'), cast('3', '3', 'a')]).toEqual(
    Array(4).fill(false),
  );
  expect([votes.close(), cast('2', '2', 'b'), cast('1', 'i', 'a')]).toEqual([false, true, false]);
  // Elsewhere by now: what it said where it was is not counted besides.
  expect([cast('2', 'elsewhere', 'b'), cast('3', '3', 'b')]).toEqual([false, true]);
});
