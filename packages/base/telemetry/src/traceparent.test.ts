/** What counts as a trace context, and what is left out as none. */
import { expect, it } from 'vitest';
import { traceparentOf } from './traceparent.ts';

const one = '00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01';

it('one that is whole, of any version but ff', () => {
  expect(traceparentOf(one)).toBe(one);
  expect(traceparentOf(one.replace(/^00/, 'cc'))).toBe(one.replace(/^00/, 'cc'));
});

it('nothing else', () => {
  const none = [
    ...[undefined, null, 7, [one], '', 'x', `${one}0`, ` ${one}`, `${one}\n`, one.slice(1), one.toUpperCase()],
    ...[
      one.replace(/^00/, 'ff'),
      one.replace(/-4b.*?-/, `-${'0'.repeat(32)}-`),
      one.replace('00f067aa0ba902b7', '0'.repeat(16)),
    ],
  ];
  expect(none.map(traceparentOf)).toEqual(none.map(() => undefined));
});
