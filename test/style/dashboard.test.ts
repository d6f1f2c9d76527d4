/** infra/grafana/kvtier.json asks for metrics, labels and names that there are, and can be imported into any Grafana. */
import { describe, expect, it } from 'vitest';
import { groupedBy, problemsOf } from './queries.ts';
import { read } from './tree.ts';

interface Target {
  readonly refId: string;
  readonly datasource: object;
  readonly expr: string;
  readonly legendFormat: string;
}
interface Panel {
  readonly id: number;
  readonly type: string;
  readonly title: string;
  readonly description?: string;
  readonly datasource?: object;
  readonly gridPos: { readonly x: number; readonly y: number; readonly w: number; readonly h: number };
  readonly targets?: readonly Target[];
}
interface Variable {
  readonly name: string;
  readonly type: string;
  readonly query: string | { readonly query: string };
}
const dashboard = JSON.parse(read('infra/grafana/kvtier.json')) as {
  readonly schemaVersion: number;
  readonly panels: readonly Panel[];
  readonly templating: { readonly list: readonly Variable[] };
};
const source = { type: 'prometheus', uid: '$' + '{datasource}' };
const panels = dashboard.panels.filter(({ type }) => type !== 'row');
const targets = panels.flatMap((panel) => panel.targets!.map((target) => [panel.title, target] as const));

it.each(targets.map(([title, { refId, ...target }]) => [title, refId, target] as const))('%s, %s', (_, __, target) => {
  expect(problemsOf(target.expr)).toEqual([]);
  expect(target.datasource).toEqual(source);
  // Prometheus drops what is not grouped by: such a label would be empty in the legend.
  const shown = [...target.legendFormat.matchAll(/\{\{(\w+)\}\}/g)].map(([, label]) => label!);
  const grouped = groupedBy(target.expr);
  expect(shown.filter((label) => !grouped.has(label))).toEqual([]);
  const hidden = [...grouped].filter((label) => label !== 'le' && !shown.includes(label));
  expect(hidden, 'lines of one name').toEqual([]);
});

it.each(targets.map(([title, { expr }]) => [title, expr] as const))('%s: no worker counts twice: %s', (_, expr) => {
  // Each coordinator passes on what all workers tell. A quantile or a share of such sums is the same.
  const isOfWorkers = /kvtier_(connector|engine)_/.test(expr);
  const isSum = /^(sum|count)\b/.test(expr) && !/build_info|\) \/ sum/.test(expr);
  if (isOfWorkers && isSum) expect(groupedBy(expr)).toContain('instance');
});

it('pods of vLLM are seen by what their own connector tells: loads, stores, and why not', () => {
  const all = targets.map(([, { expr }]) => expr).join('\n');
  const told = ['loaded_tokens_total', 'stored_blocks_total', 'store_refused_blocks_total', 'denied_total', 'attached'];
  expect(told.filter((name) => !all.includes(`vllm:kvtier_${name}{instance=~"$pod"`))).toEqual([]);
  expect(all).toContain('sum by (instance, reason) (rate(vllm:kvtier_denied_total');
});

it('a part of a tier that is out is seen, too', () => {
  const [, { expr }] = targets.find(([title, { refId }]) => title === 'Out of service' && refId === 'B')!;
  expect(/name=~"([^"]+)"/.exec(expr)![1]!.split('|')).toEqual([
    ...['devices_out_of_service', 'devices_without_space', 'partitions_out', 'writes_refused'],
  ]);
});

it('what it lets choose is asked of metrics that there are, and used', () => {
  const [datasource, ...queries] = dashboard.templating.list;
  expect(datasource).toMatchObject({ name: 'datasource', type: 'datasource', query: 'prometheus' });
  const all = targets.map(([, { expr }]) => expr).join('\n');
  for (const { name, query } of queries) {
    const [, metric, label] = /^label_values\(([\w:]+), (\w+)\)$/.exec((query as { query: string }).query)!;
    expect(problemsOf(`max by (${label}) (${metric})`)).toEqual([]);
    expect(all).toContain(`"$${name}"`);
  }
  const variables = new Set([...all.matchAll(/\$(\w+)/g)].map(([, name]) => name!));
  expect([...variables].filter((name) => !name.startsWith('__')).toSorted()).toEqual(queries.map(({ name }) => name));
});

it('is one page: ids and places of their own, rows, a description each', () => {
  expect(dashboard.schemaVersion).toBeGreaterThanOrEqual(39);
  const ids = dashboard.panels.map(({ id }) => id);
  expect(new Set(ids).size).toBe(ids.length);
  const cells = dashboard.panels.flatMap(({ gridPos: { x, y, w, h } }) =>
    Array.from({ length: w * h }, (_, at) => `${x + (at % w)},${y + Math.floor(at / w)}`),
  );
  expect(new Set(cells).size, 'panels on top of each other').toBe(cells.length);
  for (const { title, description, datasource } of panels) {
    expect(description, title).toMatch(/\.$/);
    expect(datasource, title).toEqual(source);
  }
  const rows = dashboard.panels.filter(({ type }) => type === 'row').map(({ title }) => title);
  expect(rows).toEqual(['Requests', 'Hits', 'Tiers', 'Routing and queue', 'Hand-offs', 'Nodes and peers', 'Processes']);
});

describe('a query is refused that asks for', () => {
  it.each([
    ['a metric that is not there', 'rate(kvtier_nothing_total[5m])', 'kvtier_nothing_total: no such metric'],
    [
      'a histogram as if it were a number',
      'kvtier_request_seconds',
      'kvtier_request_seconds: no such metric without _bucket, _sum or _count',
    ],
    ['another label', 'kvtier_tier_bytes{medium="x"}', 'kvtier_tier_bytes: has no label medium'],
    [
      'another group',
      'sum by (tenant) (kvtier_tier_bytes)',
      'kvtier_tier_bytes: is grouped by tenant, which it has not',
    ],
    ['le of no histogram', 'sum by (le) (kvtier_tier_bytes)', 'kvtier_tier_bytes: is grouped by le, which it has not'],
    ['another count', 'kvtier_node_events{event="load.lost"}', 'kvtier_node_events: no load.lost is documented'],
    [
      'one other among several',
      'kvtier_tier_detail{name=~"fetched_bytes|lost"}',
      'kvtier_tier_detail: no lost is documented',
    ],
    ['another count of a pod', 'vllm:kvtier_lost_total', 'vllm:kvtier_lost_total: no such metric'],
    [
      'another label of a pod',
      'vllm:kvtier_loads_total{reason="slow"}',
      'vllm:kvtier_loads_total: has no label reason',
    ],
    ['nothing', 'up == 0', 'asks for nothing of kvtier'],
  ])('%s', (_, query, problem) => expect(problemsOf(query)).toEqual([problem]));
});
