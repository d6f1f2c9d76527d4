/**
 * What a bench suite is. `npm run bench -- SUITE [--json]` runs `bench/suites/SUITE.ts`, whose default export is a Suite.
 * Every figure stands beside its physical limit or peer, measured in the same run.
 */
import { KvError } from '@kvtier/errors';

export interface Figure {
  readonly name: string;
  readonly value: number;
  /** "GB/s", "ns", "ms", "x" ... */
  readonly unit: string;
  /** The limit or peer, in the same unit. */
  readonly limit: number;
  readonly limitName: string;
  /** 1 is at the limit, more is better: value ÷ limit for rates, limit ÷ value for times. */
  readonly ratio: number;
}

export interface BenchContext {
  /** Progress and remarks for a person; goes to stderr. */
  log(line: string): void;
  /** A scratch folder on the local disk, removed afterwards. */
  readonly scratchDir: string;
  /** What follows the suite's name on the command line. */
  readonly args: readonly string[];
}

export interface Suite {
  readonly name: string;
  /** One line for --list. */
  readonly description: string;
  /** Debian packages that the suite measures against; installed before it runs. */
  readonly needs?: readonly string[];
  /** Compares with plain TCP clients: see unpaced.ts. */
  readonly unpaced?: boolean;
  run(context: BenchContext): Promise<Figure[]>;
}

export function median(values: readonly number[]): number {
  const sorted = [...values].sort((a, b) => a - b);
  const middle = sorted.length >> 1;
  return sorted.length % 2 ? sorted[middle]! : (sorted[middle - 1]! + sorted[middle]!) / 2;
}

/** @throws KvError CONFIG without a limit above 0, or where the ratio is no number */
export function rate(name: string, value: number, unit: string, limit: number, limitName: string): Figure {
  return figure({ name, value, unit, limit, limitName, ratio: value / limit });
}

/** @throws KvError CONFIG without a limit above 0, or where the ratio is no number */
export function time(name: string, value: number, unit: string, limit: number, limitName: string): Figure {
  return figure({ name, value, unit, limit, limitName, ratio: limit / value });
}

/** A limit that is none, or a ratio that is no number, says nothing. */
export const isComparison = ({ limit, ratio }: Figure): boolean => limit > 0 && Number.isFinite(ratio);

function figure(one: Figure): Figure {
  const { name, value, unit, limit, limitName } = one;
  if (isComparison(one)) return one;
  const said = `${value} ${unit} beside ${limit} ${unit} (${limitName})`;
  throw new KvError('CONFIG', `figure ${name}: ${said} is no comparison; measure for longer`);
}
