import { expect, it } from 'vitest';
import { nearest } from './index.ts';

it.each([
  ['prot', 'port'],
  ['server', 'servers'],
  ['serverss', 'servers'],
  ['placment', 'placement'],
  ['po', 'port'],
  ['colour', undefined],
  ['toString', undefined],
])('of "%s" it is %s', (word, name) => {
  expect(nearest(word, ['placement', 'port', 'servers'])).toBe(name);
});
