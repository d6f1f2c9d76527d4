/** Every name that a process counts by (label values of metrics) stands in docs/counts.md or docs/reasons.md, and no other. */
import { expect, it } from 'vitest';
import { codesIn, namesIn } from './docs.ts';
import { filesBelow, isTest, read } from './tree.ts';

const source = (folder: string): string =>
  filesBelow(folder, ['.ts'])
    .filter((path) => !isTest(path))
    .map(read)
    .join('\n');
const all = (text: string, pattern: RegExp): string[] => [...text.matchAll(pattern)].map((match) => match[1]!);

/** Rows of the table below a heading. */
function table(heading: string): string[] {
  const page = read('docs/counts.md');
  const from = page.indexOf(`\n## ${heading}\n`);
  expect(from, `docs/counts.md has "${heading}"`).not.toBe(-1);
  const text = page.slice(from + 4);
  return text
    .slice(0, /\n## /.exec(text)?.index)
    .split('\n')
    .filter((line) => /^\| `/.test(line))
    .flatMap((line) => codesIn(line.split('|')[1]!));
}

const sorted = (names: Iterable<string>): string[] => [...new Set(names)].toSorted();
const isReason = /reason|status|why|code|refusal/;
/** As a page has it: what a name is made of stands for itself. */
const asWritten = (name: string): string =>
  name
    .replaceAll(/\$\{[^}]*\}/g, (part) => (isReason.test(part) ? 'REASON' : 'TIER'))
    .replace('quota.bytes.TIER.TIER', 'quota.bytes.TIER.TENANT');

it('what the engine counts', () => {
  const stats = /export interface EngineStats \{([\s\S]*?)\n\}/.exec(
    read('packages/engine/scheduler/src/types.ts'),
  )![1]!;
  const gauges = /const engineGauges[^=]*= \{([\s\S]*?)\n\}/.exec(read('packages/engine/worker/src/metrics.ts'))![1]!;
  const events = all(stats, /readonly (\w+): number/g).filter((name) => !new RegExp(`\\b${name}:`).test(gauges));
  expect(events.length).toBeGreaterThan(15);
  expect(sorted(table('The engine'))).toEqual(sorted(events));
});

it('what the connector counts', () => {
  const counters = read('packages/connector/session-client/src/counters.ts');
  const events = all(/interface ConnectorCounters \{([\s\S]*?)\n\}/.exec(counters)![1]!, /^ {2}(\w+): number/gm);
  expect(events.length).toBeGreaterThan(15);
  expect(sorted(table('The connector'))).toEqual(sorted(events));
});

it('what the cache node counts', () => {
  const node = ['placement', 'session', 'node'].map((room) => source(`packages/store/${room}/src`)).join('\n');
  const given = all(node, /counters\.add\(\s*(`[^`]*`|[^,;`]*(?:`[^`]*`)?)/g);
  const names = given.flatMap((text) =>
    all(text, /`([^`]*)`/g).concat(all(text.replaceAll(/`[^`]*`/g, ''), /'([\w.]+)'/g)),
  );
  const gauges = all(`${node}${source('services/cache-node/src')}`, /'([a-z]+(?:\.\w+)+)':/g);
  const made = all(node, /`((?:quota\.bytes|writedown)\.[^`]*)`/g).filter((name) => /bytes/.test(name));
  const added = sorted(names.map(asWritten).filter((name) => name.includes('.')));
  // A reason by its name, where the page has all of them in one row.
  const isOneOf = (name: string): boolean => added.includes(name.replace(/\.\w+$/, '.REASON'));
  const events = added.filter((name) => name.endsWith('.REASON') || !isOneOf(name));
  const counted = sorted([...events, ...[...gauges, ...made].map(asWritten)]);
  expect(counted.length).toBeGreaterThan(60);
  const elsewhere = new Set(namesIn('docs/reasons.md'));
  expect(sorted(table('The cache node'))).toEqual(counted.filter((name) => !elsewhere.has(name)));
});

it('details of tiers', () => {
  const tiers = `${source('packages/store/tiers/src')}${read('packages/store/node/src/node.ts')}${read('packages/store/placement/src/stats.ts')}`;
  // What an arrow takes apart is in braces, too.
  const text = tiers.replaceAll(/\(\{[^}]*\}\) =>/g, '').replaceAll(/\/\*\*.*\*\//g, '');
  const blocks = [
    ...all(text, /(?:#detail = |\bdetail: (?:\(\) => \()?)\{([^}]*)\}/g),
    ...all(text, /#counts = \{([^}]*codec_[^}]*)\}/g),
    ...all(text, /const known[\s\S]*?: \{\n([^}]*)\}/g),
  ];
  const names = blocks.flatMap((block) => all(block, /(?:^|[,\n])\s*(\w+)(?=:|,|\s*$)/g));
  expect(names.length).toBeGreaterThan(30);
  expect(sorted(table('Details of tiers'))).toEqual(sorted(names));
});
