/** Loads that wait for blocks which nobody holds yet: what wakes them, what ends them, and what they leave behind. */
import type { HashKey } from '@kvtier/identity';
import fc from 'fast-check';
import { describe, expect, it } from 'vitest';
import { Load } from './load.ts';
import { Bench, type BlockWriter, chain, type LoadView } from './testing/bench.ts';
import { settled } from './testing/model.ts';

const longMs = 10_000;
const awaited = (bench: Bench): number => bench.store.stats().counters['await.blocks']!;
const viewOf = (engine: BlockWriter, id: bigint): LoadView => engine.loads.get(id)!;
const nothing = { loaded: -1, reason: undefined };

describe('what wakes a load that waits', () => {
  it('a commit of another session of the node: told in that turn, pinned, in chain order', async () => {
    const bench = new Bench(4);
    const [prefill, decode] = [bench.engine(), bench.engine()];
    prefill.put(chain('x', 1));
    const view = viewOf(decode, decode.load(chain('x', 4), longMs, 500));
    await settled();
    expect(view).toMatchObject({ ...nothing, tiers: ['arena'] });
    prefill.put(chain('x', 1, 2), 'x0' as HashKey);
    await settled();
    expect(view).toMatchObject({ ...nothing, tiers: ['arena'] });
    prefill.put(chain('x', 1, 1), 'x0' as HashKey);
    await settled();
    expect(view).toMatchObject({ ...nothing, tiers: ['arena', 'arena', 'arena'] });
    // Nothing can push out what came, before it was told or after.
    const slots = prefill.holdings.reserve(null, chain('y', 4)).flatMap(({ slot }) => slot ?? []);
    expect(slots).toHaveLength(1);
    prefill.holdings.abort(slots);
    prefill.put(chain('x', 1, 3), 'x2' as HashKey);
    await settled();
    expect(view).toMatchObject({ loaded: 4, reason: '' });
    decode.checkLeases();
    expect(awaited(bench)).toBe(0);
    expect(bench.clock.pending).toBe(0);
  });

  it('a block that is pinned before anything in the same turn can evict it', async () => {
    const bench = new Bench(2, {}, { lower: [] });
    const [prefill, decode] = [bench.engine(), bench.engine()];
    const view = viewOf(decode, decode.load(chain('x', 1), longMs, 500));
    prefill.put(chain('x', 1));
    prefill.put(chain('y', 2));
    prefill.put(chain('z', 2));
    await settled();
    expect(view).toMatchObject({ loaded: 1, reason: '' });
    decode.checkLeases();
  });

  it('a lower tier that comes to hold it: fetched once, however many wait', async () => {
    const bench = new Bench(8);
    const engines = [bench.engine(), bench.engine()];
    const views = engines.map((engine) => viewOf(engine, engine.load(chain('x', 3), longMs, 500)));
    await settled();
    expect(bench.disk.jobs).toEqual([]);
    bench.disk.put(engines[0]!.namespace, chain('x', 3));
    await settled();
    expect(bench.disk.jobs.map(({ hashes }) => hashes)).toEqual(chain('x', 3).map((hash) => [hash]));
    await bench.answerAll('read', 'ready');
    for (const view of views) expect(view).toMatchObject({ loaded: 3, reason: '', tiers: ['disk', 'disk', 'disk'] });
    expect(bench.store.counters.get('load.blocks.shared_read')).toBe(3);
    for (const engine of engines) engine.checkLeases();
  });

  it('a slot that an engine is writing now; given up by it, the block goes on being awaited', async () => {
    const bench = new Bench(8);
    const [first, second, decode] = [bench.engine(), bench.engine(), bench.engine()];
    const slots = first.holdings.reserve(null, chain('x', 1)).map(({ slot }) => slot!);
    const view = viewOf(decode, decode.load(chain('x', 1), longMs, 500));
    first.holdings.abort(slots);
    await settled();
    expect(view).toMatchObject(nothing);
    second.put(chain('x', 1));
    await settled();
    expect(view).toMatchObject({ loaded: 1, reason: '' });
  });

  it('what came and could not be fetched is awaited again; another good copy is read at once', async () => {
    const bench = new Bench(8, { awaitRetryMs: 40 }, { lower: ['peer'] });
    const engine = bench.engine();
    const view = viewOf(engine, engine.load(chain('x', 1), longMs, 500));
    const come = async (): Promise<void> => {
      bench.disk.put(engine.namespace, chain('x', 1));
      await settled();
    };
    await come();
    bench.answer('read', 'corrupt');
    await settled();
    expect(view).toMatchObject(nothing);
    expect(awaited(bench)).toBe(1);
    await come();
    bench.disk.remove(engine.namespace, chain('x', 1)); // the peer died
    bench.answer('read', 'failed');
    await settled();
    expect(view).toMatchObject(nothing);
    await come();
    bench.answer('read', 'failed'); // it is there still: tried again, but not at once
    await settled();
    expect(bench.disk.jobs).toEqual([]);
    bench.clock.advance(40);
    await bench.answerAll('read', 'ready');
    expect(view).toMatchObject({ loaded: 1, reason: '' });
    expect(bench.clock.pending).toBe(0);
  });

  it.each([0, 500])('a writer who was faster than a read that failed; awaited for %i ms', async (awaitMs) => {
    for (const status of ['failed', 'missing', 'corrupt'] as const) {
      const bench = new Bench(8);
      const [writer, reader] = [bench.engine(), bench.engine()];
      const { slot } = writer.holdings.reserve(null, chain('x', 1))[0]!;
      bench.disk.put(reader.namespace, chain('x', 1));
      const view = viewOf(reader, reader.load(chain('x', 1), longMs, awaitMs));
      await settled();
      bench.arena.content.set(slot!, writer.namespace.key + chain('x', 1)[0]!);
      writer.holdings.commit([slot!], [0n]);
      bench.answer('read', status);
      await settled();
      expect(view).toMatchObject({ loaded: 1, reason: '', tiers: ['arena'] });
      expect(awaited(bench)).toBe(0);
      reader.checkLeases();
    }
  });

  it('a tier that is left alone is tried again when it may be asked', async () => {
    const limits = { breakerFailures: 1, breakerOpenMs: 100, awaitRetryMs: 30 };
    const bench = new Bench(8, limits, { lower: ['peer'] });
    const engine = bench.engine();
    bench.disk.put(engine.namespace, chain('y', 1));
    engine.load(chain('y', 1));
    await bench.answerAll('read', 'failed');
    const view = viewOf(engine, engine.load(chain('x', 1), longMs, 500));
    bench.disk.put(engine.namespace, chain('x', 1));
    await settled();
    expect(bench.disk.jobs).toEqual([]);
    for (let ms = 0; ms < 150; ms += 10) {
      bench.clock.advance(10);
      await settled();
    }
    await bench.answerAll('read', 'ready');
    expect(view).toMatchObject({ loaded: 1, reason: '' });
  });

  it('a block whose time is over is not in the way of the one that is awaited', async () => {
    const bench = new Bench(8, {}, { lower: [] });
    const [old, prefill, decode] = [bench.engine('n', { ttlS: 1 }), bench.engine(), bench.engine()];
    old.put(chain('x', 1));
    bench.clock.wallAheadMs += 2_000;
    const view = viewOf(decode, decode.load(chain('x', 1), longMs, 500));
    await settled();
    expect(view).toMatchObject(nothing);
    prefill.put(chain('x', 1));
    await settled();
    expect(view).toMatchObject({ loaded: 1, reason: '' });
  });
});

