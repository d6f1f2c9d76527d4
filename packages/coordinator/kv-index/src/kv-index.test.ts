import { execFile } from 'node:child_process';
import { join } from 'node:path';
import { promisify } from 'node:util';
import * as fc from 'fast-check';
import { describe, expect, it } from 'vitest';
import { KvIndex } from './index.ts';
import { NaiveIndex } from './testing/naive-index.ts';
import { keysOf, pairOf } from './testing/nodes.ts';

const mib = 1024 * 1024;

describe('the KV index', () => {
  it('says how much of a prompt each target has, and on which medium', () => {
    const index = new KvIndex({ maxBytes: mib });
    const [a, nodeOfA, b] = [index.addSource(), index.addSource(), index.addSource()];
    index.stored(a, 0, keysOf([0, 1, 2]), 'root');
    index.stored(nodeOfA, 1, keysOf([0, 1, 2, 3, 4]), 'root');
    index.stored(b, 0, keysOf([0, 1]), 'root');
    index.stored(b, 0, keysOf([5]), keysOf([1]));
    const [first, second] = index.match(keysOf([0, 1, 2, 3, 9]), [{ sources: [a, nodeOfA] }, { sources: [b] }]);
    expect(first).toEqual({ blocks: 4, byMedium: Int32Array.of(3, 1, 0, 0, 0, 0, 0, 0) });
    expect(second).toEqual({ blocks: 2, byMedium: Int32Array.of(2, 0, 0, 0, 0, 0, 0, 0) });
  });

  it('counts copies: a block that was stored twice is there until it was removed twice', () => {
    const index = new KvIndex({ maxBytes: mib });
    const a = index.addSource();
    index.stored(a, 0, keysOf([0]), 'root');
    index.stored(a, 0, keysOf([0]), 'root');
    index.removed(a, 0, keysOf([0]));
    expect(index.match(keysOf([0]), [{ sources: [a] }])[0]!.blocks).toBe(1);
    index.removed(a, 0, keysOf([0]));
    expect(index.match(keysOf([0]), [{ sources: [a] }])[0]!.blocks).toBe(0);
    expect(index.stats()).toMatchObject({ blocks: 0, runs: 0, unknownRemovals: 0 });
  });

  it('counts copies that one event removes: an engine tells those that go together as one', () => {
    const index = new KvIndex({ maxBytes: mib });
    const a = index.addSource();
    for (let copy = 0; copy < 3; copy++) index.stored(a, 0, keysOf([0, 1]), 'root');
    index.removed(a, 0, keysOf([0, 1, 0]));
    expect(index.match(keysOf([0, 1]), [{ sources: [a] }])[0]!.blocks).toBe(2);
    index.removed(a, 0, keysOf([0, 1, 1]));
    expect(index.match(keysOf([0, 1]), [{ sources: [a] }])[0]!.blocks).toBe(0);
    expect(index.stats()).toMatchObject({ blocks: 0, runs: 0, unknownRemovals: 0 });
  });

  it('credits nothing to a source from the moment that it is gone, and gives its number away again', () => {
    const index = new KvIndex({ maxBytes: mib });
    const [a, b] = [index.addSource(), index.addSource()];
    for (const source of [a, b]) index.stored(source, 0, keysOf([0, 1, 2, 3]), 'root');
    index.removeSource(a);
    const again = index.addSource();
    expect(again).toBe(a);
    expect(index.match(keysOf([0, 1]), [{ sources: [again] }, { sources: [b] }]).map(({ blocks }) => blocks)).toEqual([
      0, 2,
    ]);
    index.removeSource(b);
    while (index.sweep());
    expect(index.stats()).toMatchObject({ blocks: 0, runs: 0 });
  });

  it('goes on behind a hole that was filled again, and stops at one that was not', () => {
    const index = new KvIndex({ maxBytes: mib });
    const a = index.addSource();
    const chain = [0, 1, 2, 3, 4, 5];
    index.stored(a, 0, keysOf(chain), 'root');
    index.removed(a, 0, keysOf([2]));
    const blocks = (): number => index.match(keysOf(chain), [{ sources: [a] }])[0]!.blocks;
    expect(blocks()).toBe(2);
    index.stored(a, 0, keysOf([2]), keysOf([1]));
    expect(blocks()).toBe(6);
    expect(index.stats().conflicts).toBe(0);
  });

  it('does not believe an order that another publisher contradicts', () => {
    const index = new KvIndex({ maxBytes: mib });
    const [liar, honest] = [index.addSource(), index.addSource()];
    index.stored(liar, 0, keysOf([0, 7, 2]), 'root');
    index.stored(honest, 0, keysOf([0, 1, 2, 3]), 'root');
    const lengths = (): number[] =>
      index.match(keysOf([0, 1, 2, 3]), [{ sources: [liar] }, { sources: [honest] }]).map(({ blocks }) => blocks);
    expect(lengths()).toEqual([1, 4]);
    expect(index.stats().conflicts).toBe(1);
  });

  it('takes hashes without an order, and learns it from a prompt', () => {
    const index = new KvIndex({ maxBytes: mib });
    const node = index.addSource();
    index.stored(node, 1, keysOf([3, 1, 0, 2]), 'unknown');
    const prompt = keysOf([0, 1, 2, 3, 4]);
    expect(index.match(prompt, [{ sources: [node] }])[0]!.blocks).toBe(4);
    expect(index.stats().runs).toBe(0);
    index.learn(prompt);
    expect(index.stats()).toMatchObject({ runs: 1, blocks: 4, conflicts: 0 });
    expect(index.match(prompt, [{ sources: [node] }])[0]!.blocks).toBe(4);
  });

  it('learns no place for a block that nobody holds any more: another block would get it', () => {
    const index = new KvIndex({ maxBytes: mib });
    const [gone, there] = [index.addSource(), index.addSource()];
    index.stored(there, 0, keysOf([0, 1]), 'root');
    index.stored(gone, 0, keysOf([8]), 'unknown');
    index.stored(there, 0, keysOf(Array.from({ length: 1_000 }, (_, i) => 100 + i)), 'unknown');
    index.stored(gone, 0, keysOf([9]), 'unknown');
    index.cleared(gone);
    index.sweep(3); // block 8 goes; block 9 has the same set, and is looked at later
    index.learn(keysOf([0, 1, 9]));
    index.removed(there, 0, keysOf([1]));
    index.stored(there, 0, keysOf([2, 3]), keysOf([0]));
    const blocks = (node: number): number => index.match(keysOf([node]), [{ sources: [there] }])[0]!.blocks;
    expect([2, 3, 9].map(blocks)).toEqual([1, 1, 0]);
  });

  it('says at no cost for sets what is left when sources have gone, and settles them later', () => {
    const index = new KvIndex({ maxBytes: 16 * mib, maxSources: 64 });
    const nodes = Array.from({ length: 1_000 }, (_, i) => i);
    const prompt = keysOf(nodes);
    const sources = Array.from({ length: 64 }, () => index.addSource());
    // Each block has a set of its own.
    for (const source of sources) index.stored(source, 0, keysOf(nodes), 'root');
    for (let bit = 0; bit < 10; bit++)
      for (const node of nodes.filter((one) => (one >> bit) & 1))
        index.stored(sources[bit]!, 1, keysOf([node]), node === 0 ? 'root' : keysOf([node - 1]));
    while (index.sweep());
    expect(index.stats().sets).toBeGreaterThan(nodes.length);
    const targets = sources.map((source) => ({ sources: [source] }));
    const ask = (): readonly number[] => {
      const before = index.setWork;
      const blocks = index.match(prompt, targets).map((match) => match.blocks);
      for (const [i, target] of targets.entries()) {
        expect(index.match(prompt, [target])[0]!.blocks).toBe(blocks[i]);
        expect(index.heldBefore(prompt, nodes.length, 10, target)).toBe(Math.min(blocks[i]!, 10));
      }
      expect(index.setWork).toBe(before);
      return blocks;
    };
    const left = sources.map(() => nodes.length);
    // More than are known one by one, too.
    for (const clears of [1, 30, 300]) {
      for (let i = 0; i < clears; i++) index.cleared(sources[63]!, 2 + (i % 6));
      expect(ask()).toEqual(left);
      index.cleared(sources[20 + (clears % 29)]!);
      left[20 + (clears % 29)] = 0;
      expect(ask()).toEqual(left);
    }
    while (index.sweep());
    expect(ask()).toEqual(left);
    index.checkIntegrity();
  });

  it('is the naive index, whatever comes in which order', () => {
    const op = fc.oneof(
      {
        weight: 6,
        arbitrary: fc.record({
          kind: fc.constant('stored' as const),
          source: fc.nat(3),
          medium: fc.nat(2),
          leaf: fc.nat(39),
          from: fc.nat(8),
          ordered: fc.boolean(),
        }),
      },
      {
        weight: 5,
        arbitrary: fc.record({
          kind: fc.constant('removed' as const),
          source: fc.nat(3),
          medium: fc.nat(2),
          leaf: fc.nat(39),
          from: fc.nat(8),
          reversed: fc.boolean(),
        }),
      },
      {
        weight: 1,
        arbitrary: fc.record({
          kind: fc.constant('cleared' as const),
          source: fc.nat(3),
          medium: fc.option(fc.nat(2), { nil: undefined }),
        }),
      },
      { weight: 2, arbitrary: fc.record({ kind: fc.constant('learn' as const), leaf: fc.nat(39) }) },
      { weight: 1, arbitrary: fc.record({ kind: fc.constant('sweep' as const), records: fc.nat(40) }) },
      { weight: 3, arbitrary: fc.record({ kind: fc.constant('match' as const), leaf: fc.nat(39) }) },
    );
    fc.assert(
      fc.property(
        fc.array(fc.nat(5), { minLength: 40, maxLength: 40 }),
        fc.array(op, { maxLength: 80 }),
        (back, ops) => {
          // Node n follows one of the few before it, so that chains are long and branch.
          const chainOf = (leaf: number): number[] => {
            const chain: number[] = [];
            for (let node = leaf; node >= 0; node -= 1 + back[node]!) chain.unshift(node);
            return chain;
          };
          const index = new KvIndex({ maxBytes: mib, maxSources: 4 });
          const naive = new NaiveIndex();
          for (let i = 0; i < 4; i++) index.addSource();
          const targets = [{ sources: [0] }, { sources: [1] }, { sources: [2, 3] }, { sources: [0, 1, 2, 3] }];
          for (const one of ops) {
            const chain = 'leaf' in one ? chainOf(one.leaf) : [];
            if (one.kind === 'stored') {
              const from = Math.min(one.from, chain.length - 1);
              const parent = from === 0 ? 'root' : keysOf([chain[from - 1]!]);
              index.stored(one.source, one.medium, keysOf(chain.slice(from)), one.ordered ? parent : 'unknown');
              naive.stored(one.source, one.medium, chain.slice(from));
            } else if (one.kind === 'removed') {
              const gone = chain.slice(one.from);
              if (one.reversed) gone.reverse();
              index.removed(one.source, one.medium, keysOf(gone));
              naive.removed(one.source, one.medium, gone);
            } else if (one.kind === 'cleared') {
              index.cleared(one.source, one.medium);
              naive.cleared(one.source, one.medium);
            } else if (one.kind === 'learn') index.learn(keysOf(chain));
            else if (one.kind === 'sweep') index.sweep(one.records);
            else expect(index.match(keysOf(chain), targets)).toEqual(naive.match(chain, targets));
          }
          for (let leaf = 0; leaf < 40; leaf++) {
            const chain = chainOf(leaf);
            expect(index.match(keysOf(chain), targets)).toEqual(naive.match(chain, targets));
          }
          while (index.sweep());
          expect(index.stats()).toMatchObject({ blocks: naive.blocks, conflicts: 0, droppedBlocks: 0 });
          index.checkIntegrity();
        },
      ),
      { numRuns: 150 },
    );
  });

  it('tells many workers what each has, and those that have the same by one answer', () => {
    const index = new KvIndex({ maxBytes: 4 * mib });
    const naive = new NaiveIndex();
    const chain = Array.from({ length: 300 }, (_, i) => i);
    const holds = (source: number, medium: number, length: number): void => {
      index.stored(source, medium, keysOf(chain.slice(0, length)), 'root');
      naive.stored(source, medium, chain.slice(0, length));
    };
    const targets = Array.from({ length: 100 }, () => ({ sources: [index.addSource(), index.addSource()] }));
    for (const [i, { sources }] of targets.entries()) {
      if (i % 4 > 0) holds(sources[0]!, 0, 25 * (i % 4));
      if (i % 3 > 0) holds(sources[1]!, i % 3, 280);
    }
    const answers = index.match(keysOf(chain), targets);
    expect(answers).toEqual(naive.match(chain, targets));
    for (let i = 12; i < 100; i++) expect(answers[i]).toBe(answers[i - 12]);
    // What was answered stays as it was.
    const before = answers.map(({ blocks, byMedium }) => ({ blocks, byMedium: byMedium.slice() }));
    index.match(keysOf(chain.slice(0, 7)), targets);
    expect(answers).toEqual(before);
    expect(index.match(keysOf([]), targets)).toEqual(naive.match([], targets));
  });

  it('has room for publishers as they come, 4,096 at a time, and keeps what it knows of those before', () => {
    const index = new KvIndex({ maxBytes: 64 * mib });
    const naive = new NaiveIndex();
    const chain = Array.from({ length: 40 }, (_, i) => i);
    const sources: number[] = [];
    const check = (): void => {
      const targets = sources.map((source) => ({ sources: [source] }));
      expect(index.match(keysOf(chain), targets)).toEqual(naive.match(chain, targets));
      index.checkIntegrity();
    };
    for (let at = 0; at < 4_096; at++) {
      const source = index.addSource();
      sources.push(source);
      const length = at < 500 || at % 97 === 0 ? (at * 7) % 40 : 0;
      // Twice on one medium is two copies: one is left after one removal.
      for (const medium of [at % 3, at % 3, 4]) {
        index.stored(source, medium, keysOf(chain.slice(0, length)), 'root');
        naive.stored(source, medium, chain.slice(0, length));
      }
      index.removed(source, 4, keysOf(chain.slice(0, length)));
      naive.removed(source, 4, chain.slice(0, length));
      if ([63, 64, 127, 128, 300, 1_500, 4_095].includes(at)) check();
      if (at % 50 === 0) while (index.sweep());
    }
    expect(index.freeSources).toBe(0);
    expect(() => index.addSource()).toThrow('4096 publishers are told apart at most');
    for (const source of sources) {
      index.removed(source, source % 3, keysOf(chain));
      naive.removed(source, source % 3, chain);
    }
    check();
    index.removeSource(77);
    for (let node = 0; node < 40; node++) naive.cleared(77);
    expect(index.addSource()).toBe(77);
    check();
  });

  it('drops nothing for a publisher that comes, however many sets there are; they are wider while it holds what they name', () => {
    const maxBytes = 4 * mib;
    const index = new KvIndex({ maxBytes });
    const sources = Array.from({ length: 256 }, () => index.addSource());
    // Each block is held by two others: if all sets became wider, they would be over the bound.
    const nodes = Array.from({ length: 800 }, (_, i) => i);
    for (const node of nodes)
      for (const source of pairOf(node)) index.stored(sources[source]!, 0, keysOf([node]), 'unknown');
    const sweepAll = (): void => {
      // One pass for what is in use no more since the one before.
      for (let pass = 0; pass < 2; pass++) for (index.cleared(sources[255]!); index.sweep(); );
    };
    sweepAll();
    const before = index.stats();
    const newcomer = index.addSource();
    expect(index.stats()).toEqual(before);
    const target = [{ sources: [newcomer] }];
    index.stored(newcomer, 1, keysOf([3, 4]), 'unknown');
    expect(index.match(keysOf([3]), target)[0]!.blocks).toBe(1);
    expect(index.match(keysOf([5]), target)[0]!.blocks).toBe(0);
    index.removed(newcomer, 1, keysOf([3, 4]));
    sweepAll();
    expect(index.stats()).toMatchObject({ sets: before.sets, blocks: before.blocks, droppedBlocks: 0 });
    index.checkIntegrity();
  });

  it('keeps its bound while publishers come, and has room again when most have gone', () => {
    const maxBytes = 4 * mib;
    const index = new KvIndex({ maxBytes });
    const nodes = Array.from({ length: 4_000 }, (_, i) => i);
    const fill = (source: number): void => {
      for (let at = 0; at < 40; at++) {
        const node = (source * 271 + at * 37) % 4_000;
        index.stored(source, 0, keysOf([nodes[node]!]), 'unknown');
      }
      expect(index.stats().bytes).toBeLessThanOrEqual(maxBytes);
    };
    const sources: number[] = [];
    for (let at = 0; at < 2_000; at++) {
      sources.push(index.addSource());
      expect(index.stats().bytes).toBeLessThanOrEqual(maxBytes);
      fill(sources.at(-1)!);
    }
    index.checkIntegrity();
    for (const source of sources.slice(8)) index.removeSource(source);
    while (index.sweep());
    const before = index.stats();
    expect(before.bytes).toBeLessThan(maxBytes / 4);
    for (const source of sources.slice(0, 8)) fill(source);
    for (const source of sources.slice(0, 8)) {
      const blocks = Array.from({ length: 40 }, (_, at) => nodes[(source * 271 + at * 37) % 4_000]!);
      for (const node of blocks) expect(index.match(keysOf([node]), [{ sources: [source] }])[0]!.blocks).toBe(1);
    }
    expect(index.stats().droppedBlocks).toBe(before.droppedBlocks);
    index.checkIntegrity();
  });

  it('leaves little to be collected after a match, however many hold the prompt', async () => {
    const main = join(import.meta.dirname, 'testing/match-bytes-main.ts');
    const flags = ['--no-concurrent-recompilation', '--import', import.meta.resolve('tsx')];
    const { stdout } = await promisify(execFile)(process.execPath, [...flags, main, '64'], { timeout: 100_000 });
    expect(Number(stdout)).toBeGreaterThan(0);
    expect(Number(stdout)).toBeLessThan(64 * 32);
  }, 120_000); // it loads all of it in a process of its own

  it('drops no block for sets of holders that nobody has any more', () => {
    const index = new KvIndex({ maxBytes: mib });
    const sources = Array.from({ length: 12 }, () => index.addSource());
    const nodes = Array.from({ length: 60 }, (_, i) => i);
    index.stored(sources[0]!, 1, keysOf(nodes), 'unknown');
    for (let step = 1; step < 30_000; step++) {
      const [source, node] = [sources[1 + ((step * 7) % 11)]!, nodes[(step * 13) % 60]!];
      if ((step >> 3) % 2 === 0) index.stored(source, step % 3, keysOf([node]), 'unknown');
      else index.removed(source, step % 3, keysOf([node]));
    }
    expect(index.stats()).toMatchObject({ blocks: 60, droppedBlocks: 0 });
    expect(index.match(keysOf(nodes), [{ sources: [sources[0]!] }])[0]!.blocks).toBe(60);
    index.checkIntegrity();
  });

  it('keeps its bound, forgets what was not used for the longest time, and credits nobody with what he dropped', () => {
    const maxBytes = 512 * 1024;
    fc.assert(
      fc.property(
        fc.array(
          fc.record({
            chain: fc.nat(400),
            length: fc.integer({ min: 1, max: 60 }),
            source: fc.nat(3),
            remove: fc.boolean(),
          }),
          { minLength: 300, maxLength: 600 },
        ),
        (ops) => {
          const index = new KvIndex({ maxBytes, maxSources: 4 });
          const naive = new NaiveIndex();
          for (let i = 0; i < 4; i++) index.addSource();
          for (const { chain, length, source, remove } of ops) {
            const nodes = Array.from({ length }, (_, i) => chain * 1000 + i);
            if (remove) {
              index.removed(source, 0, keysOf(nodes.toReversed()));
              naive.removed(source, 0, nodes);
            } else {
              index.stored(source, 0, keysOf(nodes), 'root');
              naive.stored(source, 0, nodes);
            }
            expect(index.stats().bytes).toBeLessThanOrEqual(maxBytes);
            for (const [i, { blocks }] of index
              .match(keysOf(nodes), [{ sources: [0] }, { sources: [1] }, { sources: [2] }])
              .entries())
              expect(blocks).toBeLessThanOrEqual(naive.match(nodes, [{ sources: [i] }])[0]!.blocks);
          }
          index.checkIntegrity();
        },
      ),
      { numRuns: 20 },
    );
  });
});
