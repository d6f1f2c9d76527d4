/** The index within its bytes: room is made in small steps, and nothing is dropped where sets that nobody has are room enough. */
import { afterEach, beforeEach, describe, expect, it, vi } from 'vitest';
import { Chains } from './chains.ts';
import { KvIndex } from './index.ts';
import { Space } from './space.ts';
import { keysOf, pairOf } from './testing/nodes.ts';

const mib = 1024 * 1024;
const { sweep: sweepOf } = Space.prototype;
const { forget: forgetOf } = Chains.prototype;

/** Records that were looked at, and runs that were forgotten. */
let looked = 0;
let forgotten = 0;

beforeEach(() => {
  looked = 0;
  forgotten = 0;
  vi.spyOn(Space.prototype, 'sweep').mockImplementation(function (this: Space, records = 4096) {
    looked += records;
    return sweepOf.call(this, records);
  });
  vi.spyOn(Chains.prototype, 'forget').mockImplementation(function (this: Chains, run) {
    forgotten++;
    forgetOf.call(this, run);
  });
});
afterEach(() => {
  vi.restoreAllMocks();
});

describe('room in the KV index', () => {
  it('makes room in small steps where sets become many at once, and credits nobody with what he dropped', () => {
    const maxBytes = 4 * mib;
    const index = new KvIndex({ maxBytes });
    const sources = Array.from({ length: 257 }, () => index.addSource());
    const blocks = 40_000;
    const [sets, slice] = [800, 400];
    for (let set = 0; set < sets; set++)
      for (const holder of pairOf(set)) {
        const nodes = Array.from({ length: blocks / sets }, (_, i) => i * sets + set);
        index.stored(sources[holder]!, 0, keysOf(nodes), 'unknown');
      }
    looked = 0;
    const isWithin = (blocks: number): void => {
      expect(looked).toBeLessThanOrEqual(128 * blocks);
      expect(index.stats().bytes).toBeLessThanOrEqual(maxBytes);
      looked = 0;
    };
    const holds = (node: number, source: number): boolean =>
      index.match(keysOf([node]), [{ sources: [source] }])[0]!.blocks === 1;
    const newcomer = sources[256]!;
    for (let at = 0; at < 8_000; at += slice) {
      // Of each set one block or none: every one that is stored is a set more.
      const nodes = Array.from({ length: slice }, (_, i) => at + i);
      index.stored(newcomer, 0, keysOf(nodes), 'unknown');
      isWithin(slice);
    }
    const { droppedBlocks, blocks: left } = index.stats();
    expect(droppedBlocks).toBeGreaterThan(0);
    expect(left).toBeGreaterThan(blocks / 2);
    for (let node = 0; node < 2 * sets; node++) {
      const source = sources[pairOf(node % sets)[node % 2]!]!;
      index.removed(source, 0, keysOf([node]));
      isWithin(1);
      expect(holds(node, source)).toBe(false);
    }
    index.checkIntegrity();
    // What has room again is told again.
    index.cleared(newcomer);
    while (index.sweep());
    index.stored(newcomer, 0, keysOf([7]), 'unknown');
    expect(holds(7, newcomer)).toBe(true);
  });

  it('no removal pays for all others, where each cuts a run and there is no room for that', () => {
    const maxBytes = 8 * mib;
    const index = new KvIndex({ maxBytes });
    const sources = Array.from({ length: 200 }, () => index.addSource());
    let drawn = 7;
    const draw = (below: number): number => {
      drawn = (Math.imul(drawn, 1_103_515_245) + 12_345) >>> 0;
      return Math.floor((drawn / 2 ** 32) * below);
    };
    const [runs, length] = [400, 500];
    const nodesOf = (run: number, from: number, count: number): number[] =>
      Array.from({ length: count }, (_, i) => run * length + from + i);
    for (let run = 0; run < runs; run++)
      index.stored(sources[run % sources.length]!, 0, keysOf(nodesOf(run, 0, length)), 'root');
    const targets = sources.map((source) => ({ sources: [source] }));
    // Others hold parts of these, until there is no room for sets and segments.
    while (index.stats().droppedBlocks === 0) {
      const [run, from] = [draw(runs), draw(length - 60)];
      index.stored(
        sources[draw(sources.length)]!,
        0,
        keysOf(nodesOf(run, from, 50)),
        keysOf(nodesOf(run, from - 1, 1)),
      );
    }
    for (let i = 0; i < 20_000; i++) {
      const run = draw(runs);
      // Somebody leaves, and all sets may name him.
      if (i % 1_000 === 0) index.cleared(sources[i / 1_000]!);
      looked = 0;
      forgotten = 0;
      let before = index.setWork;
      index.removed(sources[run % sources.length]!, 0, keysOf(nodesOf(run, draw(length), 1)));
      expect(looked).toBeLessThanOrEqual(128);
      expect(forgotten).toBeLessThanOrEqual(runs / 8);
      expect(index.setWork - before).toBeLessThan(48);
      if (i % 20 !== 0) continue;
      before = index.setWork;
      index.match(keysOf(nodesOf(run, 0, length)), targets);
      expect(index.setWork).toBe(before);
    }
    expect(index.stats().bytes).toBeLessThanOrEqual(maxBytes);
    index.checkIntegrity();
  });

  it('a burst of removals forgets nothing while they leave room themselves', () => {
    const maxBytes = 16 * mib;
    const index = new KvIndex({ maxBytes });
    const sources = Array.from({ length: 257 }, () => index.addSource());
    const [sets, blocks] = [2_500, 100_000];
    const nodesOf = (set: number): number[] => Array.from({ length: blocks / sets }, (_, i) => i * sets + set);
    for (let set = 0; set < sets; set++)
      for (const holder of pairOf(set)) index.stored(sources[holder]!, 0, keysOf(nodesOf(set)), 'unknown');
    // A third one holds some, until there is no room for a set more.
    for (let node = 0; index.stats().droppedBlocks === 0; node++)
      index.stored(sources[256]!, 0, keysOf([node]), 'unknown');
    const before = index.stats();
    for (let node = 0; node < blocks; node++) {
      looked = 0;
      index.removed(sources[pairOf(node % sets)[0]]!, 0, keysOf([node]));
      expect(looked).toBeLessThanOrEqual(128);
    }
    const after = index.stats();
    expect(after.bytes).toBeLessThan(before.bytes);
    // A few, until there is room for sets again.
    expect(after.droppedBlocks - before.droppedBlocks).toBeLessThan(2_000);
    index.checkIntegrity();
  });
});