describe('what ends a load that waits', () => {
  it('its window: so long after the beginning, or after the last block that was told', async () => {
    const bench = new Bench(8, {}, { lower: [] });
    const [prefill, decode] = [bench.engine(), bench.engine()];
    const view = viewOf(decode, decode.load(chain('x', 4), longMs, 100));
    await settled();
    bench.clock.advance(60);
    prefill.put(chain('x', 1));
    await settled();
    bench.clock.advance(99);
    await settled();
    expect(view).toMatchObject({ ...nothing, tiers: ['arena'] });
    prefill.put(chain('x', 1, 2), 'x0' as HashKey); // not the next one
    await settled();
    bench.clock.advance(1);
    expect(view).toMatchObject({ loaded: 1, reason: 'awaited' });
    expect(awaited(bench)).toBe(0);
    expect(bench.clock.pending).toBe(0);
    expect(bench.store.counters.get('load.ended.awaited')).toBe(1);
    // Only what was told is still leased.
    const slots = prefill.holdings.reserve(null, chain('y', 8)).flatMap(({ slot }) => slot ?? []);
    expect(slots).toHaveLength(7);
  });

  it('the window does not run while the next block is on its way; it is over if that fails too late', async () => {
    const bench = new Bench(8, {}, { lower: ['peer'] });
    const engine = bench.engine();
    bench.disk.put(engine.namespace, chain('x', 1));
    const view = viewOf(engine, engine.load(chain('x', 2), longMs, 100));
    await settled();
    bench.clock.advance(500);
    await settled();
    expect(view).toMatchObject(nothing);
    bench.answer('read', 'corrupt');
    await settled();
    expect(view).toMatchObject({ loaded: 0, reason: 'awaited' });
  });

  it('its deadline, whatever comes; and nothing is awaited without time', async () => {
    const bench = new Bench(8);
    const [prefill, decode] = [bench.engine(), bench.engine()];
    const view = viewOf(decode, decode.load(chain('x', 3), 100, 90));
    await settled();
    bench.clock.advance(60);
    prefill.put(chain('x', 1));
    await settled();
    bench.clock.advance(40);
    expect(view).toMatchObject({ loaded: 1, reason: 'deadline' });
    expect(bench.clock.pending).toBe(0);
    const none = viewOf(decode, decode.load(chain('x', 3), 0, 90));
    await settled();
    expect(none).toMatchObject({ loaded: 1, reason: 'missing' });
  });

  it('EndLoad: with what is ready, once; its lease stays until release', async () => {
    const bench = new Bench(2, {}, { lower: [] });
    const [prefill, decode] = [bench.engine(), bench.engine()];
    const id = decode.load(chain('x', 2), longMs, 100);
    const view = viewOf(decode, id);
    await settled();
    prefill.put(chain('x', 1));
    expect(decode.holdings.endLoad(id)).toBe(true); // in the turn of the commit, before it could be told
    expect(view).toMatchObject({ loaded: 1, reason: 'cancelled', tiers: ['arena'] });
    expect(decode.holdings.endLoad(id)).toBe(false);
    expect(decode.holdings.endLoad(99n)).toBe(false);
    await settled();
    expect(prefill.put(chain('y', 2))).toEqual(['reserved', 'refused']);
    decode.release(id);
    expect(decode.holdings.endLoad(id)).toBe(false);
    expect(prefill.put(chain('z', 2))).toEqual(['reserved', 'reserved']);
    expect(bench.clock.pending).toBe(0);
  });

  it('its session, which leaves nothing behind', async () => {
    const bench = new Bench(8, { awaitRetryMs: 40 });
    const [a, b] = [bench.engine(), bench.engine()];
    const gone = viewOf(a, a.load(chain('x', 3), longMs, 100));
    const view = viewOf(b, b.load(chain('x', 2), longMs, 100));
    await settled();
    expect(awaited(bench)).toBe(5);
    a.holdings.end();
    expect(gone).toMatchObject({ loaded: 0, reason: 'cancelled' });
    expect(awaited(bench)).toBe(2);
    bench.store.checkIntegrity();
    b.put(chain('x', 2));
    await settled();
    expect(view).toMatchObject({ loaded: 2, reason: '' });
    b.holdings.end();
    expect(bench.store.stats().counters['namespaces.open']).toBe(0);
  });

  it('a full arena, wherever in the chain it shows first', async () => {
    const bench = new Bench(1, {}, { lower: ['peer'] });
    const engine = bench.engine();
    engine.holdings.reserve(null, chain('y', 1));
    const view = viewOf(engine, engine.load(chain('x', 4), longMs, 100));
    for (const index of [2, 3, 0]) bench.disk.put(engine.namespace, chain('x', 1, index));
    await settled();
    expect(view).toMatchObject({ loaded: 0, reason: 'capacity' });
    expect(awaited(bench)).toBe(0);
  });

  it('the bound of one load, which begins in one turn', async () => {
    const bench = new Bench(8, { maxAwaitedOfLoad: 3 }, { lower: [] });
    const engine = bench.engine();
    const view = viewOf(engine, engine.load(chain('x', 5), longMs, 100));
    expect(awaited(bench)).toBe(3);
    engine.put(chain('x', 5));
    await settled();
    expect(view).toMatchObject({ loaded: 3, reason: 'capacity' });
    expect(bench.store.counters.get('await.refused.load_limit')).toBe(1);
  });

  it('its bounds: of a session, of the node, and of what a session may lease', async () => {
    const bench = new Bench(16, { maxAwaitedBlocks: 3, maxAwaitedInAll: 5, maxLeasedBytes: 4 });
    const [a, b, c] = [bench.engine(), bench.engine(), bench.engine()];
    const load = (engine: BlockWriter, name: string, count: number): LoadView =>
      viewOf(engine, engine.load(chain(name, count), longMs, 100));
    const views = [load(a, 'x', 4), load(b, 'y', 3), load(c, 'z', 1)];
    expect(awaited(bench)).toBe(5);
    expect(bench.store.counters.get('await.refused.session_limit')).toBe(1);
    expect(bench.store.counters.get('await.refused.node_limit')).toBe(2);
    await settled();
    expect(views[2]).toMatchObject({ loaded: 0, reason: 'capacity' });
    c.put([...chain('x', 3), ...chain('y', 2)]);
    await settled();
    expect(views[0]).toMatchObject({ loaded: 3, reason: 'capacity' });
    expect(views[1]).toMatchObject({ loaded: 2, reason: 'capacity' });
    const beyond = load(c, 'x', 6);
    await settled();
    expect(beyond).toMatchObject({ reason: undefined, tiers: ['arena', 'arena', 'arena'] });
    c.put(chain('x', 3, 3), 'x2' as HashKey);
    await settled();
    expect(beyond).toMatchObject({ loaded: 4, reason: 'capacity' });
  });
});

