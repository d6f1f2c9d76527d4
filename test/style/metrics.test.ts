/** docs/metrics.md and the source name the same metrics. */
import { expect, it } from 'vitest';
import { codesIn, namesIn, tableRows } from './docs.ts';
import { filesBelow, isTest, read } from './tree.ts';

const api = ['api-server', 'coordinator', 'handoff', 'planner', 'pod-handoff']
  .map((room) => read(`packages/coordinator/${room}/src/metrics.ts`))
  .join('');
const copies = read('packages/coordinator/handoff/src/copy-metrics.ts');
const fleet = read('packages/coordinator/registry/src/fleet-metrics.ts');
const worker = read('packages/engine/worker/src/metrics.ts');
const feed = read('packages/coordinator/kv-index/src/feed/metrics.ts');
const picker = read('packages/coordinator/endpoint-picker/src/metrics.ts');
const telemetry = read('packages/base/telemetry/src/metrics.ts');
const node = read('packages/base/telemetry/src/node-metrics.ts');
const snake = (name: string): string => name.replace(/[A-Z]/g, (letter) => `_${letter.toLowerCase()}`);
const all = (text: string, pattern: RegExp): string[] => [...text.matchAll(pattern)].map((match) => match[1]!);
const listIn = (text: string, start: RegExp): string =>
  /[{[][\s\S]*?[}\]]/.exec(text.slice(start.exec(text)!.index + start.exec(text)![0].length))![0];

const inSource = new Set([
  ...all(`${api}${worker}${copies}${feed}${picker}${fleet}`, /name: '(kvtier_\w+)'/g),
  ...all(`${api}${worker}`, /processMetrics\('(\w+)'/g).flatMap((prefix) =>
    all(telemetry, /name: `kvtier_\$\{prefix\}_(\w+)`/g).map((name) => `kvtier_${prefix}_${name}`),
  ),
  ...all(worker, /#phase\('(\w+)'/g).map((name) => `kvtier_engine_${name}_seconds`),
  ...all(`${worker}${node}`, /(?:#gauge|#labelled|\bgauge)\(\s*'(\w+)'/g).map((name) => `kvtier_${name}`),
  ...all(listIn(worker, /const engineGauges[^=]*= /), /(\w+):/g).map((name) => `kvtier_engine_${snake(name)}`),
  ...all(listIn(node, /const tierGauges = /), /'(\w+)'/g).map((name) => `kvtier_tier_${snake(name)}`),
]);

it('every metric stands in docs/metrics.md, and no other', () => {
  const documented = namesIn('docs/metrics.md');
  expect(documented.filter((name, at) => documented.indexOf(name) !== at)).toEqual([]);
  expect(documented.toSorted(), 'make docs/metrics.md and the files of metrics equal').toEqual(
    [...inSource].toSorted(),
  );
});

it('CONTRIBUTING.md names every file that has some', () => {
  const page = read('CONTRIBUTING.md');
  const files = filesBelow('packages', ['metrics.ts']).filter((path) => !isTest(path) && /\bkvtier_/.test(read(path)));
  expect(files.length).toBeGreaterThan(10);
  expect(files.filter((path) => !page.includes(`\`${path.replace('packages/', '')}\``))).toEqual([]);
});

it('and with the same labels', () => {
  const documented = new Map(
    tableRows('docs/metrics.md').map(([name, labels]) => [codesIn(name!)[0], codesIn(labels!)]),
  );
  const made = `${api}${worker}${copies}${picker}${fleet}${feed}`
    .split(/new (?:Counter|Gauge|Histogram)[^(]*\(\{/)
    .slice(1);
  let labelled = 0;
  for (const one of made) {
    const [, name] = /^\s*name: '(kvtier_\w+)'/.exec(one) ?? [];
    const [, list] = /^[\s\S]*?(?:labelNames: (\[[^\]]*\])|registers:)/.exec(one) ?? [];
    if (name === undefined || list === undefined) continue;
    labelled++;
    expect(documented.get(name)?.toSorted(), name).toEqual(all(list, /'(\w+)'/g).toSorted());
  }
  expect(labelled).toBeGreaterThan(20);
});
