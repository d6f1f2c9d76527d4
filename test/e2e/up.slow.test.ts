/** The system as a user sees it: it starts, answers, survives its own processes' deaths, and leaves nothing behind. */

import { mkdirSync, writeFileSync } from 'node:fs';
import { createServer, type Server } from 'node:net';
import { join } from 'node:path';
import { complete, metricValues, resetPrefixCache, waitForWriteDown, waitUntilServing } from '@kvtier/cli';
import { afterEach, beforeEach, describe, expect, it, vi } from 'vitest';
import { kvtier, Machine, pidOf } from './kvtier-up.ts';

let machine: Machine;
beforeEach(() => {
  machine = new Machine();
});
afterEach(() => machine.close());

const table = Array.from(
  { length: 20 },
  (_, i) => `| ${i + 1} | Alice ${['Doe', 'Smith', 'Lee', 'Hill', 'King'][i % 5]} | ${20 + i} | Chef | Peru |\n`,
);
const prompt =
  `# Employees\n${table.slice(0, 5).join('')}| 6 | Jane Brown | 34 | Doctor | Brazil |\n| 7 | John Davis | 29 | Engineer | Canada |\n` +
  'Question: What is the country of Jane Brown?\nAnswer:';
const ask = (url: string) => complete(url, { prompt, max_tokens: 4, temperature: 0 });
/** Of what comes at once on a machine that does nothing else. */
const patience = { timeout: 20_000 };

/**
 * An engine that has nothing of a prompt gets all its blocks from the arena: what a busy node gave no room in time, or was late with, is
 * offered again when it is computed again.
 */
const comesFromArena = (url: string, tokens: number): Promise<void> =>
  vi.waitFor(
    async () => {
      await resetPrefixCache(url);
      expect(await ask(url)).toMatchObject({ text: ' Brazil', cachedTokens: tokens, tokensByTier: { arena: tokens } });
    },
    { timeout: 60_000, interval: 200 },
  );

describe('kvtier up', () => {
  it('serves, caches, keeps its data folder to itself, and leaves nothing after Ctrl-C', async () => {
    const system = await machine.up('--loads', 'always');
    expect(system.pids()).toHaveLength(4);
    const cold = await ask(system.url);
    expect(cold).toMatchObject({ text: ' Brazil', cachedTokens: 0, finishReason: 'stop' });
    const shared = Math.floor((cold.promptTokens - 1) / 16) * 16;
    await comesFromArena(system.url, shared);
    expect(machine.left()).toHaveLength(3); // run folder, arena, and the file of its locks
    expect(await kvtier('up', '--port', '0', '--data-dir', machine.dataDir)).toEqual({
      code: 1,
      stdout: '',
      stderr: `kvtier: ${machine.dataDir}: another kvtier uses this data folder; stop it or name another with --data-dir\n`,
    });
    expect((await ask(system.url)).text).toBe(' Brazil');
    // How long they are depends on the machine, and is judged where what its memory costs is known; a node that it keeps waiting is left out once.
    for (const process of ['api_server', 'engine', 'node'])
      await vi.waitFor(async () => {
        const [told] = (await metricValues(system.url, `kvtier_${process}_longest_turn_seconds`)).values();
        expect(told, process).toBeGreaterThan(0);
      }, patience);
    expect(await system.stop()).toBe(0);
    expect(machine.left()).toEqual([]);
  });

  it('serves from disk after SIGKILL of everything, and clears what the killed life left', async () => {
    const killed = await machine.up('--loads', 'always');
    const cold = await ask(killed.url);
    const shared = Math.floor((cold.promptTokens - 1) / 16) * 16;
    await comesFromArena(killed.url, shared);
    await waitForWriteDown(killed.url, shared / 16);
    await killed.killAll();
    expect(machine.left()).toHaveLength(3);
    const system = await machine.up('--loads', 'always');
    const warm = await ask(system.url);
    expect(warm).toMatchObject({ text: ' Brazil', cachedTokens: shared, tokensByTier: { disk: shared } });
    expect(await system.stop()).toBe(0);
    expect(machine.left()).toEqual([]);
  });

  it('answers alike with the radix tree as its prefix cache, and comes back after SIGKILL of each of its processes', async () => {
    const system = await machine.up('--prefix-cache', 'radix', '--loads', 'always');
    const cold = await ask(system.url);
    expect(cold).toMatchObject({ text: ' Brazil', cachedTokens: 0 });
    const shared = Math.floor((cold.promptTokens - 1) / 16) * 16;
    expect(await ask(system.url)).toMatchObject({ text: ' Brazil', tokensByTier: { engine: shared } });
    await comesFromArena(system.url, shared);
    for (const service of ['cache-node', 'engine-worker', 'coordinator']) {
      const pid = pidOf(system, service);
      process.kill(pid, 'SIGKILL');
      if (service === 'cache-node') expect((await ask(system.url)).text).toBe(' Brazil'); // never in the way
      await vi.waitUntil(() => system.pids().length === 4 && !system.pids().includes(pid), { timeout: 60_000 });
      await vi.waitUntil(
        () =>
          waitUntilServing(system.url, true, 1_000).then(
            () => true,
            () => false,
          ),
        { timeout: 60_000 },
      );
      await resetPrefixCache(system.url);
      expect((await ask(system.url)).text).toBe(' Brazil');
    }
    expect(await system.stop()).toBe(0);
    expect(machine.left()).toEqual([]);
  });

  it('serves with prefill and decode apart, each beside a node of its own', async () => {
    const system = await machine.up('--prefill', '1', '--decode', '1');
    expect(system.pids()).toHaveLength(6);
    const { workers } = (await (await fetch(`${system.url}/health`)).json()) as { workers: Record<string, string>[] };
    expect(workers.map(({ name, role }) => [name, role]).toSorted()).toEqual([
      ['decode-0', 'decode'],
      ['prefill-0', 'prefill'],
    ]);
    expect((await ask(system.url)).text).toBe(' Brazil');
    expect(await system.stop()).toBe(0);
    expect(machine.left()).toEqual([]);
  });

  it('serves with two engines over two nodes, goes on while one of them is killed, and has it back', async () => {
    const system = await machine.up('--engines', '2', '--nodes', '2');
    expect(system.pids()).toHaveLength(6);
    const bothAreReady = (): Promise<void> =>
      vi.waitFor(
        async () => {
          const states = await metricValues(system.url, 'kvtier_worker_state');
          const ready = [...states].filter(([labels, value]) => value === 1 && labels.includes('state="ready"'));
          expect(ready.map(([labels]) => /worker="([^"]*)"/.exec(labels)![1]).toSorted()).toEqual([
            'engine-worker-0',
            'engine-worker-1',
          ]);
        },
        { timeout: 60_000 },
      );
    await bothAreReady();
    // Nobody holds anything of these: they go where there is least to do.
    const askAll = (round: number): Promise<string[]> =>
      Promise.all(
        Array.from({ length: 8 }, async (_, i) => {
          const answer = await complete(system.url, {
            prompt: prompt.replace('Employees', `Staff ${round} ${i}`),
            max_tokens: 4,
            temperature: 0,
          });
          return answer.text;
        }),
      );
    expect(await askAll(0)).toEqual(Array(8).fill(' Brazil'));
    await vi.waitFor(async () => {
      const ended = [...(await metricValues(system.url, 'kvtier_engine_requests_total'))].filter(
        ([, count]) => count > 0,
      );
      expect(new Set(ended.map(([labels]) => /worker="([^"]*)"/.exec(labels)![1]))).toEqual(
        new Set(['engine-worker-0', 'engine-worker-1']),
      );
    }, patience);
    const pid = pidOf(system, 'engine-worker');
    const asked = askAll(1);
    process.kill(pid, 'SIGKILL');
    expect(await asked).toEqual(Array(8).fill(' Brazil'));
    expect(await askAll(2)).toEqual(Array(8).fill(' Brazil'));
    await vi.waitUntil(() => system.pids().length === 6 && !system.pids().includes(pid), { timeout: 60_000 });
    await bothAreReady();
    expect(await askAll(3)).toEqual(Array(8).fill(' Brazil'));
    expect(await system.stop()).toBe(0);
    expect(machine.left()).toEqual([]);
  });

  it('serves without a tier, and on every address where it is told to', async () => {
    const system = await machine.up('--no-tier', '--host', '0.0.0.0', '--trusted-network');
    expect(await ask(system.url.replace('127.0.0.1', '127.0.0.2'))).toMatchObject({ text: ' Brazil' });
    expect(await ask(system.url)).toMatchObject({ text: ' Brazil', tokensByTier: {} });
    expect(await system.stop()).toBe(0);
  });
});

