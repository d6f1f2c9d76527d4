/** Headers by which clients say what a request belongs to, and when its tokens are wanted. */
import { expect, it } from 'vitest';
import { sessionHeaders, sessionIn, targetsIn } from './wishes.ts';

it('a session is the first that is named', () => {
  for (const name of sessionHeaders) expect(sessionIn({ [name]: 's', other: 'x' })).toBe('s');
  expect(sessionIn({ 'x-claude-code-session-id': 'late', 'x-session-id': '', 'x-session-token': 'early' })).toBe(
    'early',
  );
  expect(sessionIn({ 'x-session-id': ['a', 'b'], 'x-session-affinity': 't'.repeat(1_000) })).toBe('t'.repeat(512));
  expect(sessionIn({})).toBe('');
});

it('targets are milliseconds, llm-d’s name first', () => {
  const both = { 'x-slo-ttft-ms': '7', 'x-llm-d-slo-ttft-ms': '1500.5', 'x-slo-tpot-ms': '40' };
  expect(targetsIn(both, 9)).toEqual({ ttftMs: 1_500.5, itlMs: 40 });
  expect(targetsIn({}, 9)).toEqual({ ttftMs: 9, itlMs: undefined });
  expect(targetsIn({}, undefined)).toEqual({ ttftMs: undefined, itlMs: undefined });
});

it.each(['0', '-1', 'soon', '1e3', '600001', '', ['1', '2']])('%j is none, and is named', (value) =>
  expect(() => targetsIn({ 'x-slo-ttft-ms': value }, 9)).toThrow(
    expect.objectContaining({ code: 'REQUEST', message: expect.stringContaining('header x-slo-ttft-ms: must be') }),
  ),
);
