/** Tables of the docs, as tests compare them with the source. */
import { read } from './tree.ts';

/** Rows of all tables of a page: cells without their marks of code. */
export function tableRows(page: string): string[][] {
  return read(page)
    .split('\n')
    .filter((line) => line.startsWith('|') && !/^\|[-:| ]+\|$/.test(line))
    .map((line) =>
      line
        .slice(1, -1)
        .split(/(?<!\\)\|/)
        .map((cell) => cell.trim()),
    );
}

/** What stands in backquotes in a cell. */
export const codesIn = (cell: string): string[] => [...cell.matchAll(/`([^`]+)`/g)].map((match) => match[1]!);

/** First cells of a page's tables, without their heads, that are one name in backquotes. */
export const namesIn = (page: string): string[] =>
  tableRows(page)
    .map(([first]) => first!)
    .filter((cell) => /^`[^`]+`$/.test(cell))
    .map((cell) => cell.slice(1, -1));
