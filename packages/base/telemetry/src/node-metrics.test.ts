import { expect, it } from 'vitest';
import { nodeMetricsPieces, nodeMetricsText } from './node-metrics.ts';

const arena = {
  tier: 'arena',
  blocks: 2n,
  bytes: 10n,
  capacityBytes: 40n,
  hits: 1,
  misses: 0,
  evictions: 0,
  corrupt: 0,
};

it('is Prometheus’ text form, whatever a tenant is called', () => {
  const text = nodeMetricsText({
    tiers: [{ ...arena, inService: true, detail: { huge_page_bytes: 8 } }],
    counters: { 'turns.longest_us': 1_500_000n, 'quota.bytes.arena.a"b\\c\nd': 7 },
  });
  expect(text).toContain('# TYPE kvtier_tier_capacity_bytes gauge\nkvtier_tier_capacity_bytes{tier="arena"} 40\n\n');
  expect(text).toContain('\nkvtier_tier_in_service{tier="arena"} 1\n');
  expect(text).toContain('\nkvtier_tier_detail{tier="arena",name="huge_page_bytes"} 8\n');
  expect(text).toContain('\nkvtier_node_longest_turn_seconds 1.5\n');
  expect(text).toContain('\nkvtier_node_events{event="quota.bytes.arena.a\\"b\\\\c\\nd"} 7\n');
  expect(text.endsWith('\n')).toBe(true);
  for (const line of text.split('\n'))
    expect(line).toMatch(/^(# (HELP|TYPE) kvtier_\w+ .+|kvtier_\w+(\{.*\})? [\d.]+|)$/);
});

it('comes in pieces of whole lines, each of them short', () => {
  const counters = Object.fromEntries(Array.from({ length: 5_500 }, (_, i) => [`event.${i}`, i]));
  const pieces = [...nodeMetricsPieces({ tiers: [], counters })];
  expect(pieces.length).toBe(23);
  for (const piece of pieces) expect(piece).toMatch(/\n$/);
  expect(pieces.join('').match(/^kvtier_node_events\{/gm)).toHaveLength(5_500);
  expect(pieces.join('')).toBe(nodeMetricsText({ tiers: [], counters }));
});
