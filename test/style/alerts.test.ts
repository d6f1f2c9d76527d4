/** infra/prometheus/alerts.yml names metrics and labels that docs/metrics.md has, which is compared with the source (metrics.test.ts), or the connectors. */
import { spawnSync } from 'node:child_process';
import { fileURLToPath } from 'node:url';
import { expect, it } from 'vitest';
import { problemsOf } from './queries.ts';
import { read } from './tree.ts';

const folder = fileURLToPath(new URL('../../infra/prometheus/', import.meta.url));
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

it('shares of requests are of those that clients made, at the API server and behind gateways', () => {
  const shares = rules.map(expressionOf).filter((expression) => /requests_total[^/]*\//.test(expression));
  const ofGateways = shares.filter((expression) => expression.includes('kvtier_picker_requests_total'));
  expect([shares.length, ofGateways.length]).toEqual([4, 2]);
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

it('a part of a tier that is out or takes no writes is told of, each by its name', () => {
  const details = ['KvtierTierPartlyOut', 'KvtierTierTakesNoWrites'].map(
    (name) => /kvtier_tier_detail\{name=~"([^"]+)"\} > 0/.exec(flat(name))![1],
  );
  expect(details).toEqual(['devices_out_of_service|partitions_out', 'writes_refused|devices_without_space']);
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
  (_, expression) => expect(problemsOf(expression)).toEqual([]),
);

/** Prometheus' own tool, where it is installed (Debian's package prometheus), or what KVTIER_PROMTOOL names. */
const promtool = process.env.KVTIER_PROMTOOL ?? 'promtool';
const hasPromtool = spawnSync(promtool, ['--version']).status === 0;
if (!hasPromtool) console.warn('SKIPPED: when alerts fire: promtool is not installed (KVTIER_PROMTOOL)');

it.skipIf(!hasPromtool)('each fires when it should, and not before: infra/prometheus/alerts.test.yml', () => {
  const args = ['test', 'rules', 'alerts.test.yml'];
  const { status, stdout, stderr } = spawnSync(promtool, args, { cwd: folder, encoding: 'utf8', timeout: 60_000 });
  expect({ status, said: status === 0 ? '' : `${stdout}${stderr}` }).toEqual({ status: 0, said: '' });
});

it('alerts.test.yml speaks of every alert that reads more than one metric', () => {
  const tested = new Set(
    [...read('infra/prometheus/alerts.test.yml').matchAll(/alertname="(\w+)"/g)].map(([, name]) => name!),
  );
  const names = rules.filter((rule) => /\b(unless|and|or)\b|\//.test(expressionOf(rule))).map(nameOf);
  expect(names.length).toBeGreaterThan(8);
  expect(names.filter((name) => !tested.has(name))).toEqual([]);
});
