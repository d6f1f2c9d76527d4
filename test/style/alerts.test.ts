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
