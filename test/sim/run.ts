/**
 * npm run sim -- --seed N [--steps M] [--verbose] | --seeds A..B [--steps M]: replay one world, or run many. Exit code 0 only if
 * no law was broken. A failure prints the seed, the event, and what happened before it. With --feed: the events of a cluster for
 * --minutes M, and what a router's index makes of them. With --handoff: prefill and decode apart.
 * With --churn: the memory of a full disk tier with a time to live.
 */
import { parseArgs } from 'node:util';
import { runChurn } from './churn.ts';
import { defaultHandOffSteps, simulateHandOffs } from './handoff-simulation.ts';
import { runFeed } from './run-feed.ts';
import { defaultSteps, type SimResult, simulate } from './simulation.ts';

const usage =
  'usage: npm run sim -- --seed N [--steps M] [--verbose]    replay one world\n' +
  '       npm run sim -- --seeds A..B [--steps M]           run many\n' +
  '       npm run sim -- --handoff --seeds A..B             prefill and decode apart\n' +
  '       npm run sim -- --feed --seeds A..B [--minutes M]  events of a cluster, into a router\n' +
  '       npm run sim -- --churn [--blocks N] [--days D]    memory of a full disk tier with a time to live\n';

export async function main(args: readonly string[]): Promise<number> {
  let values: {
    seed?: string;
    seeds?: string;
    steps?: string;
    verbose?: boolean;
    feed?: boolean;
    minutes?: string;
    handoff?: boolean;
    churn?: boolean;
    blocks?: string;
    days?: string;
  };
  try {
    const options = { seed: { type: 'string' }, seeds: { type: 'string' }, steps: { type: 'string' } } as const;
    ({ values } = parseArgs({
      args: [...args],
      options: {
        ...options,
        verbose: { type: 'boolean' },
        feed: { type: 'boolean' },
        minutes: { type: 'string' },
        handoff: { type: 'boolean' },
        churn: { type: 'boolean' },
        blocks: { type: 'string' },
        days: { type: 'string' },
      },
    }));
  } catch (error) {
    process.stderr.write(`sim: ${(error as Error).message}\n${usage}`);
    return 2;
  }
  if (values.churn === true) return runChurn(Number(values.blocks ?? 1_000_000), Number(values.days ?? 7));
  const range = /^(\d+)(?:\.\.(\d+))?$/.exec(values.seeds ?? values.seed ?? '');
  const isHandOff = values.handoff === true;
  const steps = Number(values.steps ?? (isHandOff ? defaultHandOffSteps : defaultSteps));
  if (range === null || !(steps >= 0)) {
    process.stderr.write(usage);
    return 2;
  }
  const first = Number(range[1]);
  const last = Number(range[2] ?? range[1]);
  if (values.feed === true) return runFeed(first, last, Number(values.minutes ?? 60));
  let failed = 0;
  let events = 0;
  const tally: Record<string, number> = {};
  const startMs = performance.now();
  for (let seed = first; seed <= last; seed++) {
    const result = await (isHandOff ? simulateHandOffs : simulate)({ seed, steps, verbose: values.verbose ?? false });
    events += result.steps;
    for (const [name, count] of Object.entries(result.tally)) tally[name] = (tally[name] ?? 0) + count;
    if (values.verbose) process.stdout.write(`${result.lines.join('\n')}\n`);
    if (result.failure !== undefined) failed++;
    if (result.failure !== undefined || first === last) report(result, values.verbose ?? false, steps, isHandOff);
  }
  const seconds = ((performance.now() - startMs) / 1000).toFixed(1);
  if (first === last || values.verbose) process.stdout.write(`${table(tally)}\n`);
  process.stdout.write(
    `${last - first + 1 - failed} of ${last - first + 1} seeds kept all laws; ${events} events, ${seconds} s\n`,
  );
  return failed === 0 ? 0 : 1;
}

function report(
  { seed, failure, steps, digest, lines }: SimResult,
  verbose: boolean,
  asked: number,
  isHandOff: boolean,
): void {
  if (failure === undefined) {
    process.stdout.write(`seed ${seed}: kept all laws; ${steps} events, digest ${digest}\n`);
    return;
  }
  const shortest = Math.min(asked, steps);
  process.stdout.write(`seed ${seed}: event ${steps}: ${failure}\n`);
  if (!verbose) process.stdout.write(`${lines.join('\n')}\n`);
  process.stdout.write(
    `again: npm run sim -- ${isHandOff ? '--handoff ' : ''}--seed ${seed} --steps ${shortest} --verbose\n`,
  );
}

function table(tally: Readonly<Record<string, number>>): string {
  const rows = Object.entries(tally).sort(([a], [b]) => (a < b ? -1 : 1));
  return rows.map(([name, count]) => `  ${name.padEnd(32)} ${count}`).join('\n');
}
