import { readFileSync } from 'node:fs';
import { describe, expect, it } from 'vitest';
import { DemoTable } from './demo-table.ts';

const model = (name: string): string => readFileSync(new URL(`../../../models/demo/${name}`, import.meta.url), 'utf8');

describe('the demo table', () => {
  it('has the words that the model was trained with', () => {
    const script = model('train.py');
    const words = JSON.parse(model('words.json')) as Record<string, string[]>;
    expect(Object.keys(words)).toEqual(['first', 'last', 'job', 'country']);
    for (const [name, list] of Object.entries(words)) {
      const source = new RegExp(`^${name.toUpperCase()} = """([^"]*)"""`, 'm').exec(script);
      expect(list).toEqual(source?.[1]?.split(/\s+/));
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
