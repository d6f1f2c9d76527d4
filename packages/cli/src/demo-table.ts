/**
 * The demo's data: a table made from the word lists that models/demo/train.py trained with, and questions about its rows with
 * their right answers. Everything follows from a seed. The text's form is the model's own (models/demo/README.md).
 */
import { readFileSync } from 'node:fs';

interface Kind {
  readonly titles: readonly string[];
  /** The lists of the two words that name a row. */
  readonly key: readonly [string, string];
  /** Three values a row: the name of a list, or the least and the largest number. */
  readonly fields: Readonly<Record<string, string | readonly [number, number]>>;
}

interface Words {
  readonly kinds: Readonly<Record<string, Kind>>;
  readonly lists: Readonly<Record<string, readonly string[]>>;
}

const { kinds, lists, ...own } = JSON.parse(
  readFileSync(new URL('../../../models/demo/words.json', import.meta.url), 'utf8'),
) as Words;
/** The words of "people" lie beside the lists of the other kinds. */
const wordLists = { ...own, ...lists } as Readonly<Record<string, readonly string[]>>;

export const demoKinds: readonly string[] = Object.keys(kinds);
/** A table of so many rows and a question are 3,999 tokens; the model was trained with slightly more. */
export const maxDemoRows = 332;

interface Row {
  /** Two words; no two rows of a table have the same. */
  readonly key: string;
  readonly values: Readonly<Record<string, string>>;
}

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
  /** What a question may ask for, such as "age". */
  readonly fields: readonly string[];
  /** The prefix that all questions share. */
  readonly text: string;

  /** `kindName`: one of `demoKinds`. */
  constructor(rowCount: number, seed: number, kindName = 'people') {
    const kind = kinds[kindName]!;
    const below = random(seed);
    const pick = (list: string): string => wordLists[list]![below(wordLists[list]!.length)]!;
    this.fields = Object.keys(kind.fields);
    const keys = new Set<string>();
    const rows: Row[] = [];
    while (rows.length < rowCount) {
      const key = `${pick(kind.key[0])} ${pick(kind.key[1])}`;
      const values: Record<string, string> = {};
      for (const [field, from] of Object.entries(kind.fields))
        values[field] = typeof from === 'string' ? pick(from) : String(from[0] + below(from[1] - from[0] + 1));
      if (keys.has(key)) continue;
      keys.add(key);
      rows.push({ key, values });
    }
    this.rows = rows;
    const lines = rows.map(({ key, values }, i) => `| ${i + 1} | ${key} | ${Object.values(values).join(' | ')} |\n`);
    this.text = `# ${kind.titles[0]}\n${lines.join('')}`;
  }

  question(rowIndex: number, field: string): Question {
    const { key, values } = this.rows[rowIndex]!;
    return { prompt: `${this.text}Question: What is the ${field} of ${key}?\nAnswer:`, answer: values[field]! };
  }
}