/** A load, as the oracle looks at it: what is in, from the first block on; when the last was told; how it ended. */
interface Expected {
  readonly engine: BlockWriter;
  readonly view: LoadView;
  readonly awaitMs: number;
  readonly dueMs: number;
  readonly arrived: boolean[];
  told: number;
  toldMs: number;
  reason: string | undefined;
}

type Step =
  | { readonly kind: 'commit' | 'remove'; readonly name: string; readonly at: number }
  | { readonly kind: 'announce' | 'withdraw'; readonly name: string; readonly at: number }
  | { readonly kind: 'answer'; readonly as: 'ready' | 'corrupt' | 'failed' }
  | {
      readonly kind: 'load';
      readonly name: string;
      readonly who: number;
      readonly awaitMs: number;
      readonly dueMs: number;
    }
  | { readonly kind: 'end' | 'release'; readonly which: number }
  | { readonly kind: 'die'; readonly who: number }
  | { readonly kind: 'wait'; readonly ms: number };

const name = fc.constantFrom('a', 'b');
const at = fc.nat(3);
const who = fc.nat(2);
const steps: fc.Arbitrary<Step> = fc.oneof(
  { weight: 5, arbitrary: fc.record({ kind: fc.constant('commit' as const), name, at }) },
  { weight: 5, arbitrary: fc.record({ kind: fc.constant('announce' as const), name, at }) },
  { weight: 1, arbitrary: fc.record({ kind: fc.constantFrom('remove' as const, 'withdraw' as const), name, at }) },
  {
    weight: 8,
    arbitrary: fc.record({
      kind: fc.constant('answer' as const),
      as: fc.constantFrom('ready' as const, 'ready' as const, 'ready' as const, 'corrupt' as const, 'failed' as const),
    }),
  },
  {
    weight: 4,
    arbitrary: fc.record({
      ...{ kind: fc.constant('load' as const), name, who },
      awaitMs: fc.constantFrom(0, 5, 20, 60),
      dueMs: fc.constantFrom(0, 30, 100),
    }),
  },
  { weight: 1, arbitrary: fc.record({ kind: fc.constantFrom('end' as const, 'release' as const), which: fc.nat(5) }) },
  { weight: 1, arbitrary: fc.record({ kind: fc.constant('die' as const), who }) },
  { weight: 6, arbitrary: fc.record({ kind: fc.constant('wait' as const), ms: fc.integer({ min: 1, max: 25 }) }) },
);

