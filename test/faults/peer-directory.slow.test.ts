/**
 * Directories of any size are told: in bounded time, with no long turn of the event loop and in bounded memory at either end, while
 * they change; and they go as quietly. KVTIER_DIRECTORY_BLOCKS=10000000 runs it at the size of a large storage node.
 */
import { type ChildProcess, spawn } from 'node:child_process';
import { once } from 'node:events';
import { mkdtempSync, rmSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { createInterface, type Interface } from 'node:readline';
import { afterEach, expect, it } from 'vitest';
import { bundled } from '../../scripts/lib/test-programs.mjs';

const blocks = Number(process.env.KVTIER_DIRECTORY_BLOCKS ?? 200_000);
const [program] = await bundled(new URL('./peer-directory.ts', import.meta.url));
const longestTurnMs = 50;

interface Held {
  readonly count: number;
  readonly sum: number;
  readonly cpuMs: number;
  readonly rssMiB: number;
}

const nodes: Node[] = [];
class Node {
  readonly child: ChildProcess;
  readonly folder = mkdtempSync(join(tmpdir(), 'kvtier-directory-'));
  readonly #lines: Interface;
  readonly #answers: ((line: string) => void)[] = [];
  readonly #unasked: string[] = [];

  constructor(role: string, argument: string | number) {
    const args = ['--max-semi-space-size=16', program, this.folder, role, String(argument)];
    this.child = spawn(process.execPath, args, { stdio: ['pipe', 'pipe', 'inherit'] });
    this.#lines = createInterface({ input: this.child.stdout! });
    this.#lines.on('line', (line) => {
      const answer = this.#answers.shift();
      if (answer === undefined) this.#unasked.push(line);
      else answer(line);
    });
    nodes.push(this);
  }

  line(): Promise<string> {
    const line = this.#unasked.shift();
    if (line !== undefined) return Promise.resolve(line);
    return new Promise((resolve) => this.#answers.push(resolve));
  }

  async ask<Answer>(what: string): Promise<Answer> {
    this.child.stdin!.write(`${what}\n`);
    return JSON.parse(await this.line()) as Answer;
  }
}

afterEach(async () => {
  for (const { child, folder } of nodes.splice(0)) {
    child.kill('SIGKILL');
    if (child.exitCode === null && child.signalCode === null) await once(child, 'exit');
    rmSync(folder, { recursive: true });
  }
});

/** Until both say the same of what is held. Returns the last words of the fetching node. */
async function agree(giver: Node, fetcher: Node): Promise<Held> {
  for (;;) {
    const theirs = await giver.ask<Held>('held');
    const ours = await fetcher.ask<Held & { readonly isIndexed: boolean }>('held');
    report.push({ giver: theirs, fetcher: ours });
    if (ours.count === theirs.count && ours.sum === theirs.sum && ours.isIndexed) return ours;
    await new Promise((resolve) => setTimeout(resolve, 50));
  }
}

const report: object[] = [];

it(`${blocks} blocks are told while they change, told anew, and gone, with no turn above ${longestTurnMs} ms`, async () => {
  const giver = new Node('give', blocks);
  const port = await giver.line();
  await giver.ask('churn 5');
  const fetcher = new Node('fetch', port);
  await fetcher.line();
  const { ms } = await fetcher.ask<{ ms: number }>('listed 1');
  await giver.ask('churn 0');
  const told = { giver: await giver.ask<Held>('held'), fetcher: await fetcher.ask<Held>('held') };
  report.push({ ms, ...told });
  await agree(giver, fetcher);
  expect(ms).toBeLessThan(30_000);
  expect(told.giver.cpuMs).toBeLessThan(longestTurnMs);
  expect(told.fetcher.cpuMs).toBeLessThan(longestTurnMs);

  // A second node, whose blocks go with it, while those of the first one stay.
  const other = new Node('give', Math.ceil(blocks / 4) * 5);
  const otherPort = await other.line();
  const both = new Node('fetch', `${port},${otherPort}`);
  await both.line();
  await both.ask('listed 2');
  await agree(other, both);
  other.child.kill('SIGKILL');
  const left = await agree(giver, both);
  for (const { giver: theirs, fetcher: ours } of report as { giver?: Held; fetcher?: Held }[]) {
    expect(theirs!.cpuMs).toBeLessThan(longestTurnMs);
    expect(ours!.cpuMs).toBeLessThan(longestTurnMs);
  }
  expect(left.count).toBe(told.giver.count);
  if (process.env.KVTIER_DIRECTORY_BLOCKS !== undefined) process.stdout.write(`${JSON.stringify(report, null, 1)}\n`);
});
