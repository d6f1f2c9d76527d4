import { describe, expect, it } from 'vitest';
import { LateBinding, lateBindingDefaults, type RoutedRequest, type WorkerState } from './index.ts';
import { requestOf as request, stateOf as state } from './testing/late-rig.ts';

const chance = (): number => 0.5;

describe('late binding', () => {
  it('gives a request to a worker at once when nobody waits', () => {
    const late = new LateBinding<string>();
    late.add('a', request(100), 0, 100);
    expect(late.take(() => [state(50), state(0)], 0, chance)).toMatchObject({ item: 'a', worker: 1 });
    expect(late.size).toBe(0);
  });

  it('holds requests while all workers have enough to do', () => {
    const late = new LateBinding<string>();
    late.add('a', request(100), 0, 100);
    expect(late.take(() => [state(201), state(300)], 0, chance)).toBe(undefined);
    expect(late.take(() => [state(200), state(300)], 10, chance)).toMatchObject({ item: 'a', worker: 0 });
  });

  it.each([
    ['what a step computes, and a fortieth', 160, 164],
    ['what keeps it busy between two words of it, where steps are shorter than that', 10, 100],
    ['no more than its limit, where steps are longer', 1_000, 200],
  ])('a worker has enough to do with %s', (_what, maxStepTokens, enough) => {
    const late = new LateBinding<string>();
    late.add('a', request(100), 0, 100);
    const at = (tokens: number) => (): WorkerState[] => [{ ...state(tokens), maxStepTokens }];
    expect(late.take(at(enough + 1), 0, chance)).toBe(undefined);
    expect(late.take(at(enough), 1, chance)).toMatchObject({ item: 'a', worker: 0 });
  });

  it('lets short ones pass long ones, and long ones wait no longer than their length justifies', () => {
    const late = new LateBinding<string>();
    late.add('long', request(10_000), 0, 10_000);
    late.add('short', request(100), 1_000, 100);
    const open = (): WorkerState[] => [state(0)];
    expect(late.take(open, 1_100, chance)!.item).toBe('short'); // 1 against 0.11
    late.add('later', request(100), 100_000, 100);
    expect(late.take(open, 100_100, chance)!.item).toBe('long'); // 10 against 1
  });

  it('lets them pass by less where nothing is held of prompts, and by more where much is', () => {
    // Ten times as long: it goes first when it has waited 2.5 times as long, or 20 times.
    const goesAfter = (held: number): number[] =>
      [2, 5, 15, 25].filter((times) => {
        const late = new LateBinding<string>();
        for (let i = 0; i < 16; i++) {
          late.add(
            'before',
            { ...request(160), keys: Int32Array.from({ length: 10 }, (_, at) => 10 * i + at) },
            0,
            160,
          );
          late.take(() => [state(0, held)], 0, chance);
        }
        late.add('long', request(1_000), 0, 1_000);
        for (let i = 0; i < 10; i++) late.add('short', request(100), (times - 1) * 1_000, 100);
        return late.take(() => [state(0)], times * 1_000, chance)!.item === 'long';
      });
    expect([0, 10].map(goesAfter)).toEqual([[5, 15, 25], [25]]);
  });

  it('takes the worker whose pool is emptier, of two that serve it about as soon', () => {
    const worker = (usedBlocks: number, tokensAhead: number): WorkerState => ({
      ...{ ...state(tokensAhead), running: 1 },
      usedBlocks,
    });
    const goesTo = (...workers: WorkerState[]): number => {
      const late = new LateBinding<string>();
      late.add('a', request(100), 0, 100);
      return late.take(() => workers, 0, chance)!.worker;
    };
    // It computes 100 ms: half a pool counts as 100 ms.
    expect(goesTo(worker(5_000, 0), worker(0, 60))).toBe(1);
    expect(goesTo(worker(5_000, 0), worker(0, 140))).toBe(0);
    expect(goesTo(worker(2_000, 0), worker(0, 60))).toBe(0);
  });

  it('saves work where workers have requests that wait, as if these waited here', () => {
    // Worker 0 holds 64 of the 100 tokens and has 100 ms to do: 136 ms against 110.
    const asked = (waiting: number): number => {
      const late = new LateBinding<string>();
      late.add('a', request(100), 0, 36);
      return late.take(() => [state(100, 4, waiting), state(10, 0, waiting)], 0, chance)!.worker;
    };
    expect([0, 4].map(asked)).toEqual([1, 0]);
  });

  it('what a request that waits brings in keeps nobody from computing meanwhile', () => {
    // The first one brings 150 ms of blocks in, and has no room yet; the worker computes for 100 ms more.
    const late = new LateBinding<string>();
    const long = request(160_001);
    late.add('long', long, 0, 1);
    late.add('short', request(20), 1, 20);
    const byMedium = Int32Array.of(0, 10_000, 0, 0, 0, 0, 0, 0);
    const worker = (asked: RoutedRequest): WorkerState => ({
      ...state(100, 0, 1),
      loadBlocksPerS: [0, 10_000 / 0.15],
      ...(asked === long && { match: { blocks: 10_000, byMedium } }),
    });
    expect(late.take((asked) => [worker(asked)], 10, chance)).toMatchObject({ item: 'short', worker: 0 });
  });

  it('keeps what a request claims of a busy worker from those behind it', () => {
    // Both prompts are held by worker 0, which has 150 ms to do. The first one waits for it: 150 + 4 ms against 68; no: it is
    // computed sooner on the idle one. The second finds that one busy.
    const late = new LateBinding<string>();
    late.add('a', request(68), 0, 4);
    late.add('b', request(68), 1, 4);
    const ahead = [150, 0];
    const states = (): WorkerState[] => [state(ahead[0]!, 4), state(ahead[1]!)];
    expect(late.take(states, 10, chance)).toMatchObject({ item: 'a', worker: 1 });
    ahead[1] = 68;
    expect(late.take(states, 10, chance)).toMatchObject({ item: 'b', worker: 1 });
    ahead[1] = 400;
    late.add('c', request(68), 10, 4);
    expect(late.take(states, 11, chance)).toMatchObject({ item: 'c', worker: 0 });
  });

  it('never leaves a worker idle while somebody waits', () => {
    const late = new LateBinding<number>();
    for (let i = 0; i < 100; i++) late.add(i, request(680), i, 4);
    // All of them are held by worker 0 alone.
    const taken: number[] = [];
    const ahead = [250, 0];
    for (let one = late.take(() => [state(ahead[0]!, 42), state(ahead[1]!)], 100, chance); one; ) {
      taken.push(one.worker);
      ahead[one.worker]! += one.worker === 0 ? 8 : 680;
      one = late.take(() => [state(ahead[0]!, 42), state(ahead[1]!)], 100, chance);
    }
    expect(taken).toContain(1);
  });

  /** Worker 0 holds the document, the others can bring it in in 100 ms. To ask about it takes 4 ms of computing. */
  function crowd(requests: number, ahead: number[], everyMs: number): number[] {
    const late = new LateBinding<number>();
    const held = [42, 0, 0];
    const states = (): WorkerState[] =>
      ahead.map((tokens, i) => ({
        ...state(tokens, held[i]),
        loadBlocksPerS: [0, 0, 0, 420],
        remoteBlocks: 42 - held[i]!,
      }));
    const taken: number[] = [];
    for (let i = 0; i < requests; i++) {
      late.add(i, { ...request(676), keys: Int32Array.from({ length: 84 }, (_, at) => at) }, i * everyMs, 4);
      const worker = late.take(states, i * everyMs, chance)!.worker;
      taken.push(worker);
      held[worker] = 42;
      ahead[worker]! += 30;
    }
    return taken;
  }

  it('a document that many wait for goes to a worker that has nothing to do, once they have waited as long as that takes', () => {
    // They wait 0, 30, 60 and 90 ms: with the fourth one that is more than 100.
    expect(crowd(4, [0, 0, 0], 1)).toEqual([0, 0, 0, 1]);
    // The third worker has work of its own: nobody pays for it.
    expect(crowd(3, [0, 1, 1], 1)).toEqual([0, 0, 0]);
  });

  it('also where its holder has no prompt to compute, but long steps: those who ask wait for them', () => {
    const late = new LateBinding<number>();
    // A step of 10 ms, and 1 ms of it for each of 20 that run: 35 ms longer until a first token than where nobody runs.
    const holder = { ...state(0, 42), running: 20, stepPerRequestS: 0.001 };
    const other = { ...state(0), loadBlocksPerS: [0, 0, 0, 420], remoteBlocks: 42 };
    const keys = Int32Array.from({ length: 84 }, (_, at) => at);
    const taken = Array.from({ length: 3 }, (_, i) => {
      late.add(i, { ...request(676), keys }, i, 4);
      return late.take(() => [holder, other], i, chance)!.worker;
    });
    // The third one makes it 105 ms, and to bring the document to the other worker takes 100.
    expect(taken).toEqual([0, 0, 1]);
  });

  it('waits for room at its holder no longer than it costs all to serve it where there is some', () => {
    const goesAfterMs = (waiting: number): number => {
      const late = new LateBinding<string>();
      late.add('a', { ...request(676), keys: Int32Array.from({ length: 84 }, (_, at) => at) }, 0, 4);
      // One request runs on, and holds all of the blocks; many were freed lately.
      const holder = { ...state(0, 42, waiting), running: 1, usedBlocks: 10_000, freedBlocksPerS: 1_000 };
      for (let ms = 0; ms < 10_000; ms += 10)
        if (late.take(() => [holder, state(0)], ms, chance)?.worker === 1) return ms;
      return Number.POSITIVE_INFINITY;
    };
    // To compute the document takes 672 ms, and so much again for each four that wait, itself among them.
    expect([0, 4].map(goesAfterMs)).toEqual([850, 1_520]);
  });

  it('a worker that loads is open to who brings nothing in, and to no more loads than it is told of', () => {
    const late = new LateBinding<string>();
    const keys = Int32Array.from({ length: 84 }, (_, at) => at);
    const loads = { ...state(0), loadAheadS: 0.3, loadBlocksPerS: [0, 420], running: 1 };
    const host = { blocks: 42, byMedium: Int32Array.of(0, 42, 0, 0, 0, 0, 0, 0) };
    const statesFor = (one: RoutedRequest): WorkerState[] => [one.keys === keys ? { ...loads, match: host } : loads];
    late.add('brings', { ...request(676), keys }, 0, 104);
    expect(late.take(statesFor, 1, chance)).toBe(undefined);
    late.add('computes', request(100), 1, 100);
    expect(late.take(statesFor, 2, chance)).toMatchObject({ item: 'computes', worker: 0 });
    expect(late.take(() => [{ ...loads, loadAheadS: 0.1, match: host }], 3, chance)).toMatchObject({ item: 'brings' });
  });

  it('what others use of its prompt needs no room, and what is only cached does', () => {
    const late = new LateBinding<string>();
    const asks = { ...request(6_010 * 16), keys: Int32Array.from({ length: 12_020 }, (_, at) => at) };
    late.add('first', { ...asks, keys: asks.keys.subarray(0, 12_000) }, 0, 160);
    expect(late.take(() => [state(0)], 0, chance)).toMatchObject({ item: 'first' });
    late.add('second', asks, 1, 160, 6_000);
    expect(late.leastBlocks).toBe(11);
    const take = (nowMs: number, usedBlocks: number) =>
      late.take(() => [{ ...state(0, 6_000), running: 1, usedBlocks, freedBlocksPerS: 1 }], nowMs, chance);
    // It needs 11 blocks beside the first one's 6,000.
    expect(take(2, 9_990)).toBe(undefined);
    expect(take(3, 9_989)).toMatchObject({ item: 'second', worker: 0 });
    late.ended('first');
    late.ended('second');
    late.add('third', asks, 4, 160, 6_000);
    expect(take(5, 9_989)).toBe(undefined);
    expect(take(6, 3_989)).toMatchObject({ item: 'third' });
  });

  it('who asks about what is being computed needs only the rest of it, and goes before who needs more', () => {
    const late = new LateBinding<string>();
    const keys = Int32Array.from({ length: 20 }, (_, at) => at);
    const ahead = [0];
    const take = (nowMs: number) => late.take(() => [state(ahead[0]!)], nowMs, chance)?.item;
    late.add('document', { ...request(170), keys }, 0, 170);
    expect(take(0)).toBe('document');
    ahead[0] = 170;
    late.add('other', request(400), 1, 400);
    late.add('question', { ...request(170), keys }, 3, 170);
    ahead[0] = 0;
    expect(take(300)).toBe('question');
  });

  it('a request pays once, however long it waits', () => {
    const late = new LateBinding<string>();
    const keys = Int32Array.from({ length: 84 }, (_, at) => at);
    // Worker 0 has 250 ms to do; to bring the document to worker 1 takes 700 ms.
    const states = (): WorkerState[] => [
      state(250, 42),
      { ...state(0), loadBlocksPerS: [0, 0, 0, 60], remoteBlocks: 42 },
    ];
    late.add('a', { ...request(676), keys }, 0, 4);
    for (let ms = 0; ms < 1000; ms += 10) expect(late.take(states, ms, chance)).toBe(undefined);
  });

  it('knows of each request what was held of it, though the states are the same objects for all', () => {
    const late = new LateBinding<string>();
    const shared = [state(0), state(0)] as { -readonly [K in keyof WorkerState]: WorkerState[K] }[];
    const ahead = [500, 500];
    let asked = 0;
    const statesFor = ({ tokens }: RoutedRequest): WorkerState[] => {
      asked++;
      // The prompt of 680 tokens is held by worker 1, that of 690 by worker 0.
      const holder = tokens === 680 ? 1 : 0;
      shared.forEach((one, i) => {
        one.tokensAhead = ahead[i]!;
        one.match = i === holder ? state(0, 42).match : state(0).match;
      });
      return shared;
    };
    late.add('a', request(680), 0, 8);
    late.add('b', request(690), 0, 8);
    expect(late.take(statesFor, 10, chance)).toBe(undefined);
    ahead[1] = 0;
    expect(late.take(statesFor, 20, chance)).toMatchObject({ item: 'a', worker: 1 });
    ahead[0] = 0;
    ahead[1] = 500;
    expect(late.take(statesFor, 30, chance)).toMatchObject({ item: 'b', worker: 0 });
    expect(asked).toBeLessThan(8);
  });

  it('gives a request only to workers that it may have', () => {
    const late = new LateBinding<string>();
    late.add('a', request(100), 0, 100);
    late.add('b', request(100), 1, 100);
    const statesFor = (one: RoutedRequest): (WorkerState | undefined)[] =>
      one === onlyFirst ? [state(500), undefined] : [undefined, state(0)];
    const onlyFirst = request(100);
    late.add('c', onlyFirst, -1000, 100);
    expect(late.take(statesFor, 10, chance)).toMatchObject({ item: 'a', worker: 1 });
    late.remove('b');
    expect(late.take(statesFor, 20, chance)).toBe(undefined);
  });

  it('waits for a place among those that run, and does not save work while places are short', () => {
    const full = { ...state(0), running: 4, maxRunning: 4, usedBlocks: 40, freedBlocksPerS: 100 };
    const late = new LateBinding<string>();
    late.add('a', request(100), 0, 100);
    expect(late.take(() => [full, full], 10, chance)).toBe(undefined);
    expect(late.take(() => [full, { ...full, running: 3 }], 20, chance)).toMatchObject({ item: 'a', worker: 1 });
  });

  it('begins the longest answer before all others, where it would run on alone after them', () => {
    const late = new LateBinding<string>();
    const open = (): WorkerState[] => [state(0), state(500)];
    const answer = (maxTokens: number): RoutedRequest => ({ ...request(100), maxTokens });
    late.add('first', answer(100), 0, 100);
    expect(late.take(open, 0, chance)!.item).toBe('first');
    // A token takes 10 ms: 20 s, and 1 s.
    late.add('short', answer(100), 1_000, 100);
    late.add('long', answer(2_000), 1_100, 100);
    late.add('as long', answer(2_000), 1_200, 100);
    // As long as what has begun is none that would run on alone.
    expect(['long', 'short', 'as long']).toEqual([1, 2, 3].map((i) => late.take(open, 1_200 + i, chance)!.item));
  });

  it('does not hurry a long answer while the queue takes longer', () => {
    const late = new LateBinding<string>();
    late.add('first', request(100), 0, 100);
    expect(late.take(() => [state(0)], 0, chance)!.item).toBe('first');
    for (let i = 0; i < 30; i++) late.add(`${i}`, request(1_000), i, 1_000);
    late.add('long', { ...request(1_000), maxTokens: 2_000 }, 30, 1_000);
    expect(late.take(() => [state(0)], 1_000, chance)!.item).toBe('0');
  });

  it('begins the longest prompt first once nobody comes any more, where it would be computed alone after the others', () => {
    const late = new LateBinding<string>();
    const open = (): WorkerState[] => [state(0), state(500)];
    for (let i = 0; i < 16; i++) {
      late.add('short', request(100), i, 100);
      if (i < 14) late.take(open, i, chance);
    }
    late.add('long', request(5_000), 16, 5_000);
    expect([25, 100].map((ms) => late.take(open, ms, chance)!.item)).toEqual(['short', 'long']);
  });

  it('has a document computed once: who asks about it meanwhile goes to the worker that computes it', () => {
    const late = new LateBinding<string>();
    const keys = Int32Array.from({ length: 2 * 62 }, (_, at) => at);
    const ahead = [0, 0, 400];
    // Others wait at the workers; who computes the document holds nothing of it yet.
    const states = (): WorkerState[] => ahead.map((tokens) => state(tokens, 0, 4));
    late.add('a', { ...request(1_000), keys }, 0, 1_000);
    expect(late.take(states, 0, chance)).toMatchObject({ item: 'a', worker: 0 });
    ahead[0] = 900;
    late.add('b', { ...request(1_000), keys }, 100, 1_000);
    late.add('c', request(100), 100, 100);
    expect(late.take(states, 101, chance)).toMatchObject({ item: 'c', worker: 1 });
    ahead[1] = 100;
    expect(late.take(states, 102, chance)).toBe(undefined);
    ahead[0] = 150;
    expect(late.take(states, 950, chance)).toMatchObject({ item: 'b', worker: 0 });
    // Nothing came of it: 3 s and more are long enough.
    ahead[0] = 300;
    late.add('d', { ...request(1_000), keys }, 4_000, 1_000);
    expect(late.take(states, 4_000, chance)).toMatchObject({ item: 'd', worker: 1 });
  });

  it('lets a short prompt, too, be computed once: who asks meanwhile comes while its last step runs, and is told to compute the rest', () => {
    const late = new LateBinding<string>({ ...lateBindingDefaults, openS: 10 });
    const keys = Int32Array.from({ length: 2 * 250 }, (_, at) => at);
    const ahead = [0, 0];
    const states = (): WorkerState[] => ahead.map((tokens) => state(tokens, 0, 4));
    late.add('a', { ...request(4_000), keys }, 0, 4_000);
    expect(late.take(states, 0, chance)).toMatchObject({ item: 'a', worker: 0, held: { match: { blocks: 0 } } });
    ahead[0] = 2_000;
    late.add('b', { ...request(4_010), keys }, 1, 4_010);
    // 4 s, and 2,048 tokens in the first step: before that has ended, it would be admitted beside the first one, and compute the rest, too.
    expect(late.take(states, 2_040, chance)).toBe(undefined);
    expect(late.take(states, 2_060, chance)).toMatchObject({ item: 'b', worker: 0, held: { match: { blocks: 250 } } });
    // Whoever asked first has gone: nothing is computed, and nobody waits for it.
    late.add('c', { ...request(8_000), keys }, 2_100, 8_000);
    ahead[0] = 0;
    expect(late.take(states, 2_100, chance)!.item).toBe('c');
  });

  it('knows that steps are filled with what waits before a prompt: its last tokens may be all that its last step computes', () => {
    const late = new LateBinding<string>({ ...lateBindingDefaults, openS: 10 });
    const keys = Int32Array.from({ length: 2 * 250 }, (_, at) => at);
    const states = (): WorkerState[] => [state(100, 0, 4), state(9_000, 0, 4)];
    late.add('a', { ...request(4_000), keys }, 0, 4_000);
    expect(late.take(states, 0, chance)).toMatchObject({ item: 'a', worker: 0 });
    late.add('b', { ...request(4_010), keys }, 1, 4_010);
    // 100 tokens and the first 3,996 of the prompt are two steps.
    expect(late.take(states, 4_080, chance)).toBe(undefined);
    expect(late.take(states, 4_110, chance)).toMatchObject({ item: 'b', worker: 0, held: { match: { blocks: 250 } } });
  });

  it('forgets what a worker was computing when its number stands for another one', () => {
    const late = new LateBinding<string>();
    const keys = Int32Array.from({ length: 2 * 62 }, (_, at) => at);
    const states = (): WorkerState[] => [state(0), state(100)];
    late.add('a', { ...request(1_000), keys }, 0, 1_000);
    expect(late.take(states, 0, chance)).toMatchObject({ item: 'a', worker: 0 });
    late.left(0);
    late.add('b', { ...request(1_000), keys }, 100, 1_000);
    expect(late.take(states, 100, chance)).toMatchObject({ worker: 0, held: { match: { blocks: 0 } } });
  });

  it('leaves the last open worker to short requests, where many of them come before another one is open', () => {
    const given = (shortOnes: number): string => {
      const late = new LateBinding<string>();
      const ahead = [0, 1_200];
      const states = (): WorkerState[] => ahead.map((tokens) => state(tokens));
      for (let i = 0; i < shortOnes; i++) {
        late.add('short', request(10), i * 20, 10);
        late.take(states, i * 20, chance);
      }
      late.add('long', request(5_000), 1_000, 5_000);
      return late.take(states, 1_000, chance)?.item ?? 'nobody';
    };
    // Closed for 1 s: 50 short ones wait for half of it each, and 3 do.
    expect([given(50), given(3)]).toEqual(['nobody', 'long']);
  });

  it('is bounded, and forgets who leaves', () => {
    const late = new LateBinding<string>({ ...lateBindingDefaults, maxHeld: 1 });
    late.add('a', request(10), 0, 10);
    expect(late.isFull).toBe(true);
    late.remove('a');
    expect(late.isFull).toBe(false);
  });
});