const blocksOfChain = 4;
const retryMs = 7;

/** The truth, looked up block by block after every millisecond and every step; nothing here knows who waits for what. */
class Oracle {
  readonly bench = new Bench(
    64,
    { awaitRetryMs: retryMs, breakerFailures: 1e9 },
    { lower: ['peer'], plans: { peer: { write: 'none' } } },
  );
  readonly writer = this.bench.engine();
  readonly engines = [0, 1, 2].map(() => this.bench.engine());
  readonly loads: Expected[] = [];
  /** When a read of this block failed last, and left it listed. */
  readonly failedMs = new Map<HashKey, number>();
  readonly seen: Record<string, number> = {};
  nowMs = 0;

  async step(step: Step): Promise<void> {
    const { bench, writer } = this;
    const hashOf = ({ name: of, at: index }: { name: string; at: number }): HashKey => chain(of, 1, index)[0]!;
    if (step.kind === 'commit') this.#commit(hashOf(step));
    else if (step.kind === 'remove') {
      const hash = hashOf(step);
      const views = this.engines.flatMap(({ loads }) => [...loads.values()]);
      if (views.every(({ hashes }) => !hashes.includes(hash))) bench.arena.remove(writer.namespace, [hash]);
    } else if (step.kind === 'announce') bench.disk.put(writer.namespace, [hashOf(step)]);
    else if (step.kind === 'withdraw') bench.disk.remove(writer.namespace, [hashOf(step)]);
    else if (step.kind === 'answer') {
      const job = bench.disk.jobs[0];
      if (job !== undefined && step.as === 'failed') this.failedMs.set(job.hashes[0]!, this.nowMs);
      bench.answer('read', step.as);
    } else if (step.kind === 'load') this.#load(step);
    else if (step.kind === 'end') this.#end(step.which);
    else if (step.kind === 'release') this.#release(step.which);
    else if (step.kind === 'die') this.#die(step.who);
    else if (step.kind === 'wait')
      for (let ms = 0; ms < step.ms; ms++) {
        this.nowMs++;
        bench.clock.advance(1);
        await settled();
        this.check();
      }
    await settled();
    this.check();
  }

