/** Which thread takes which body, and when. */
import { expect, it } from 'vitest';
import { helpMs, smallBodyBytes, type Taker, TextQueue } from './text-queue.ts';

const first: Taker = { takesLarge: false, isHelper: false };
const helper: Taker = { takesLarge: true, isHelper: true };
const alone: Taker = { takesLarge: true, isHelper: false };
const large = smallBodyBytes + 1;

it('small bodies are the first thread’s, large ones the others’', () => {
  const queue = new TextQueue<string>();
  queue.push('large', large, 0);
  queue.push('a', smallBodyBytes, 0);
  queue.push('b', 1, 0);
  expect([queue.take(first, 0), queue.take(helper, 0)]).toEqual(['a', 'large']);
  expect([queue.take(helper, 0), queue.take(first, 0), queue.length]).toEqual([undefined, 'b', 0]);
});

it('a small body that has waited is read by whoever is idle', () => {
  const queue = new TextQueue<string>();
  queue.push('a', 1, 100);
  queue.push('b', 1, 102);
  expect(queue.helpIn(101)).toBe(helpMs - 1);
  expect(queue.take(helper, 100 + helpMs - 0.1)).toBe(undefined);
  expect(queue.take(helper, 100 + helpMs)).toBe('a');
  expect([queue.take(helper, 100 + helpMs), queue.helpIn(100 + helpMs)]).toEqual([undefined, 2]);
  expect(queue.helpIn(1_000)).toBe(0);
  expect([queue.take(first, 103), queue.helpIn(103)]).toEqual(['b', undefined]);
});

it('one that is alone takes all, in order', () => {
  const queue = new TextQueue<number>();
  for (const [at, bytes] of [large, 1, large, 2].entries()) queue.push(at, bytes, 0);
  expect([0, 1, 2, 3, 4].map(() => queue.take(alone, 0))).toEqual([0, 1, 2, 3, undefined]);
});

it('what is for one thread is taken by no other; what is gone by none', () => {
  const queue = new TextQueue<string>();
  queue.push('hers', 0, 0, helper);
  queue.push('gone', 1, 0);
  expect([queue.remove('gone'), queue.remove('gone')]).toEqual([true, false]);
  expect([queue.take(first, 9_999), queue.helpIn(0)]).toEqual([undefined, undefined]);
  expect(queue.take(helper, 0)).toBe('hers');
  queue.push('a', 1, 0);
  queue.push('b', large, 0);
  expect([queue.takeAll(), queue.length]).toEqual([['a', 'b'], 0]);
});