describe('what cannot work is one line, and exit code 78 where it was written so', () => {
  const refused = async (message: RegExp, ...args: string[]): Promise<number | null> => {
    const { code, stdout, stderr } = await kvtier(...args);
    expect(stdout).toBe('');
    expect(stderr).toMatch(message);
    expect(
      stderr
        .trim()
        .split('\n')
        .filter((line) => line.startsWith('kvtier: ')),
    ).toHaveLength(1);
    expect(machine.left()).toEqual([]);
    return code;
  };

  it('a port that is taken', async () => {
    const server: Server = createServer();
    const port = await new Promise<number>((resolve) => {
      server.listen(0, '127.0.0.1', () => resolve((server.address() as { port: number }).port));
    });
    try {
      const code = await refused(
        new RegExp(
          `^kvtier: port ${port} on 127.0.0.1 is taken; choose another: npm start -- --port ${port < 65_000 ? port + 1 : 8001}\n$`,
        ),
        ...['up', '--port', String(port), '--data-dir', machine.dataDir],
      );
      expect(code).toBe(1);
    } finally {
      server.close();
    }
  });

  it('a model folder that is not there, or damaged', async () => {
    const up = ['up', '--port', '0', '--data-dir', machine.dataDir, '--no-tier', '--model'];
    expect(await refused(/^kvtier: --model \/nowhere: no such folder; /, ...up, '/nowhere')).toBe(1);
    const broken = join(machine.folder, 'broken');
    mkdirSync(broken);
    writeFileSync(join(broken, 'config.json'), '{');
    expect(await refused(/^kvtier: engine-worker: MODEL: .*broken\/config\.json/m, ...up, broken)).toBe(1);
  });

  it('an unknown option, and an unknown command', async () => {
    expect(await refused(/^kvtier: --prot: unknown option; did you mean --port\?\n$/, 'up', '--prot', '1')).toBe(78);
    expect(await refused(/^kvtier: upp: unknown command; did you mean kvtier up\?\n$/, 'upp')).toBe(78);
  });

  it('more memory than the machine shares', async () => {
    const up = ['up', '--port', '0', '--data-dir', machine.dataDir];
    expect(
      await refused(
        /^kvtier: --arena-bytes: 900 TiB is more than \/dev\/shm has free/,
        ...up,
        '--arena-bytes',
        '900TiB',
      ),
    ).toBe(1);
    expect(await refused(/^kvtier: --disk-bytes: 900 TiB is more than the disk/, ...up, '--disk-bytes', '900TiB')).toBe(
      1,
    );
  });
});
