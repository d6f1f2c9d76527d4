/**
 * What was measured, kept: `bench/results/history.jsonl` has one run a line, `bench/results/README.md` the latest of each suite and
 * machine. `npm run bench -- SUITE --record` appends a run and writes the page anew from the history.
 */
import { spawnSync } from 'node:child_process';
import { appendFileSync, readFileSync, writeFileSync } from 'node:fs';
import { cpus } from 'node:os';
import { fileURLToPath } from 'node:url';
import type { Figure } from './figures.ts';

/** One run of a suite. */
export interface Run {
  /** ISO date. */
  readonly at: string;
  /** Abbreviated; with "+" when the checkout had changes. */
  readonly commit: string;
  readonly machine: string;
  readonly suite: string;
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

/** Appends the run and writes the page anew. */
export function record(suite: string, figures: readonly Figure[]): void {
  const changed = said('git', 'status', '--porcelain', '--untracked-files=no') === '' ? '' : '+';
  const commit = `${said('git', 'rev-parse', '--short', 'HEAD') || 'unknown'}${changed}`;
  const run: Run = { at: new Date().toISOString().slice(0, 10), commit, machine: machine(), suite, figures };
  appendFileSync(file('history.jsonl'), `${JSON.stringify(run)}\n`);
  writeFileSync(file('README.md'), page(readHistory()));
}

const digits = (value: number): string => (Math.abs(value) >= 1000 ? value.toFixed(0) : value.toPrecision(3));

/** The latest run of each suite and machine, machines in the order in which they came. */
export function page(history: readonly Run[]): string {
  const latest = new Map<string, Map<string, Run>>();
  for (const run of history) {
    const suites = latest.get(run.machine) ?? new Map<string, Run>();
    latest.set(run.machine, suites.set(run.suite, run));
  }
  const sections = [...latest].map(([name, suites]) => {
    const rows = [...suites.values()]
      .sort((a, b) => (a.suite < b.suite ? -1 : 1))
      .flatMap(({ suite, at, commit, figures }) =>
        figures.map((f) => {
          const cells = [suite, f.name, digits(f.value), digits(f.limit), f.unit, f.ratio.toFixed(3), f.limitName];
          return `| ${[...cells, `${at}, ${commit}`].join(' | ')} |`;
        }),
      );
    const head =
      '| suite | figure | value | limit | unit | ratio | limit is | when |\n|---|---|---:|---:|---|---:|---|---|';
    return `## ${name}\n\n${head}\n${rows.join('\n')}\n`;
  });
  return `# Figures

The latest run of each suite on each machine, written by \`npm run bench -- SUITE --record\` from \`history.jsonl\`, which
has all of them. Every figure stands beside its limit or peer, measured in the same run. Ratio 1 is at the limit, more
is better. Shared machines change by a third within minutes: compare ratios, and pairs of runs in one sitting, not
values.

${sections.join('\n')}`;
}