  #commit(hash: HashKey): void {
    this.writer.put([hash]);
  }

  #load({ name: of, who: number, awaitMs, dueMs }: Extract<Step, { kind: 'load' }>): void {
    const engine = this.engines[number]!;
    const view = viewOf(engine, engine.load(chain(of, blocksOfChain), dueMs, awaitMs));
    if (awaitMs === 0 || dueMs === 0) return; // those that do not wait are in the way of the others; store.test.ts looks at them
    const arrived = new Array<boolean>(blocksOfChain).fill(false);
    const due = this.nowMs + dueMs;
    this.loads.push({ engine, view, awaitMs, dueMs: due, arrived, told: 0, toldMs: this.nowMs, reason: undefined });
  }

  #idOf(load: Expected): bigint {
    return [...load.engine.loads].find(([, view]) => view === load.view)![0];
  }

  /** What is in by now is told with its end. */
  #end(which: number): void {
    const load = this.loads[which];
    if (load === undefined) return;
    expect(load.engine.holdings.endLoad(this.#idOf(load))).toBe(load.reason === undefined);
    load.reason ??= 'cancelled';
  }

  #release(which: number): void {
    const [load] = this.loads.splice(which, 1);
    load?.engine.release(this.#idOf(load));
  }

  #die(number: number): void {
    this.engines[number]!.holdings.end();
    for (const load of this.loads.filter(({ engine }) => engine === this.engines[number])) {
      this.loads.splice(this.loads.indexOf(load), 1);
    }
    this.engines[number] = this.bench.engine();
  }

  check(): void {
    const { bench, writer } = this;
    const { namespace } = writer;
    bench.store.checkIntegrity();
    const { fetching } = writer.holdings.state;
    const isListed = (hash: HashKey): boolean => bench.disk.lookup(namespace, [hash]) === 1;
    /** For this load; one that another load has begun is none of its own. */
    const isFetched = (hash: HashKey, { hashes }: LoadView): boolean =>
      fetching.get(hash)?.waiters.some(({ client }) => client instanceof Load && client.hashes === hashes) ?? false;
    let waiting = 0;
    for (const load of this.loads) {
      const { view, awaitMs } = load;
      if (load.reason === undefined) {
        for (const [index, hash] of view.hashes.entries()) {
          if (bench.arena.get(namespace, hash) !== undefined) load.arrived[index] = true;
        }
        while (load.arrived[load.told] === true) {
          load.told++;
          load.toldMs = this.nowMs;
        }
        const next = view.hashes[load.told];
        const isComing = next !== undefined && isFetched(next, view);
        if (next === undefined) load.reason = '';
        else if (this.nowMs >= load.dueMs) load.reason = 'deadline';
        else if (!isComing && this.nowMs - load.toldMs >= awaitMs) load.reason = 'awaited';
        this.seen[load.reason ?? 'open'] = (this.seen[load.reason ?? 'open'] ?? 0) + 1;
      }
      expect(view.reason, `at ${this.nowMs} ms`).toBe(load.reason);
      expect(view.blocks.length).toBe(load.told);
      if (load.reason !== undefined) continue;
      for (const [index, hash] of view.hashes.entries()) {
        if (load.arrived[index]) continue;
        if (!isFetched(hash, view)) waiting++;
        const isTried = this.nowMs - (this.failedMs.get(hash) ?? -retryMs) < retryMs;
        if (isListed(hash) && !isTried) expect(fetching.has(hash), `${hash} is held, and nobody fetches it`).toBe(true);
      }
    }
    expect(awaited(bench)).toBe(waiting);
    for (const engine of this.engines) engine.checkLeases();
  }
}

it('a random life: every load has what was there, is told of it at once, and ends when a naive look at everything says so', async () => {
  const seen: Record<string, number> = {};
  await fc.assert(
    fc.asyncProperty(fc.array(steps, { minLength: 20, maxLength: 80, size: 'max' }), async (life) => {
      const oracle = new Oracle();
      for (const step of life) await oracle.step(step);
      for (const engine of [...oracle.engines, oracle.writer]) engine.holdings.end();
      expect(awaited(oracle.bench)).toBe(0);
      await oracle.bench.answerAll('read', 'ready');
      expect(oracle.bench.clock.pending).toBe(0);
      expect(oracle.bench.store.stats().counters['arena.pinned_blocks']).toBe(0);
      for (const [reason, count] of Object.entries(oracle.seen)) seen[reason] = (seen[reason] ?? 0) + count;
    }),
    { numRuns: 75, seed: Number(process.env.KVTIER_SEED ?? 1) },
  );
  if (process.env.KVTIER_SEED !== undefined) return;
  expect(Object.keys(seen)).toEqual(expect.arrayContaining(['', 'deadline', 'awaited', 'open']));
});
