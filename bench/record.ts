/**
 * What was measured, kept: `bench/results/history.jsonl` has one run a line, `bench/results/README.md` the latest of each figure and
 * machine: a run of a part of a suite leaves the other parts' figures, and a whole one takes away those that the suite does not have any
 * more. `npm run bench -- SUITE --record` appends a run and writes the page anew from the history.
 */
import { spawnSync } from 'node:child_process';
import { appendFileSync, readFileSync, writeFileSync } from 'node:fs';
import { cpus } from 'node:os';
import { fileURLToPath } from 'node:url';
import { type Figure, isComparison } from './figures.ts';

/** One run of a suite. */
export interface Run {
  /** ISO date. */
  readonly at: string;
  /** Abbreviated; with "+" when the checkout had changes. */
  readonly commit: string;
  readonly machine: string;
  readonly suite: string;
  /** What followed the suite's name on the command line; absent when nothing did. */
  readonly args?: readonly string[];
  /** All of the suite, as it is without arguments; absent where that is not so, or was not written down. */
  readonly isWhole?: true;
  readonly figures: readonly Figure[];
}

const file = (name: string): string => fileURLToPath(new URL(`./results/${name}`, import.meta.url));

export function readHistory(): Run[] {
  return readFileSync(file('history.jsonl'), 'utf8')
    .split('\n')
    .filter((line) => line !== '')
    .map((line) => JSON.parse(line) as Run);
}

const said = (command: string, ...args: string[]): string => {
  const { status, stdout } = spawnSync(command, args, { encoding: 'utf8' });
  return status === 0 ? stdout.trim() : '';
};

/** "2 x AMD EPYC 9555 64-Core Processor, no GPU" */
function machine(): string {
  const gpu = said('nvidia-smi', '--query-gpu=name', '--format=csv,noheader').split('\n')[0];
  return `${cpus().length} x ${cpus()[0]?.model.trim() ?? process.arch}, ${gpu || 'no GPU'}`;
}

/**
 * Of the checkout around `dir`: abbreviated, with "+" when it has changes. Not of what is recorded, or each run of a sitting but the first
 * would have one.
 */
export function commitOf(dir: string): string {
  const git = (...args: readonly string[]): string => said('git', '-C', dir, ...args);
  const tracked = ['--porcelain', '--untracked-files=no', '--', ':(top)', ':(top,exclude)bench/results'];
  const changed = git('status', ...tracked) === '' ? '' : '+';
  return `${git('rev-parse', '--short', 'HEAD') || 'unknown'}${changed}`;
}

/** `measuredAll`: nothing that was asked for failed, or was left out. */
export function runOf(suite: string, args: readonly string[], figures: readonly Figure[], measuredAll: boolean): Run {
  return {
    ...{ at: new Date().toISOString().slice(0, 10), commit: commitOf(import.meta.dirname), machine: machine(), suite },
    ...(args.length > 0 && { args }),
    ...(args.length === 0 && measuredAll && { isWhole: true }),
    figures,
  };
}

/** Appends the run and writes the page anew. */
export function record(run: Run): void {
  appendFileSync(file('history.jsonl'), `${JSON.stringify(run)}\n`);
  writeFileSync(file('README.md'), page(readHistory()));
}

const digits = (value: number): string => (Math.abs(value) >= 1000 ? value.toFixed(0) : value.toPrecision(3));

/** Day, commit, and with what arguments where there were any: its row replaces one that was measured without. */
function when({ at, commit, suite, args }: Run): string {
  const asked = args && `\`${[suite, ...args].join(' ').replaceAll('|', '\\|')}\``;
  return [at, commit, ...(asked ? [asked] : [])].join(', ');
}

/** The latest of each figure, suite and machine, machines in the order in which they came. */
export function page(history: readonly Run[]): string {
  const latest = new Map<string, Map<string, Map<string, string>>>();
  for (const run of history) {
    const { machine, suite, figures, isWhole } = run;
    const suites = latest.get(machine) ?? new Map<string, Map<string, string>>();
    latest.set(machine, suites);
    const rows = suites.get(suite) ?? new Map<string, string>();
    suites.set(suite, rows);
    if (isWhole) rows.clear();
    for (const f of figures) {
      rows.delete(f.name); // the latest run's order
      if (!isComparison(f)) continue;
      const cells = [suite, f.name, digits(f.value), digits(f.limit), f.unit, f.ratio.toFixed(3), f.limitName];
      rows.set(f.name, `| ${[...cells, when(run)].join(' | ')} |`);
    }
  }
  const sections = [...latest].map(([name, suites]) => {
    const rows = [...suites].sort(([a], [b]) => (a < b ? -1 : 1)).flatMap(([, ofSuite]) => [...ofSuite.values()]);
    const head =
      '| suite | figure | value | limit | unit | ratio | limit is | when |\n|---|---|---:|---:|---|---:|---|---|';
    return `## ${name}\n\n${head}\n${rows.join('\n')}\n`;
  });
  return `# Figures

The latest of each figure on each machine, written by \`npm run bench -- SUITE --record\` from \`history.jsonl\`, which
has all of them. A run of a part of a suite brings that part's figures alone: "when" says how old each is, and behind
its commit with what arguments it was measured, where there were any. What the newest whole run of a suite does not have
any more is not shown. Every figure stands beside its limit or peer, measured in the same run. Ratio 1 is at the limit,
more is better. Shared machines change by a third within minutes: compare ratios, and pairs of runs in one sitting, not
values.

${sections.join('\n')}`;
}
