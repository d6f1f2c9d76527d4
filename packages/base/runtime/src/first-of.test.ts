import { getEventListeners } from 'node:events';
import { expect, it } from 'vitest';
import { firstOf } from './first-of.ts';

it('is aborted with the first of them, for its reason', () => {
  const [a, b] = [new AbortController(), new AbortController()];
  const { signal } = firstOf([a.signal, b.signal]);
  expect(signal.aborted).toBe(false);
  b.abort('b');
  a.abort('a');
  expect([signal.aborted, signal.reason]).toEqual([true, 'b']);
  expect(firstOf([a.signal, b.signal]).signal.reason).toBe('a');
});

it('leaves nothing at a signal that lives on, and hears nothing of it, once it has ended', () => {
  const source = new AbortController();
  const all = Array.from({ length: 100 }, () => firstOf([source.signal, new AbortController().signal]));
  const listeners = (): number => getEventListeners(source.signal, 'abort').length;
  expect(listeners()).toBe(100);
  for (const one of all) one.end();
  expect(listeners()).toBe(0);
  source.abort();
  expect(all.some(({ signal }) => signal.aborted)).toBe(false);
});
