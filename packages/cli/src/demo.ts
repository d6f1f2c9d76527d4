/**
 * `kvtier demo`: the experiment that this field shows its users. One table, three questions: computed (cold), served
 * from the tier (warm), served from the tier after every process was SIGKILLed (restart). The answers are checked against the
 * table, and the greedy outputs against a run that has no tier and no cache at all.
 *
 * Fair timing: before each timed request an unrelated one of the same length pays first-touch costs (pages, thread wake-ups), and
 * the engine's own prefix cache is dropped, so that "warm" can only come from the tier.
 */
import { mkdtempSync, rmSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { KvError } from '@kvtier/errors';
import { type Completion, complete, resetPrefixCache, waitUntilServing } from './client.ts';
import { DemoTable, demoKinds, maxDemoRows, type Question } from './demo-table.ts';
import { type Launched, launch } from './launch.ts';
import { miswritten } from './miswritten.ts';
import { nearest, parseFlags } from './options.ts';
import { waitForWriteDown } from './write-down.ts';

const defaultRows = 300;
const seed = 7;
const maxTokens = 8;

const help = `kvtier demo: cold, warm and after SIGKILL

  --rows N      rows of the table, 4 to ${maxDemoRows}; a row is 12 tokens (${defaultRows})
  --table KIND  ${demoKinds.join(', ')} (people)
  --json        one object on the last line: {identical, requests, ratios}
`;

interface Shape {
  readonly rows: number;
  readonly kind: string;
}

interface Asked {
  readonly name: string;
  readonly question: Question;
  readonly completion: Completion;
  readonly reference: Completion;
}

export async function run(args: readonly string[]): Promise<number> {
  const { values } = parseFlags(
    args,
    {
      rows: { type: 'string' },
      table: { type: 'string' },
      json: { type: 'boolean' },
      help: { type: 'boolean', short: 'h' },
    },
    'kvtier demo --help',
  );
  if (values.help) {
    process.stdout.write(help);
    return 0;
  }
  const shape = shapeOf(values.rows, values.table);
  const say = (line: string): void => void process.stderr.write(`${line}\n`);
  const asked = await experiment(shape, say);
  const verdict = judge(asked);
  process.stdout.write(report(shape, asked, verdict));
  if (values.json) process.stdout.write(`${JSON.stringify(asJson(asked, verdict))}\n`);
  return verdict.identical && verdict.right ? 0 : 1;
}

function shapeOf(rows = String(defaultRows), kind = 'people'): Shape {
  if (!/^\d+$/.test(rows) || Number(rows) < 4 || Number(rows) > maxDemoRows)
    throw miswritten(`--rows: "${rows}" is not a count from 4 to ${maxDemoRows}`);
  if (!demoKinds.includes(kind)) {
    const near = nearest(kind, demoKinds);
    const hint = near ? `did you mean ${near}?` : `choose from ${demoKinds.join(', ')}`;
    throw miswritten(`--table: "${kind}" is no kind of table; ${hint}`);
  }
  return { rows: Number(rows), kind };
}

async function experiment({ rows, kind }: Shape, say: (line: string) => void): Promise<Asked[]> {
  const folder = mkdtempSync(join(tmpdir(), 'kvtier-demo-'));
  const table = new DemoTable(rows, seed, kind);
  const at = (share: number): number => Math.floor(share * rows);
  const questions: [string, Question][] = [
    ['cold', table.question(at(0.17), table.fields[1]!)],
    ['warm', table.question(at(0.61), table.fields[2]!)],
    ['restart', table.question(at(0.88), table.fields[0]!)],
  ];
  /** A table that nothing else asks about, of the same length. */
  const warmUp = async (system: Launched, number: number): Promise<void> => {
    const other = new DemoTable(rows, seed + 1000 * number, kind);
    await ask(system, other.question(0, other.fields[0]!));
  };
  const common = ['--port', '0', '--model', 'demo', '--arena-bytes', '256MiB', '--disk-bytes', '512MiB'];
  // What the tiers hold is shown, also where this machine computes as fast as it reads.
  const withTier = [...common, '--loads', 'always', '--data-dir', join(folder, 'data')];
  const running = new Set<Launched>();
  const start = async (flags: readonly string[], tier: boolean): Promise<Launched> => {
    const system = await launch(flags);
    running.add(system);
    await waitUntilServing(system.url, tier);
    return system;
  };
  const stop = async (system: Launched): Promise<void> => {
    const code = await system.stop();
    running.delete(system);
    if (code !== 0) throw new KvError('SETUP', `kvtier up: ended with exit code ${code} after Ctrl-C`);
  };
  try {
    say('starting without a tier, for the reference outputs');
    const plain = await start([...common, '--no-tier', '--data-dir', join(folder, 'reference')], false);
    const references: Completion[] = [];
    for (const [, question] of questions) references.push(await ask(plain, question));
    await stop(plain);

    say('starting with arena and disk tier');
    let system = await start(withTier, true);
    const completions: Completion[] = [];
    await warmUp(system, 1);
    completions.push(await ask(system, questions[0]![1]));
    await warmUp(system, 2);
    completions.push(await ask(system, questions[1]![1]));
    await waitForWriteDown(system.url);

    say(`SIGKILL for all ${system.pids().length} processes, then starting again`);
    await system.killAll();
    running.delete(system);
    system = await start(withTier, true);
    await warmUp(system, 3);
    completions.push(await ask(system, questions[2]![1]));
    await stop(system);
    return questions.map(([name, question], i) => ({
      name,
      question,
      completion: completions[i]!,
      reference: references[i]!,
    }));
  } finally {
    for (const system of running) await system.killAll();
    rmSync(folder, { recursive: true, force: true });
  }
}

async function ask(system: Launched, { prompt }: Question): Promise<Completion> {
  await resetPrefixCache(system.url);
  return complete(system.url, { prompt, max_tokens: maxTokens, temperature: 0 });
}

interface Verdict {
  readonly identical: boolean;
  readonly right: boolean;
  readonly ratios: { readonly warm: number; readonly restart: number };
}

function judge(asked: readonly Asked[]): Verdict {
  const ttft = (name: string): number => asked.find((one) => one.name === name)!.completion.ttftMs;
  return {
    identical: asked.every(({ completion, reference }) => isSame(completion, reference)),
    right: asked.every(({ completion, question }) => completion.text.trim() === question.answer),
    ratios: { warm: ttft('cold') / ttft('warm'), restart: ttft('cold') / ttft('restart') },
  };
}

const isSame = (a: Completion, b: Completion): boolean =>
  a.tokenIds.length > 0 && a.tokenIds.join() === b.tokenIds.join() && a.finishReason === b.finishReason;

/** "arena", or "arena+disk" where both gave some; "" when all was computed. */
const tierOf = ({ tokensByTier }: Completion): string =>
  Object.entries(tokensByTier)
    .filter(([, tokens]) => tokens > 0)
    .map(([tier]) => tier)
    .join('+');

function report({ rows, kind }: Shape, asked: readonly Asked[], { identical, right, ratios }: Verdict): string {
  const row = (cells: readonly string[]): string =>
    `  ${cells.map((cell, i) => (i < 2 ? cell.padEnd([8, 20][i]!) : cell.padStart([7, 7, 11, 9][i - 2]!))).join('  ')}`;
  const lines = asked.map(({ name, question, completion }) =>
    row([
      name,
      `${completion.text.trim()} ${completion.text.trim() === question.answer ? '(right)' : `(WRONG: ${question.answer})`}`,
      String(completion.promptTokens),
      String(completion.cachedTokens),
      tierOf(completion) || 'computed',
      `${completion.ttftMs.toFixed(1)} ms`,
    ]),
  );
  return `
A table of ${rows} rows (${kind}) in the prompt, three questions about it:

${row(['', 'answer', 'prompt', 'cached', 'from', 'TTFT'])}
${lines.join('\n')}

  warm is ${ratios.warm.toFixed(1)} times and restart ${ratios.restart.toFixed(1)} times as fast to the first token as cold
  outputs ${identical ? 'equal' : 'DIFFER FROM'} those of a run without a tier, token by token; answers ${right ? 'all right' : 'NOT ALL RIGHT'}
`;
}

function asJson(asked: readonly Asked[], { identical, ratios }: Verdict) {
  return {
    identical,
    requests: asked.map(({ name, question, completion }) => ({
      name,
      promptTokens: completion.promptTokens,
      cachedTokens: completion.cachedTokens,
      tier: tierOf(completion),
      tokensByTier: completion.tokensByTier,
      ttftMs: Number(completion.ttftMs.toFixed(2)),
      text: completion.text,
      right: completion.text.trim() === question.answer,
    })),
    ratios: { warm: Number(ratios.warm.toFixed(2)), restart: Number(ratios.restart.toFixed(2)) },
  };
}
