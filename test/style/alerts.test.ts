/** infra/prometheus/alerts.yml names metrics and labels that docs/metrics.md has, which is compared with the source (metrics.test.ts). */
import { expect, it } from 'vitest';
import { codesIn, tableRows } from './docs.ts';
import { read } from './tree.ts';

/** What Prometheus adds, and our metrics of workers where there are several. */
const always = ['instance', 'job', 'worker'];
const labelsOf = new Map(
  tableRows('docs/metrics.md')
    .filter(([name]) => name!.startsWith('`kvtier_'))
    .map(([name, labels]) => [codesIn(name!)[0]!, [...codesIn(labels!), ...always]]),
);
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

it.each(rules.map((rule) => [nameOf(rule), expressionOf(rule)]))(
  '%s asks for metrics and labels that there are',
  (_, expression) => {
    const used = [...expression.matchAll(/(kvtier_\w+)(?:\{([^}]*)\})?/g)];
    expect(used.length).toBeGreaterThan(0);
    for (const [, metric, selectors = ''] of used) {
      const known = labelsOf.get(metric!);
      expect(known, metric).toBeDefined();
      for (const [, label] of selectors.matchAll(/(\w+)\s*[=!]/g)) expect(known, metric).toContain(label);
    }
  },
);
