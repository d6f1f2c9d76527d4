import { readFileSync } from 'node:fs';
import { describe, expect, it } from 'vitest';
import { DemoTable, demoKinds, maxDemoRows } from './demo-table.ts';

interface Kind {
  readonly titles: readonly string[];
  readonly key: readonly string[];
  readonly fields: Readonly<Record<string, string | readonly [number, number]>>;
}

interface Words {
  readonly first: readonly string[];
  readonly last: readonly string[];
  readonly job: readonly string[];
  readonly country: readonly string[];
  readonly kinds: Readonly<Record<string, Kind>>;
  readonly lists: Readonly<Record<string, readonly string[]>>;
}

const words = JSON.parse(readFileSync(new URL('../../../models/demo/words.json', import.meta.url), 'utf8')) as Words;

const { kinds, lists: more, ...own } = words;
const lists: Readonly<Record<string, readonly string[]>> = { ...own, ...more };

describe('the demo table', () => {
  // The training reads the same file, so the words agree; that the rows do is checked here.
  it.each(demoKinds)('has rows of the kind "%s" that the model was trained with', (name) => {
    const { titles, key, fields } = kinds[name]!;
    const table = new DemoTable(maxDemoRows, 3, name);
    expect(titles).toContain(/^# (\w+)\n/.exec(table.text)![1]);
    expect(table.fields).toEqual(Object.keys(fields));
    for (const row of table.rows) {
      const [first, second] = row.key.split(' ');
      expect(lists[key[0]!]).toContain(first);
      expect(lists[key[1]!]).toContain(second);
      for (const [field, from] of Object.entries(fields)) {
        const value = row.values[field]!;
        if (typeof from === 'string') expect(lists[from]).toContain(value);
        else expect(Number(value)).toSatisfy((n: number) => Number.isInteger(n) && n >= from[0]! && n <= from[1]!);
      }
    }
  });

  it('is for "people" what it has been since the first demo', () => {
    expect(new DemoTable(2, 7).text).toBe(
      '# Employees\n| 1 | Felicia Thompson | 74 | Artist | Greece |\n| 2 | Walter Marshall | 56 | Biologist | Morocco |\n',
    );
  });

  it('has only lists of different plain words, and kinds that name them', () => {
    for (const list of Object.values(lists)) {
      expect(new Set(list).size).toBe(list.length);
      for (const word of list) expect(word).toMatch(/^[A-Z][A-Za-z]+$/);
    }
    for (const kind of Object.values(kinds)) {
      expect(kind.key).toHaveLength(2);
      expect(Object.keys(kind.fields)).toHaveLength(3);
      for (const ref of [...kind.key, ...Object.values(kind.fields)])
        if (typeof ref === 'string') expect(Object.keys(lists)).toContain(ref);
    }
  });

  it('follows from its seed, with one row per name', () => {
    const table = new DemoTable(100, 7);
    expect(table.text).toBe(new DemoTable(100, 7).text);
    expect(table.text).not.toBe(new DemoTable(100, 8).text);
    expect(new Set(table.rows.map((row) => row.key)).size).toBe(100);
  });

  it('asks about a row and knows the answer', () => {
    const table = new DemoTable(3, 1);
    const row = table.rows[2]!;
    const { prompt, answer } = table.question(2, 'country');
    expect(prompt.startsWith('# Employees\n| 1 | ')).toBe(true);
    const { age, occupation, country } = row.values;
    expect(prompt).toContain(`| 3 | ${row.key} | ${age} | ${occupation} | ${country} |\n`);
    expect(prompt.endsWith(`Question: What is the country of ${row.key}?\nAnswer:`)).toBe(true);
    expect(answer).toBe(country);
  });
});
