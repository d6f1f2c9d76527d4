/**
 * The demo's data: a table made from the word lists that models/demo/train.py trained with, and questions about its rows with
 * their right answers. Everything follows from a seed. The text's form is the model's own (models/demo/README.md).
 */
import { readFileSync } from 'node:fs';

interface Words {
  readonly first: readonly string[];
  readonly last: readonly string[];
  readonly job: readonly string[];
  readonly country: readonly string[];
}

const words = JSON.parse(readFileSync(new URL('../../../models/demo/words.json', import.meta.url), 'utf8')) as Words;

const fields = ['age', 'occupation', 'country'] as const;
type Field = (typeof fields)[number];

type Row = Readonly<Record<Field | 'first' | 'last', string>>;

export interface Question {
  readonly prompt: string;
  readonly answer: string;
}

/** SplitMix32: small, and the same everywhere. */
function random(seed: number): (limit: number) => number {
  let state = seed >>> 0;
  return (limit) => {
    state = (state + 0x9e3779b9) >>> 0;
    let z = state;
    z = Math.imul(z ^ (z >>> 16), 0x21f0aaad);
    z = Math.imul(z ^ (z >>> 15), 0x735a2d97);
    return ((z ^ (z >>> 15)) >>> 0) % limit;
  };
}

export class DemoTable {
  readonly rows: readonly Row[];
  /** The prefix that all questions share. */
  readonly text: string;

  constructor(rowCount: number, seed: number) {
    const below = random(seed);
    const pick = (list: readonly string[]): string => list[below(list.length)]!;
    const names = new Set<string>();
    const rows: Row[] = [];
    while (rows.length < rowCount) {
      const row = {
        first: pick(words.first),
        last: pick(words.last),
        age: String(18 + below(62)),
        occupation: pick(words.job),
        country: pick(words.country),
      };
      if (names.has(`${row.first} ${row.last}`)) continue;
      names.add(`${row.first} ${row.last}`);
      rows.push(row);
    }
    this.rows = rows;
    const lines = rows.map(
      (r, i) => `| ${i + 1} | ${r.first} ${r.last} | ${r.age} | ${r.occupation} | ${r.country} |\n`,
    );
    this.text = `# Employees\n${lines.join('')}`;
  }

  question(rowIndex: number, field: Field): Question {
    const row = this.rows[rowIndex]!;
    return {
      prompt: `${this.text}Question: What is the ${field} of ${row.first} ${row.last}?\nAnswer:`,
      answer: row[field],
    };
  }
}
