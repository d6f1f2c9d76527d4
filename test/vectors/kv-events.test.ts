/** Batches that vLLM wrote, in both encodings, written and read. */
import { expect, it } from 'vitest';
import { readRecorded } from './kv-cache-manager.ts';
import { areEventCases, replayEvents } from './kv-events.ts';

const content = readRecorded(new URL('../../packages/base/events/vectors/kv_events.json', import.meta.url));

it('kv_events.json', () => {
  expect(areEventCases(content)).toBe(true);
  if (!areEventCases(content)) return;
  expect(replayEvents('kv_events.json', content)).toEqual({ equal: 48, total: 48, first: undefined });
});

it('tells what differs first', () => {
  if (!areEventCases(content)) return;
  const [first, ...others] = content.cases;
  const changed = {
    ...first!,
    payload_legacy_array_encoding: `${first!.payload_legacy_array_encoding.slice(0, -2)}01`,
  };
  const report = replayEvents('x', { cases: [changed, ...others] });
  expect(report).toMatchObject({ equal: 46, total: 48, first: { index: 2, what: 'payload' } });
});
