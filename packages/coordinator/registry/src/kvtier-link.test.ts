/** A line to one of our own workers that is closed at an awkward moment. */
import { mkdtempSync, rmSync } from 'node:fs';
import { createServer, type Socket } from 'node:net';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { afterEach, beforeEach, expect, it, vi } from 'vitest';
import { KvtierLink } from './kvtier-link.ts';
import { type LinkHost, linkTimes } from './link.ts';
import { event, greedy, ScriptedEngine } from './testing/index.ts';

let dir: string;
let engine: ScriptedEngine;
beforeEach(async () => {
  dir = mkdtempSync(join(tmpdir(), 'kvtier-link-'));
  engine = new ScriptedEngine(`unix:${dir}/engine.sock`, '/models/m');
  await engine.start();
});
afterEach(async () => {
  await engine.stop();
  rmSync(dir, { recursive: true, force: true });
});

const calm: LinkHost = {
  described: () => undefined,
  answers: () => {},
  lost: () => {},
  refused: () => {},
  ended: () => {},
  rests: () => {},
  maySpare: () => false,
  usualPrefillTokensPerS: () => 1,
  usualStepPerRequestS: () => 0,
  usualLoadBlocksPerS: () => undefined,
};

it.each([
  [
    'generate',
    async (link: KvtierLink) => (await link.generate(greedy({}), new AbortController().signal).next()).value,
  ],
  [
    'follow',
    (link: KvtierLink) =>
      new Promise((resolve) => {
        const { signal } = new AbortController();
        // It ends with the line.
        link.follow(greedy({}), signal, resolve).catch(() => {});
      }),
  ],
])('%s: when tokens come, a step has begun, but where the worker says which one runs', async (_how, firstEvent) => {
  let answered = 0;
  const host = { ...calm, answers: () => void answered++ };
  const link = new KvtierLink({
    ...{ name: 'engine', address: `unix:${dir}/engine.sock`, sender: 's', media: [], tls: undefined },
    ...{ host, times: linkTimes },
  });
  try {
    link.start();
    while (answered === 0) await new Promise(setImmediate);
    expect(link.load().stepBegunAtMs).toBe(0);
    engine.script = (call) => void call.write(event({ tokenIds: [7] }));
    const beforeMs = performance.now();
    await firstEvent(link);
    const { stepBegunAtMs } = link.load();
    expect(stepBegunAtMs).toBeGreaterThanOrEqual(beforeMs);
    expect(stepBegunAtMs).toBeLessThanOrEqual(performance.now());
    engine.load = { step: { tokens: 100, forS: 10 } };
    engine.tell();
    while (link.load().stepTokens === 0) await new Promise(setImmediate);
    expect(link.load().stepBegunAtMs).toBeLessThan(beforeMs);
  } finally {
    await link.close();
  }
});

it('a rate below the usual one drifts to that while the worker measures nothing; what it measures then counts', async () => {
  let answered = 0;
  const host = { ...calm, answers: () => void answered++, usualPrefillTokensPerS: () => 10_000 };
  const link = new KvtierLink({
    ...{ name: 'engine', address: `unix:${dir}/engine.sock`, sender: 's', media: [], tls: undefined },
    ...{ host, times: { ...linkTimes, silentMs: 1e9 } },
  });
  const tell = async (prefillTokensPerS: number): Promise<number> => {
    const before = answered;
    const rates = { stepS: 0, stepPerRequestS: 0, prefillStepS: 0, pacingTrust: 0, freedBlocksPerS: 0 };
    engine.load = { rates: { ...rates, loadBlocksPerS: {}, prefillTokensPerS } };
    engine.tell();
    const isHeard = (): boolean => answered > before && link.measuredPrefillTokensPerS === prefillTokensPerS;
    while (!isHeard()) await new Promise(setImmediate);
    return link.load().prefillTokensPerS;
  };
  vi.useFakeTimers({ toFake: ['performance'] });
  try {
    link.start();
    while (answered === 0) await new Promise(setImmediate);
    engine.alive = false;
    expect(await tell(50)).toBe(50);
    vi.advanceTimersByTime(5_000);
    expect(await tell(50)).toBe(50);
    vi.advanceTimersByTime(60_000);
    expect(await tell(50)).toBeGreaterThan(9_000);
    expect(await tell(51)).toBe(51);
    vi.advanceTimersByTime(60_000);
    expect(await tell(20_000)).toBe(20_000);
    vi.advanceTimersByTime(60_000);
    expect(await tell(20_000)).toBe(20_000); // faster than usual: it starves nobody
  } finally {
    vi.useRealTimers();
    await link.close();
  }
});

it('closed between what the worker is and its load: the line is over, and nothing looks at it any more', async () => {
  const told: string[] = [];
  const silentMs = 20;
  let closed: Promise<void> | undefined;
  const host: LinkHost = {
    ...calm,
    described: () => {
      closed = link.close();
      return undefined;
    },
    answers: () => told.push('answers'),
    lost: ({ code }) => told.push(code),
    refused: (why) => told.push(why),
  };
  const times = { ...linkTimes, silentMs };
  const link: KvtierLink = new KvtierLink({
    ...{ name: 'engine', address: `unix:${dir}/engine.sock`, sender: 's', media: [], tls: undefined },
    ...{ host, times },
  });
  link.start();
  while (closed === undefined) await new Promise(setImmediate);
  await closed;
  // What still looked for its silence would throw in a turn of its own.
  await new Promise((resolve) => setTimeout(resolve, 3 * silentMs));
  expect(told).toEqual([]);
});

it('closed while a worker that hangs is asked what it is: nobody waits for its answer', async () => {
  const sockets: Socket[] = [];
  const server = createServer((socket) => void sockets.push(socket));
  await new Promise<void>((resolve) => server.listen(`${dir}/hangs.sock`, resolve));
  const askMs = 60_000;
  const link = new KvtierLink({
    ...{ name: 'engine', address: `unix:${dir}/hangs.sock`, sender: 's', media: [], tls: undefined },
    ...{ host: calm, times: { ...linkTimes, askMs } },
  });
  try {
    link.start();
    while (sockets.length === 0) await new Promise(setImmediate);
    const fromMs = performance.now();
    await link.close();
    expect(performance.now() - fromMs).toBeLessThan(askMs / 2);
  } finally {
    for (const socket of sockets) socket.destroy();
    server.close();
  }
});
