/** What the project's README quotes of its figures stands on the page of all figures, of the machine that it names. */
import { readFileSync } from 'node:fs';
import { expect, it } from 'vitest';

const read = (path: string): string => readFileSync(new URL(path, import.meta.url), 'utf8');
const cellsOf = (row: string): string[] =>
  row
    .split('|')
    .slice(1, -1)
    .map((cell) => cell.trim());
const numbersOf = (text: string): string[] =>
  (text.match(/\d[\d,]*(\.\d+)?/g) ?? []).map((each) => each.replaceAll(',', ''));

const [, quoted] = /^## Figures$([\s\S]*?)^## /m.exec(read('../README.md'))!;
const [, machine] = /^On "([^"]+)"/m.exec(quoted!)!;
const ofMachine = read('./results/README.md')
  .split(/^## /m)
  .find((section) => section.startsWith(`${machine}\n`));

interface OnPage {
  readonly value: string;
  readonly limit: string;
  readonly ratio: string;
}

function onPage(suite: string, figure: string): OnPage {
  const row = ofMachine?.split('\n').find((line) => line.startsWith(`| ${suite} | ${figure} |`));
  if (row === undefined) throw new Error(`${machine}: no figure ${figure} of ${suite} on bench/results/README.md`);
  const [, , value, limit, , ratio] = cellsOf(row) as [string, string, string, string, string, string];
  return { value, limit, ratio };
}

/** As exactly as it is quoted. */
const rounded = (ratio: string, asQuoted: string): string => Number(ratio).toFixed(asQuoted.split('.')[1]?.length ?? 0);

const rows = quoted!.split('\n').filter((line) => line.includes('`') && line.startsWith('| '));

it('quotes figures', () => {
  expect(rows.length).toBeGreaterThan(5);
});

it.each(rows.map((row) => [cellsOf(row)[0]!, cellsOf(row)]))('%s', (_, [, measured, beside, ratios, names]) => {
  const [suite] = names!.split(':');
  const figures = [...names!.matchAll(/`([^`]+)`/g)].map(([, figure]) => onPage(suite!, figure!));
  expect(numbersOf(measured!)).toEqual(figures.map(({ value }) => value));
  const limits = numbersOf(beside!.slice(beside!.lastIndexOf(':')));
  expect(new Set(limits)).toEqual(new Set(figures.map(({ limit }) => limit)));
  const quotedRatios = numbersOf(ratios!);
  expect(quotedRatios).toEqual(figures.map(({ ratio }, i) => rounded(ratio, quotedRatios[i] ?? '')));
});
