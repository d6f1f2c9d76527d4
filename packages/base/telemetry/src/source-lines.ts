/**
 * Stack traces of a bundle name lines of our sources. Node's own maps would be read and parsed whole at every start, a fifth of its work;
 * this table (scripts/lib/source-maps.mjs) is read when a first stack is told, and used as it lies in its file: no failing request waits for it.
 */
import { readFileSync } from 'node:fs';
import { dirname, join } from 'node:path';

export interface Place {
  readonly source: string;
  /** From 0, as in maps. */
  readonly line: number;
  readonly column: number;
}

/** Of a row: line and column in the bundle, number of the source (-1: not ours), line and column there. */
const wide = 5;

export class SourceLines {
  readonly #sources: readonly string[];
  readonly #rows: Int32Array;

  /** @param table what linesOfOurs made of a bundle's map, as a file is read: at a multiple of 4 in its memory */
  constructor(table: Buffer) {
    const end = table.length - 4;
    const length = table.readUInt32LE(end);
    this.#sources = JSON.parse(table.toString('utf8', length, end)) as string[];
    this.#rows = new Int32Array(table.buffer, table.byteOffset, length / 4);
  }

  /** A row holds until the next one. undefined: it is not of our sources. */
  find(line: number, column: number): Place | undefined {
    const rows = this.#rows;
    let [before, after] = [-1, rows.length / wide];
    while (after - before > 1) {
      const middle = (before + after) >> 1;
      const at = middle * wide;
      if (rows[at]! < line || (rows[at]! === line && rows[at + 1]! <= column)) before = middle;
      else after = middle;
    }
    const [source, ...place] = rows.subarray(before * wide + 2, before * wide + wide);
    if (before < 0 || source! < 0) return undefined;
    return { source: this.#sources[source!]!, line: place[0]!, column: place[1]! };
  }
}

/** From now on, in this thread. `linesFile`: of the bundle `file`, names sources from its own folder on. */
export function tellLinesOf(file: string, linesFile: string): void {
  let lines: SourceLines | undefined;
  const told = (frame: NodeJS.CallSite): string => {
    const text = String(frame);
    const [line, column] = [frame.getLineNumber(), frame.getColumnNumber()];
    if (frame.getFileName() !== file || line === null || column === null) return text;
    lines ??= new SourceLines(readFileSync(linesFile));
    const place = lines.find(line - 1, column - 1);
    if (place === undefined) return text;
    const source = join(dirname(linesFile), place.source);
    return text.replace(`${file}:${line}:${column}`, () => `${source}:${place.line + 1}:${place.column + 1}`);
  };
  Error.prepareStackTrace = (error, frames) => {
    try {
      return [Error.prototype.toString.call(error), ...frames.map((frame) => `    at ${told(frame)}`)].join('\n');
    } catch (problem) {
      return `${error?.name}: ${error?.message} (no stack: ${(problem as Error)?.message})`; // whoever asks for a stack gets one
    }
  };
}
