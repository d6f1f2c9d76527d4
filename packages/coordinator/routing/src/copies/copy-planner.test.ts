/** What is copied ahead, to whom and when: over a script of prompts and workers. */
import { maxMedia } from '@kvtier/kv-index';
import { expect, it } from 'vitest';
import type { RoutedRequest, WorkerState } from '../policy.ts';
import { Budget, type BudgetOptions } from './budget.ts';
import { type Copy, type CopyEnd, CopyPlanner } from './copy-planner.ts';

const blockTokens = 16;
const peer = 3;
/** A prompt's hashes from the numbers of its blocks. */
const keysOf = (blocks: readonly number[]): Int32Array => Int32Array.from(blocks.flatMap((block) => [block, -block]));
const counted = (from: number, count: number): number[] => Array.from({ length: count }, (_, i) => from + i);
const system = counted(1, 64);

class World {
  readonly budget: Budget;
  readonly planner: CopyPlanner<number>;
  readonly ends: CopyEnd[] = [];
  /** By worker: blocks of `system` that it holds, and how fast it brings others in. */
  readonly held: number[];
  perS = 10_000;
  #tails = 1_000;
  nowMs = 0;

  constructor(workers: number, budget: Partial<BudgetOptions> = {}) {
    this.budget = new Budget({ bytesPerS: 1e9, maxUnderWay: 4, ...budget });
    this.planner = new CopyPlanner({ budget: this.budget, targetS: 2 });
    this.held = Array.from({ length: workers }, () => 0);
  }

  /** Prompts that begin with it, so many a second, for so long. */
  ask(perS: number, seconds: number, tailTokens = 500): void {
    const endMs = this.nowMs + seconds * 1000;
    for (; this.nowMs < endMs; this.nowMs += 1000 / perS) {
      const tail = counted(this.#tails, Math.floor(tailTokens / blockTokens));
      this.#tails += tail.length;
      const keys = keysOf([...system, ...tail]);
      const tokens = system.length * blockTokens + tailTokens;
      this.planner.came({ keys, tokens, blockTokens, maxTokens: 10, session: '' }, (blocks) => blocks, this.nowMs);
    }
  }

  look(): Copy<number>[] {
    return this.planner.look(
      this.nowMs,
      1_000,
      (request) => this.#states(request),
      (_, how) => this.ends.push(how),
    );
  }

  #states({ keys }: RoutedRequest): WorkerState[] {
    const most = Math.max(...this.held);
    const isSystem = keys[0] === system[0];
    return this.held.map((blocks) => {
      const byMedium = new Int32Array(maxMedia);
      const has = isSystem ? Math.min(blocks, keys.length / 2) : 0;
      const loadBlocksPerS = new Array<number>(maxMedia).fill(0);
      loadBlocksPerS[peer] = this.perS;
      return {
        waiting: 0,
        running: 0,
        tokensAhead: 0,
        usedBlocks: 0,
        totalBlocks: 0,
        waitingBlocks: 0,
        freedBlocksPerS: 0,
        loadAheadS: 0,
        prefillTokensPerS: 10_000,
        stepS: 0.01,
        stepPerRequestS: 0.0001,
        loadBlocksPerS,
        match: { blocks: has, byMedium },
        remoteBlocks: isSystem ? Math.min(most, keys.length / 2) - has : 0,
        remoteMedium: peer,
      };
    });
  }
}

it('copies nothing while one holder serves all that come', () => {
  const world = new World(4);
  world.held[0] = 64;
  world.ask(1, 20, 32); // 3 ms of work a second
  expect(world.look()).toEqual([]);
});

it('copies the shared prefix, and no more than it, to a worker that lacks it, before its holder is overloaded', () => {
  const world = new World(4);
  world.held[0] = 64;
  world.ask(15, 4); // three quarters of what one worker computes
  const copies = world.look();
  expect(copies.length).toBe(1);
  expect(copies[0]).toMatchObject({ why: 'hot', blocks: 64, brings: 64, kept: 64 });
  expect(copies[0]!.worker).not.toBe(0);
  world.held[copies[0]!.worker] = 64;
  world.nowMs += 100;
  world.look();
  expect(world.ends).toEqual(['came']);
});

it('has more holders for more prompts, up to all workers, and never one twice', () => {
  const world = new World(4);
  world.held[0] = 64;
  for (let i = 0; i < 10; i++) {
    world.ask(60, 1);
    const copies = world.look();
    for (const { worker } of copies) {
      expect(world.held[worker]).toBe(0);
      world.held[worker] = 64;
    }
  }
  expect(world.held).toEqual([64, 64, 64, 64]);
  expect(world.planner.underWay).toBe(0);
});

