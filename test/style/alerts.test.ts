/** infra/prometheus/alerts.yml names metrics and labels that docs/metrics.md has, which is compared with the source (metrics.test.ts). */
import { expect, it } from 'vitest';
import { problemsOf } from './queries.ts';
import { filesBelow, read } from './tree.ts';

const rules = read('infra/prometheus/alerts.yml')
  .split(/^ *- alert: /m)
  .slice(1);
const nameOf = (rule: string): string => rule.split('\n')[0]!;
const expressionOf = (rule: string): string => /^ *expr: ([\s\S]*?)^ *(?:for|labels):/m.exec(rule)![1]!;

it('every alert has a name of its own, how much it matters, and a sentence', () => {
  expect(rules.length).toBeGreaterThan(5);
  expect(new Set(rules.map(nameOf)).size).toBe(rules.length);
  for (const rule of rules)
    expect(rule).toMatch(/severity: (critical|warning|info) }\n *annotations: { summary: ".+\." }/);
});

const below = (folder: string): string => filesBelow(folder, ['.py']).map(read).join('\n');
const engineSources: Readonly<Record<string, string>> = {
  vllm: below('packages/connector/python/src/kvtier/vllm'),
  sglang: below('packages/connector/python/src/kvtier/sglang'),
};

it('shares of requests are of those that clients made', () => {
  const shares = rules.map(expressionOf).filter((expression) => /requests_total[^/]*\//.test(expression));
  expect(shares).toHaveLength(2);
  for (const expression of shares)
    for (const [, selectors = ''] of expression.matchAll(/kvtier_requests_total(?:\{([^}]*)\})?/g))
      expect(selectors).toContain('route=~"/v1/.+"');
});

const flat = (name: string): string =>
  expressionOf(rules.find((rule) => nameOf(rule) === name)!)
    .replace('>-', '')
    .replaceAll(/\s+/g, ' ')
    .trim();

it('nobody is told of a worker whose events do not come where there is no other one to choose', () => {
  expect(flat('KvtierKvEventsUnheard')).toBe(
    '(kvtier_kv_index_guessed_workers > 0 and on (job, instance) sum by (job, instance) (kvtier_workers{state="ready"}) > 1) ' +
      'or kvtier_kv_index_unheard_nodes > 0',
  );
});

it('what an idle vLLM said at its last step is no news', () => {
  const isAtWork = 'increase(vllm:prompt_tokens_total[10m]) > 0';
  expect(flat('KvtierPodWithoutNode')).toContain(`(vllm:kvtier_attached == 0 and ${isAtWork})`);
  expect(flat('KvtierTierOut')).toBe(
    '(kvtier_tier_in_service == 0 unless on (job, instance) vllm:prompt_tokens_total) ' +
      `or (kvtier_tier_in_service == 0 and on (job, instance) ${isAtWork})`,
  );
});

it('a file that cannot be used is told of for as long as it cannot', () => {
  const rule = rules.find((each) => nameOf(each) === 'KvtierRenewalsRefused')!;
  expect(flat('KvtierRenewalsRefused')).toBe(
    'kvtier_api_server_refused_files > 0 or kvtier_engine_refused_files > 0 ' +
      'or kvtier_node_events{event="renewals.refused_now"} > 0',
  );
  expect(rule).toMatch(/^ *for: /m); // not of two files between which one is new already
});

it.each(rules.map((rule) => [nameOf(rule), expressionOf(rule)]))(
  '%s asks for metrics and labels that there are',
  (_, expression) => {
    // Metrics of engines in Python are theirs: packages/connector/python says their names.
    const theirs = [...expression.matchAll(/(\w+):(kvtier_\w+)/g)];
    for (const [, engine, metric] of theirs)
      expect(engineSources[engine!], metric).toMatch(
        new RegExp(`"(${engine}:)?${metric}"|"${metric!.slice('kvtier_'.length)}":`),
      );
    if (theirs.length === 0) expect(problemsOf(expression)).toEqual([]);
  },
);
