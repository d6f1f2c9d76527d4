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

it('one that was away says no news, and who was never heard counts for as many, whenever it comes', () => {
  const votes = new Votes('a', 3);
  expect([votes.cast('1', '1', 'a', 'a'), votes.cast('2', '2', 'a', 'a'), votes.close()]).toEqual(Array(3).fill(false));
  expect([votes.cast('2', '2', 'b', 'a', true), votes.cast('3', '3', 'c', undefined, true)]).toEqual([false, true]);
});

it('those that are away do not count against one that says otherwise than before, and do against one that always did', () => {
  const votes = new Votes('a', 3);
  const all = [votes.cast('1', '1', 'a', 'a'), votes.cast('2', '2', 'a', 'a'), votes.cast('3', '3', 'b', 'b')];
  expect(all).toEqual([false, false, false]);
  for (const sentinel of '123') votes.left(sentinel);
  const back = [votes.cast('3', '3', 'b', 'b', true), votes.cast('1', '1', 'a', 'a', true)];
  expect([...back, votes.cast('3', '3', 'c', 'b', true)]).toEqual([false, false, false]);
  votes.left('1');
  expect([votes.cast('3', '3', 'c', 'c'), votes.cast('3', '3', 'd', 'c', true)]).toEqual([false, true]);
});

it('one that is back is not the one that is still missing', () => {
  const votes = new Votes('a', 2);
  votes.cast('1', '1', 'a', 'a');
  votes.left('1');
  expect([votes.cast('1', '1', 'b', 'a', true), votes.cast('1', '1', 'b', 'b', true), votes.close()]).toEqual([
    false,
    false,
    true,
  ]);
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
