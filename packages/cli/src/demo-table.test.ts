import { readFileSync } from 'node:fs';
import { describe, expect, it } from 'vitest';
import { DemoTable } from './demo-table.ts';

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

describe('the demo table', () => {
  // The training reads the same file, so the words agree; that the rows do is checked here.
  it('has rows of the kind "people" that the model was trained with', () => {
    const people = words.kinds.people!;
    expect(people.titles).toContain('Employees');
    expect(people.key).toEqual(['first', 'last']);
    expect(people.fields).toEqual({ age: [18, 79], occupation: 'job', country: 'country' });
    for (const row of new DemoTable(100, 3).rows) {
      expect(words.first).toContain(row.first);
      expect(words.last).toContain(row.last);
      expect(Number(row.age)).toBeGreaterThanOrEqual(18);
      expect(Number(row.age)).toBeLessThanOrEqual(79);
      expect(words.job).toContain(row.occupation);
      expect(words.country).toContain(row.country);
    }
  });

  it('has only lists of different plain words, and kinds that name them', () => {
    const { kinds, lists: more, ...own } = words;
    const lists = { ...own, ...more };
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
    expect(new Set(table.rows.map((row) => `${row.first} ${row.last}`)).size).toBe(100);
  });

  it('asks about a row and knows the answer', () => {
    const table = new DemoTable(3, 1);
    const row = table.rows[2]!;
    const { prompt, answer } = table.question(2, 'country');
    expect(prompt.startsWith('# Employees\n| 1 | ')).toBe(true);
    expect(prompt).toContain(`| 3 | ${row.first} ${row.last} | ${row.age} | ${row.occupation} | ${row.country} |\n`);
    expect(prompt.endsWith(`Question: What is the country of ${row.first} ${row.last}?\nAnswer:`)).toBe(true);
    expect(answer).toBe(row.country);
  });
});
