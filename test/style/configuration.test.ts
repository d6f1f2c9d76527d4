/**
 * Every key of the services' configuration stands in its page, and no other. A page's tables of keys (their head is "key") name keys, with
 * ".below" for what is below the one that the row or a bold one before names; what is below a key may stand in its row, or in that of
 * another key of the same name. A row `KEY.*` says in which section of which page the keys below it stand.
 */
import { cacheNodeSchema, coordinatorSchema, engineWorkerSchema, keyPaths, parseConfig } from '@kvtier/config';
import { type KeyFacts, keyFacts } from '@kvtier/config/testing';
import { describe, expect, it } from 'vitest';
import { codesIn } from './docs.ts';
import { read } from './tree.ts';

const schemas = { 'engine-worker': engineWorkerSchema, coordinator: coordinatorSchema, 'cache-node': cacheNodeSchema };
type Service = keyof typeof schemas;
const services = Object.keys(schemas) as Service[];

interface Row {
  readonly keys: readonly string[];
  readonly cells: readonly string[];
}

/** Rows of the tables whose head begins with "key" or "option". */
function keyRows(text: string): Row[] {
  const rows: Row[] = [];
  let isKeys = false;
  let group = '';
  let before = '';
  for (const line of text.split('\n')) {
    if (line.startsWith('|') && !before.startsWith('|')) {
      isKeys = /^\| (key|option)\b/.test(line);
      group = '';
    } else if (line.startsWith('|') && isKeys && !/^\|[-:| ]+\|$/.test(line)) {
      const cells = line
        .slice(1, -1)
        .split(/(?<!\\)\|/)
        .map((cell) => cell.trim());
      const bold = /^\*\*`([^`]+)`\*\*/.exec(cells[0]!)?.[1];
      if (bold !== undefined) group = bold;
      let above = group;
      const keys = codesIn(cells[0]!).map((code) => {
        if (code.startsWith('.')) return `${above}${code}`;
        above = code.includes('.') ? code.slice(0, code.lastIndexOf('.')) : code;
        return code;
      });
      rows.push({ keys, cells });
    }
    before = line;
  }
  return rows;
}

const slug = (heading: string): string =>
  heading
    .toLowerCase()
    .replaceAll(/[^\w\s-]/g, '')
    .trim()
    .replaceAll(/\s+/g, '-');

/** From its heading to the next one that is no lower. */
function section(page: string, anchor: string): string {
  const lines = read(page).split('\n');
  const from = lines.findIndex((line) => /^#+ /.test(line) && slug(line.replace(/^#+ /, '')) === anchor);
  expect(from, `${page} has a section #${anchor}`).not.toBe(-1);
  const depth = /^#+/.exec(lines[from]!)![0].length;
  const to = lines.findIndex((line, at) => at > from && new RegExp(`^#{1,${depth}} `).test(line));
  return lines.slice(from, to === -1 ? undefined : to).join('\n');
}

/** In backquotes or in quotes, by itself or below something. */
const names = (text: string, key: string): boolean => new RegExp(`["\`.]${key}["\`]`).test(text);

/** Tiers by one word, as the page has them. */
const asWritten = (path: string): string => path.replace(/^placement\.(disk|redis|s3)\./, 'placement.TIER.');

