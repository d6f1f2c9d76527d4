/**
 * What one client sends costs no other client anything: large nonsense of every kind, from many at once, while others stream.
 * By hand: KVTIER_FLOOD_CLIENTS=64 KVTIER_FLOOD_BYTES=16777216 KVTIER_FLOOD_REPORT=1.
 */
import { type ChildProcess, spawn } from 'node:child_process';
import { once } from 'node:events';
import { mkdtempSync, readFileSync, rmSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { createInterface } from 'node:readline';
import type { WorstTurns } from '@kvtier/api-server/testing';
import { program } from '@kvtier/cli';
import { event, ScriptedEngine } from '@kvtier/registry/testing';
import { afterEach, beforeEach, expect, it } from 'vitest';
import { bundled } from '../../scripts/lib/test-programs.mjs';
import { type ThreadWaits, threadWaits, waitedBetween } from '../e2e/cpu-waits.ts';

const [flood, turns] = await bundled(
  new URL('../../packages/coordinator/api-server/src/testing/flood.ts', import.meta.url),
  new URL('../../packages/coordinator/api-server/src/testing/turns.ts', import.meta.url),
);
const modelDir = join(import.meta.dirname, '../../models/demo/model');
const bytes = Number(process.env.KVTIER_FLOOD_BYTES ?? 4 << 20);
const clients = Number(process.env.KVTIER_FLOOD_CLIENTS ?? 12);
const streams = 4;
const tokenMs = 5;
/** Longest time a stream of another client may stand still, less what is the machine's doing. */
const longestGapMs = 100;
/** Of the API server's event loop: CPU time, which does not depend on what else the machine does. */
const longestTurnMs = 50;
/** Bodies (large and small ones) and two threads' heaps at most; what a process of this kind takes by itself. */
const mostRssBytes = 1_500 << 20;

let dir: string;
let engine: ScriptedEngine;
const children: ChildProcess[] = [];
beforeEach(async () => {
  dir = mkdtempSync(join(tmpdir(), 'kvtier-nonsense-'));
  engine = new ScriptedEngine(`unix:${dir}/engine.sock`, modelDir);
  engine.description = { ...engine.description, maxModelTokens: 131_072 };
  engine.script = (call) => {
    const timer = setInterval(() => call.write(event({ tokenIds: [200] })), tokenMs);
    call.on('cancelled', () => clearInterval(timer));
  };
  await engine.start();
});
afterEach(async () => {
  for (const child of children.splice(0)) {
    if (child.exitCode !== null || child.signalCode !== null) continue;
    child.kill('SIGKILL');
    await once(child, 'exit');
  }
  await engine.stop();
  rmSync(dir, { recursive: true, force: true });
});

function run(args: readonly string[], stdio: 'ipc' | 'pipe', prefix: readonly string[] = []): ChildProcess {
  const [file, ...all] = [...prefix, process.execPath, ...args];
  const child = spawn(file!, all, {
    env: { ...process.env, KVTIER_WATCH_TURNS: '1' },
    stdio: ['pipe', 'pipe', 'inherit', ...(stdio === 'ipc' ? (['ipc'] as const) : [])],
  });
  children.push(child);
  return child;
}

/** The longest times between two pieces of a stream. */
interface Gaps {
  /** As its client sees it. */
  readonly seenMs: number;
  /** Less what the API server and the process that writes and reads the stream waited for a CPU meanwhile. */
  readonly ownMs: number;
}

/** One stream, read as it comes; tells its longest gaps since it was asked last. */
class Watcher {
  readonly #abort = new AbortController();
  readonly #waits: () => ThreadWaits;
  #last: { readonly atMs: number; readonly waits: ThreadWaits } | undefined;
  #longest: Gaps = { seenMs: 0, ownMs: 0 };
  readonly started: Promise<void>;

  constructor(url: string, waits: () => ThreadWaits) {
    this.#waits = waits;
    let begin = (): void => {};
    this.started = new Promise((resolve) => (begin = resolve));
    void (async () => {
      const response = await fetch(`${url}/v1/completions`, {
        method: 'POST',
        headers: { 'content-type': 'application/json' },
        body: JSON.stringify({ prompt: 'a', stream: true, max_tokens: 100_000 }),
        signal: this.#abort.signal,
      });
      for await (const _ of response.body!) {
        this.#look();
        begin();
      }
    })().catch(() => {});
  }

  longestGaps(): Gaps {
    this.#look();
    const longest = this.#longest;
    this.#longest = { seenMs: 0, ownMs: 0 };
    return longest;
  }

  #look(): void {
    const now = { atMs: performance.now(), waits: this.#waits() };
    if (this.#last !== undefined) {
      const seenMs = now.atMs - this.#last.atMs;
      const { ownMs } = this.#longest;
      // What is shorter with its waits cannot be the longest without them, and hundreds of threads a second are asked for less.
      const isLonger = seenMs > ownMs;
      this.#longest = {
        seenMs: Math.max(this.#longest.seenMs, seenMs),
        ownMs: isLonger ? Math.max(ownMs, seenMs - waitedBetween(this.#last.waits, now.waits)) : ownMs,
      };
    }
    this.#last = now;
  }

  stop(): void {
    this.#abort.abort();
  }
}

const memory = (pid: number): { now: number; most: number } => {
  const status = readFileSync(`/proc/${pid}/status`, 'utf8');
  const of = (name: string): number => Number(new RegExp(`${name}:\\s+(\\d+)`).exec(status)![1]) * 1024;
  return { now: of('VmRSS'), most: of('VmHWM') };
};

it('streams go on and memory is bounded while many clients send large nonsense', async () => {
  const file = join(dir, 'config.json');
  writeFileSync(file, JSON.stringify({ port: 0, engine: `unix:${dir}/engine.sock`, logLevel: 'error' }));
  const server = run(['--import', turns, ...program('coordinator'), '--config', file], 'ipc');
  const [{ ready }] = (await once(server, 'message')) as [{ ready: { url: string } }];
  /** Pieces of all streams come one after another: one look is enough for them. */
  let looked = { atMs: 0, waits: new Map() as ThreadWaits };
  const waits = (): ThreadWaits => {
    const atMs = performance.now();
    if (atMs - looked.atMs > tokenMs / 2) looked = { atMs, waits: threadWaits([server.pid!, process.pid]) };
    return looked.waits;
  };
  const doorTurns = async (): Promise<WorstTurns> => {
    server.send('turns');
    const [message] = (await once(server, 'message')) as [{ turns: WorstTurns }];
    return message.turns;
  };
  const watchers = Array.from({ length: streams }, () => new Watcher(ready.url, waits));
  await Promise.all(watchers.map(({ started }) => started));
  const lines: string[] = [];
  for (const [kind, path] of [
    ['messages', '/v1/chat/completions'],
    ['parts', '/v1/chat/completions'],
    ['keys', '/v1/completions'],
    ['nesting', '/v1/completions'],
    ['text', '/v1/completions'],
    ['numbers', '/v1/completions'],
  ] as const) {
    const port = new URL(ready.url).port;
    // On machines of their own elsewhere: here they stand back.
    const flooding = run([flood, port, path, kind, String(clients), String(bytes)], 'pipe', ['nice', '-n', '19']);
    const answers = createInterface({ input: flooding.stdout! })[Symbol.asyncIterator]();
    expect((await answers.next()).value).toBe('ready');
    for (const watcher of watchers) watcher.longestGaps();
    await doorTurns();
    flooding.stdin!.write('go\n');
    const { statuses, ms } = JSON.parse((await answers.next()).value as string) as {
      statuses: Record<string, number>;
      ms: number;
    };
    const gaps = watchers.map((watcher) => watcher.longestGaps());
    const seenMs = Math.max(...gaps.map((gap) => gap.seenMs));
    const ownMs = Math.max(...gaps.map((gap) => gap.ownMs));
    const { cpuMs, waitMs } = await doorTurns();
    const { now, most } = memory(server.pid!);
    lines.push(
      `${kind}: ${JSON.stringify(statuses)} in ${ms} ms, longest gap ${ownMs.toFixed(1)} ms with a CPU, ${seenMs.toFixed(1)} in all (the API server's longest wait for one: ${waitMs.toFixed(1)}), longest turn ${cpuMs.toFixed(1)} ms of CPU, rss ${now >> 20} MiB, most ${most >> 20} MiB`,
    );
    if (process.env.KVTIER_FLOOD_REPORT) process.stderr.write(`${lines.at(-1)}\n`);
    // Each is refused for what it is, or asked to come again: none gets through, none is left without an answer.
    expect
      .soft(
        Object.keys(statuses).filter((status) => !['400', '413', '429'].includes(status)),
        lines.at(-1),
      )
      .toEqual([]);
    expect.soft(cpuMs, lines.at(-1)).toBeLessThan(longestTurnMs);
    expect.soft(ownMs, lines.at(-1)).toBeLessThan(longestGapMs);
    expect.soft(most, lines.at(-1)).toBeLessThan(mostRssBytes);
  }
  for (const watcher of watchers) watcher.stop();
});
