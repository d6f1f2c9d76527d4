/** Prefixes that are asked for often reach another worker's node ahead: over workers and an index that say what a test tells them. */
import type { Held } from '@kvtier/dispatch';
import { FakeWorkers, recordOf } from '@kvtier/dispatch/testing';
import { maxMedia } from '@kvtier/kv-index';
import { createLogger } from '@kvtier/telemetry';
import type { GenerateRequest, PrefetchRequest } from '@kvtier/wire/grpc';
import { afterEach, expect, it, vi } from 'vitest';
import type { Asked } from './asked.ts';
import { Copies } from './copies.ts';

const logger = createLogger('copies-test', 'silent');
const blockTokens = 16;
const tokens = Array.from({ length: 20 * blockTokens + 5 }, (_, i) => i);
const keys = Int32Array.from({ length: 40 }, (_, i) => 1_000 + i);
const patience = { timeout: 20_000, interval: 5 };
let copies: Copies | undefined;
afterEach(() => copies?.close());

class Rig {
  readonly workers = new FakeWorkers();
  readonly asked: { number: number; request: PrefetchRequest }[] = [];
  /** By number. */
  readonly held: number[] = [20];
  answer: () => Promise<number> = async () => 20;
  readonly copies: Copies;

  constructor(bytesPerS = 1e9) {
    for (const name of ['a', 'b']) this.add(name);
    const engine = (number: number) => ({
      prefetch: (request: PrefetchRequest) => {
        this.asked.push({ number, request });
        return this.answer();
      },
    });
    this.copies = new Copies({
      engines: { workers: () => this.workers.workers(), engine },
      holdings: { match: (_model, asked, numbers) => numbers.map((number) => this.#heldBy(number, asked.length / 2)) },
      limits: { bytesPerS, maxUnderWay: 4 },
      ...{ ttftMs: 2_000, logger, lookMs: 3_600_000 },
    });
    copies = this.copies;
    this.copies.look(performance.now()); // they are there from the beginning
  }

  add(name: string): void {
    const loadBlocksPerS = new Array<number>(maxMedia).fill(2_500);
    this.workers.add(name, {}, { loadBlocksPerS }).record = recordOf(name, { node: `node-${name}` });
  }

  #heldBy(number: number, blocks: number): Held {
    const held = Math.min(this.held[number] ?? 0, blocks);
    return { blocks: held, byMedium: new Int32Array(maxMedia), remoteBlocks: blocks - held, remoteMedium: 3 };
  }

  came(times: number, part: Partial<GenerateRequest> = {}): void {
    const asked = { model: 'demo', keys, tokens: tokens.length, blockTokens, maxTokens: 100, session: '' } as Asked;
    const request = { promptTokenIds: tokens, cacheSalt: 'salt', loraName: '', ...part } as GenerateRequest;
    for (let i = 0; i < times; i++) this.copies.came(asked, request);
  }

  /** Values of `kvtier_copies_total` by labels. */
  async ends(): Promise<string[]> {
    const text = await this.copies.metrics.text();
    return text.split('\n').filter((line) => /^kvtier_copies_(total|bytes)/.test(line));
  }
}

it('a worker that lacks it is asked for it by its tokens; that its node holds it ends the copy', async () => {
  const rig = new Rig();
  rig.came(50);
  rig.copies.look(performance.now());
  const prompt = tokens.slice(0, 20 * blockTokens);
  expect(rig.asked).toEqual([
    // Four times as long as 20 blocks take at 2,500 a second, and two seconds: as long as the planner waits for it.
    { number: 1, request: { promptTokenIds: prompt, cacheSalt: 'salt', deadlineMs: 2_032 } },
  ]);
  rig.copies.look(performance.now());
  expect(rig.asked.length).toBe(1);
  rig.held[1] = 20;
  rig.copies.look(performance.now());
  expect(await rig.ends()).toEqual([
    'kvtier_copies_total{why="hot",outcome="came"} 1',
    `kvtier_copies_bytes_total ${20 * 1_024}`,
  ]);
});

it.each([
  { what: 'fails', answer: () => Promise.reject(new Error('gone')) },
  { what: 'has no node', answer: () => Promise.resolve(0) },
])('a worker that $what is not asked again soon', async ({ answer }) => {
  const rig = new Rig();
  rig.answer = answer;
  rig.came(50);
  rig.copies.look(performance.now());
  const refused = 'kvtier_copies_total{why="hot",outcome="refused"} 1';
  await vi.waitUntil(async () => (await rig.ends()).includes(refused), patience);
  expect(await rig.ends()).toContain('kvtier_copies_bytes_total 0');
  rig.copies.look(performance.now());
  expect(rig.asked.length).toBe(1);
});

it('a worker that joins is given what is asked for often', () => {
  const rig = new Rig();
  rig.held[1] = 20;
  rig.came(50);
  rig.copies.look(performance.now());
  expect(rig.asked).toEqual([]);
  rig.add('c');
  rig.copies.look(performance.now());
  expect(rig.asked.map(({ number }) => number)).toEqual([2]);
});

it.each([1, 0])('a copy ends though %i of the workers that it could go to are left', async (left) => {
  const rig = new Rig();
  rig.came(50);
  const nowMs = performance.now();
  rig.copies.look(nowMs);
  expect(rig.asked.map(({ number }) => number)).toEqual([1]);
  expect(await rig.ends()).toEqual(['kvtier_copies_bytes_total 0']);
  for (const worker of rig.workers.all.slice(0, 2 - left)) worker!.state = 'draining';
  rig.copies.look(nowMs + 2_000);
  if (left === 1) expect(await rig.copies.metrics.text()).toContain('kvtier_copies_under_way 1\n');
  rig.copies.look(nowMs + 2_100);
  const ended = left === 0 ? 'left' : 'late';
  expect(await rig.ends()).toContain(`kvtier_copies_total{why="hot",outcome="${ended}"} 1`);
  expect(await rig.copies.metrics.text()).toContain('kvtier_copies_under_way 0\n');
});

it('nothing is copied to workers without a node, to pods, of prompts with an adapter, or where it is turned off', () => {
  const rig = new Rig();
  rig.workers.all[1]!.record = recordOf('b', { node: null });
  rig.workers.add('pod').record = recordOf('pod', { kind: 'openai', node: 'n' });
  rig.came(50);
  rig.copies.look(performance.now());
  const other = new Rig();
  other.came(50, { loraName: 'adapter' });
  other.copies.look(performance.now());
  const off = new Rig(0);
  off.came(50);
  off.copies.look(performance.now());
  expect([...rig.asked, ...other.asked, ...off.asked]).toEqual([]);
});