function pageOf(service: Service) {
  const page = `docs/${service}.md`;
  let text = read(page);
  const links = [...text.matchAll(/^\| (`[^|]+`) \| \[[^\]]*\]\(([\w-]*\.md)?#([\w-]+)\) \|$/gm)];
  const elsewhere = links.flatMap(([, codes, file, anchor]) => {
    const its = section(file === undefined ? page : `docs/${file}`, anchor!);
    if (file === undefined) text = text.replace(its, '');
    return codesIn(codes!).map((code) => ({ code, text: its }));
  });
  return { page, rows: keyRows(text), elsewhere };
}

const paths = Object.fromEntries(services.map((each) => [each, keyPaths(schemas[each])])) as Record<Service, string[]>;
const leaves = new Set(services.flatMap((each) => paths[each].map((path) => path.split('.').at(-1)!)));

describe.each(services)('docs/%s.md', (service) => {
  const { page, rows, elsewhere } = pageOf(service);
  const own = rows.flatMap(({ keys }) => keys).filter((key) => !key.endsWith('.*'));

  it('has every key', () => {
    const missing = paths[service].filter((path) => {
      const leaf = path.split('.').at(-1)!;
      if (own.includes(asWritten(path))) return false;
      if (own.some((key) => key.startsWith(`${path}.`))) return false;
      const parent = path.split('.').at(-2);
      const isAbove = (key: string): boolean =>
        asWritten(path).startsWith(`${key}.`) || key.split('.').at(-1) === parent;
      const above = rows.filter(({ keys }) => keys.some(isAbove));
      if (above.some(({ cells }) => names(cells.slice(1).join(' '), leaf))) return false;
      return !elsewhere.some(
        ({ code, text }) =>
          (code === path || (code.endsWith('.*') && path.startsWith(code.slice(0, -1)))) && names(text, leaf),
      );
    });
    expect(missing, `name them in ${page}`).toEqual([]);
  });

  it('has no other', () => {
    const known = new Set(paths[service].map(asWritten));
    expect(
      own.filter((key) => !known.has(key)),
      `${page}: keys that the schema has not`,
    ).toEqual([]);
    const told = elsewhere.flatMap(({ text }) => keyRows(text).flatMap(({ keys }) => keys));
    expect(told.map((key) => key.split('.').at(-1)!).filter((key) => !leaves.has(key))).toEqual([]);
  });

  it('has examples that are taken', () => {
    const examples = [...read(page).matchAll(/```json\n([\s\S]*?)```/g)].map(
      (match) => JSON.parse(match[1]!) as unknown,
    );
    expect(examples.length).toBeGreaterThan(0);
    for (const example of examples) expect(() => parseConfig<unknown>(schemas[service], example, page)).not.toThrow();
  });
});

/** undefined: nothing that a machine can compare, such as "all cores". */
function defaultAsTold(cell: string): unknown {
  const text = cell.replaceAll('`', '');
  if (text === 'required') return text;
  if (text === 'none') return null;
  if (text === 'empty') return '';
  if (/^(true|false|\d+(\.\d+)?|\{\})$/.test(text)) return JSON.parse(text);
  return /^`[^` ]+`$/.test(cell) ? text : undefined;
}

const boundsAsTold = ({ from, above, to }: KeyFacts['bounds']): string => {
  if (above !== undefined) return to === undefined ? `above ${above}` : `above ${above}, to ${to}`;
  if (from !== undefined) return to === undefined ? `${from} or more` : `${from} to ${to}`;
  return '';
};

it.each(['engine-worker', 'coordinator'] as const)(
  'defaults and bounds of docs/%s.md are those of the schema',
  (service) => {
    const facts = keyFacts(schemas[service]);
    const compared = pageOf(service)
      .rows.filter(({ cells }) => cells.length === 4)
      .flatMap(({ keys, cells }) => keys.map((key) => ({ key, cells, is: facts.get(key)! })));
    expect(compared.length).toBeGreaterThan(30);
    const wrong = compared.flatMap(({ key, cells: [, told, bounds], is }) => {
      const saidDefault = defaultAsTold(told!);
      const value = is.default === undefined ? (is.isOptional ? null : 'required') : is.default;
      // One that depends on the machine is in no schema.
      const isSame = saidDefault === undefined ? value === null : JSON.stringify(saidDefault) === JSON.stringify(value);
      const sameBounds = boundsAsTold(is.bounds) === '' || boundsAsTold(is.bounds) === bounds;
      return isSame && sameBounds ? [] : [`${key}: ${told}, ${bounds}; is ${JSON.stringify(is)}`];
    });
    expect(wrong).toEqual([]);
  },
);