it('gives a worker that has just joined what is asked for most', () => {
  const world = new World(3);
  world.held[0] = 64;
  world.held[1] = 64;
  world.ask(1, 20, 32);
  expect(world.look()).toEqual([]);
  world.planner.joined(2, world.nowMs);
  expect(world.look()).toMatchObject([{ worker: 2, why: 'new', blocks: 64 }]);
});

it.each([
  { why: 'that is slower to bring than to compute', change: (world: World) => (world.perS = 500) },
  { why: 'that nobody holds', change: (world: World) => (world.held[0] = 0) },
])('copies nothing $why', ({ change }) => {
  const world = new World(4);
  world.held[0] = 64;
  change(world);
  world.ask(30, 4);
  expect(world.look()).toEqual([]);
});

it('gives up what does not come, and does not try it there again for a minute', () => {
  const world = new World(2);
  world.held[0] = 64;
  world.ask(30, 4);
  expect(world.look().length).toBe(1);
  world.ask(30, 3);
  expect(world.look()).toEqual([]);
  expect(world.ends).toEqual(['late']);
  world.ask(30, 50);
  expect(world.look()).toEqual([]);
  world.ask(30, 20);
  expect(world.look().length).toBe(1);
});

it('asks who refuses again after a second, then after twice as long each time; who comes in its place is asked at once', () => {
  const world = new World(3);
  world.held[0] = 64;
  world.held[1] = 64;
  world.ask(1, 20, 32);
  world.planner.joined(2, world.nowMs);
  const beganMs: number[] = [];
  const fromMs = world.nowMs;
  for (let second = 0; second < 7; second++) {
    world.ask(1, 0.1, 32);
    for (const copy of world.look()) {
      beganMs.push(world.nowMs - fromMs);
      expect(world.planner.refused(copy, world.nowMs)).toBe(true);
    }
  }
  expect(beganMs).toEqual([1_000, 2_000, 4_000]);
  expect(world.planner.left(2)).toEqual([]);
  world.planner.joined(2, world.nowMs);
  world.ask(1, 0.1, 32);
  expect(world.look()).toMatchObject([{ worker: 2, why: 'new' }]);
});

it('ends what is under way to a worker that left', () => {
  const world = new World(2);
  world.held[0] = 64;
  world.ask(30, 4);
  const [copy] = world.look();
  expect(world.planner.left(1)).toEqual([copy]);
  expect([world.planner.underWay, world.budget.underWay]).toEqual([0, 0]);
  expect(world.planner.refused(copy!, world.nowMs)).toBe(false);
});

it('keeps to its budget: copies at once, and bytes a second', () => {
  const world = new World(9, { maxUnderWay: 2, bytesPerS: 6_400 });
  world.held[0] = 64;
  world.ask(200, 4);
  expect(world.look().length).toBe(1); // 64,000 bytes: ten seconds' worth
  world.ask(200, 9);
  expect(world.look()).toEqual([]);
  world.ask(200, 1.5);
  expect(world.look().length).toBe(1);
  const off = new World(4, { bytesPerS: 0 });
  off.held[0] = 64;
  off.ask(200, 4);
  expect(off.look()).toEqual([]);
});

it.each<[string, (world: World, copy: Copy<number>) => unknown]>([
  ['refused', (world, copy) => world.planner.refused(copy, world.nowMs)],
  ['whose worker left', (world, { worker }) => world.planner.left(worker)],
])('a copy %s costs nothing: the next one goes at once, and its bytes do not count', (_, ends) => {
  const world = new World(9, { bytesPerS: 6_400 });
  world.held[0] = 64;
  world.ask(200, 4);
  const [copy] = world.look(); // 64,000 bytes: ten seconds' worth
  world.ask(200, 1);
  expect(world.look()).toEqual([]);
  ends(world, copy!);
  const [next] = world.look();
  expect([world.budget.bytes, world.budget.underWay]).toEqual([0, 1]);
  world.held[next!.worker] = 64;
  world.look();
  expect([world.ends, world.budget.bytes, world.budget.underWay]).toEqual([['came'], 64_000, 0]);
});

it('says until when it waits for a copy, and gives it up then', () => {
  const world = new World(2);
  world.held[0] = 64;
  world.ask(30, 4);
  const [copy] = world.look();
  // 64 blocks at 10,000 a second, four times, and two seconds.
  expect(copy!.withinMs).toBeCloseTo(2_025.6, 6);
  world.nowMs += copy!.withinMs;
  world.look();
  expect(world.ends).toEqual([]);
  world.nowMs += 1;
  world.look();
  expect(world.ends).toEqual(['late']);
});
