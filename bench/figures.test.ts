/** A figure is a comparison: without something to compare with it is refused, and not written down as NaN. */
import { KvError } from '@kvtier/errors';
import { expect, it } from 'vitest';
import { rate, time } from './figures.ts';

it('the ratio is more where more is done, or less time is taken', () => {
  expect(rate('r', 3, 'GB/s', 2, 'memcpy').ratio).toBe(1.5);
  expect(time('t', 3, 'ms', 2, 'cold').ratio).toBe(2 / 3);
  expect(rate('r', 0, 'GB/s', 2, 'memcpy').ratio).toBe(0);
});

it.each([
  ['a rate of nothing beside nothing', () => rate('f', 0, '/s', 0, 'peer')],
  ['a rate beside a limit of 0', () => rate('f', 1, '/s', 0, 'peer')],
  ['a rate that is none', () => rate('f', Number.NaN, '/s', 1, 'peer')],
  ['a time beside one below 0', () => time('f', 1, 'ms', -0.15, 'peer')],
  ['a time of 0', () => time('f', 0, 'ms', 1, 'peer')],
  ['a time beside none', () => time('f', 1, 'ms', Number.NaN, 'peer')],
])('%s is refused', (_name, figure) => {
  expect(figure).toThrow(KvError);
  expect(figure).toThrow(/^figure f: .* \(peer\) /);
});
