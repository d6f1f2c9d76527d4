/**
 * `npm run bench -- SUITE [--json] [--record]` and `--list`. A table for a person; with --json that goes to stderr and stdout ends
 * with one JSON object {suite, figures} on its last line; `failed` is in it, and the exit code 1, when the suite measured a part
 * alone. What a suite logs goes to stderr. --record: see record.ts.
 */
import { existsSync, readdirSync, rmSync } from 'node:fs';
import { join } from 'node:path';
import { fileURLToPath } from 'node:url';
import { KvError } from '@kvtier/errors';
import { PartlyMeasured } from './failed.ts';
import type { BenchContext, Figure, Suite } from './figures.ts';
import { record, runOf } from './record.ts';
import { makeScratch } from './scratch.ts';
import { againUnpaced } from './unpaced.ts';

/** From scripts/lib/system.mjs, which runs before TypeScript can. */
export interface BenchHost {
  ensureSystemPackages(names: readonly string[]): Promise<void>;
}

const suitesDir = fileURLToPath(new URL('./suites', import.meta.url));
/** On the local disk, unlike /tmp on many machines. */
const scratchRoot = fileURLToPath(new URL('../build/scratch', import.meta.url));

const names = (): string[] =>
  readdirSync(suitesDir)
    .filter((file) => file.endsWith('.ts') && !file.endsWith('.test.ts'))
    .map((file) => file.slice(0, -'.ts'.length))
    .sort();

async function load(name: string): Promise<Suite> {
  return ((await import(join(suitesDir, `${name}.ts`))) as { default: Suite }).default;
}

export async function main(args: readonly string[], host: BenchHost): Promise<number> {
  try {
    if (args.includes('--list')) return await list();
    const [name, ...rest] = args.filter((arg) => arg !== '--json' && arg !== '--record');
    if (name === undefined || !existsSync(join(suitesDir, `${name}.ts`)) || !names().includes(name)) {
      const what = name === undefined ? 'name a suite' : `${name}: no such suite`;
      throw new KvError('CONFIG', `bench: ${what}; there are: ${names().join(', ')}`);
    }
    const output = { json: args.includes('--json'), record: args.includes('--record') };
    return await runSuite(await load(name), rest, output, host);
  } catch (error) {
    if (!(error instanceof KvError)) throw error;
    process.stderr.write(`kvtier: ${error.message}\n`);
    return 1;
  }
}

async function list(): Promise<number> {
  for (const name of names()) process.stdout.write(`${name.padEnd(10)} ${(await load(name)).description}\n`);
  return 0;
}

interface Output {
  readonly json: boolean;
  readonly record: boolean;
}

/** A suite that measured nothing is an error, whatever it thinks of that. */
export async function runSuite(
  suite: Suite,
  args: readonly string[],
  output: Output,
  host: BenchHost,
): Promise<number> {
  if (suite.needs) await host.ensureSystemPackages(suite.needs);
  const log = (line: string): void => void process.stderr.write(`${line}\n`);
  const done = suite.unpaced ? await againUnpaced(log) : undefined;
  if (done !== undefined) return done;
  const scratchDir = makeScratch(scratchRoot, suite.name);
  const cleanUp = (): void => rmSync(scratchDir, { recursive: true, force: true });
  process.once('exit', cleanUp);
  // Whoever made something cleans it up at the process's exit, however it comes.
  const stop = (signal: NodeJS.Signals): void => process.exit(signal === 'SIGINT' ? 130 : 143);
  process.on('SIGINT', stop).on('SIGTERM', stop); // `timeout` gives it twice
  try {
    const { figures, failed } = await measure(suite, { args, scratchDir, log });
    if (figures.length === 0)
      throw new KvError('CONFIG', `bench ${suite.name}: nothing was measured; say what to measure`);
    if (output.record) record(runOf(suite.name, args, figures, failed === undefined));
    (output.json ? process.stderr : process.stdout).write(table(figures));
    if (output.json) process.stdout.write(`${JSON.stringify({ suite: suite.name, figures, failed })}\n`);
    for (const line of failed ?? []) log(line);
    return failed === undefined ? 0 : 1;
  } finally {
    cleanUp();
    process.off('exit', cleanUp).off('SIGINT', stop).off('SIGTERM', stop);
  }
}

async function measure(
  suite: Suite,
  context: BenchContext,
): Promise<{ figures: readonly Figure[]; failed?: readonly string[] }> {
  try {
    return { figures: await suite.run(context) };
  } catch (error) {
    if (error instanceof PartlyMeasured) return error;
    throw error;
  }
}

const digits = (value: number): string => (Math.abs(value) >= 1000 ? value.toFixed(0) : value.toPrecision(3));

/** One row a figure: name, value, unit, limit, ratio, what the limit is. */
export function table(figures: readonly Figure[]): string {
  const rows = [
    ['figure', 'value', 'limit', 'unit', 'ratio', 'limit is'],
    ...figures.map((f) => [f.name, digits(f.value), digits(f.limit), f.unit, f.ratio.toFixed(3), f.limitName]),
  ];
  const widths = rows[0]!.map((_, column) => Math.max(...rows.map((row) => row[column]!.length)));
  const isNumber = (column: number): boolean => column === 1 || column === 2 || column === 4;
  const line = (row: readonly string[]): string =>
    row
      .map((cell, i) => (isNumber(i) ? cell.padStart(widths[i]!) : cell.padEnd(widths[i]!)))
      .join('  ')
      .trimEnd();
  return `\n${rows.map(line).join('\n')}\n`;
}
