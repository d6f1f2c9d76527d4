/** Prefill for another worker, and its other end: two engines in one simulated world, over one tier. */
import { describe, expect, it } from 'vitest';
import { idle, pair, patience } from './testing/pair.ts';
import { naiveAnswer, prompt, SchedulerRig } from './testing/rig.ts';

const handOffs = (rig: SchedulerRig, id: string) => rig.outputs.get(id)!.flatMap(({ handOff }) => handOff ?? []);
describe('prefill for another worker', () => {
  it('computes those blocks and nothing else, gives them to the tier chunk by chunk, and ends without a token', async () => {
    const rig = new SchedulerRig();
    rig.submit('a', prompt(1, 43), { prefillOnly: { blocks: 9 }, maxTokens: 0 });
    expect(rig.engine.load()).toMatchObject({ waiting: 1, tokensAhead: 36 });
    await rig.world.until(() => rig.ended('a'));
    expect(rig.last('a')).toMatchObject({ tokenIds: [], finishReason: 'prefilled', handOff: { readyBlocks: 9 } });
    expect(rig.last('a').cache).toMatchObject({ promptTokens: 36, cachedTokens: 0 });
    expect(rig.tokens('a')).toEqual([]);
    const ready = handOffs(rig, 'a').map(({ readyBlocks }) => readyBlocks);
    expect(ready).toEqual([...new Set(ready)].sort((x, y) => x - y).concat(9));
    expect(rig.connector.tier.size).toBe(9);
    expect(rig.executor.steps.map(({ queryTokens }) => queryTokens[0])).toEqual([16, 16, 4]);
    expect(rig.executor.steps.flatMap(({ sample }) => [...sample])).toEqual([0, 0, 0]);
    await rig.drain();
    idle(rig);
    expect(rig.engine.stats()).toMatchObject({ prefills: 1, prefilledBlocks: 9, finished: 1 });
    // They stay in the engine's own cache.
    rig.submit('b', prompt(1, 43));
    expect(rig.engine.load().tokensAhead).toBe(43 - 36);
  });

  it('takes steps as short as it was asked for, whoever else has prompts', async () => {
    const stepsOf = async (stepBlocks: number | undefined): Promise<number[]> => {
      const rig = new SchedulerRig();
      rig.submit('a', prompt(1, 43), { prefillOnly: { blocks: 10, stepBlocks }, maxTokens: 0 });
      await rig.world.until(() => rig.executor.steps.length > 0);
      rig.submit('b', prompt(2, 20));
      await rig.world.until(() => rig.ended('a') && rig.ended('b'));
      rig.engine.checkIntegrity();
      expect(rig.tokens('b')).toEqual(naiveAnswer(prompt(2, 20), rig.tokens('b').length));
      return rig.executor.steps.map(({ queryTokens }) => [...queryTokens].reduce((sum, count) => sum + count, 0));
    };
    // Steps of 16 tokens at most, 40 tokens of one prompt and 20 of the other.
    for (const any of [undefined, 0]) expect((await stepsOf(any)).slice(0, 2)).toEqual([16, 16]);
    expect((await stepsOf(2)).slice(0, 5)).toEqual([8, 8, 8, 8, 8]);
    expect((await stepsOf(3)).slice(0, 4)).toEqual([12, 12, 12, 12]);
    expect((await stepsOf(9)).slice(0, 2)).toEqual([16, 16]);
  });

  it.each([41, 43, 44])(
    'draws the token behind a prompt of %i tokens where it is asked to: told before the end, and no step more',
    async (tokens) => {
      const rig = new SchedulerRig();
      const last = Math.floor((tokens - 1) / 4);
      rig.submit('a', prompt(1, tokens), { prefillOnly: { blocks: last, stepBlocks: 2, draws: true } });
      await rig.world.until(() => rig.ended('a'));
      expect(rig.tokens('a')).toEqual(naiveAnswer(prompt(1, tokens), 1));
      expect(rig.last('a')).toMatchObject({ tokenIds: [], finishReason: 'prefilled' });
      expect(rig.last('a').handOff!.readyBlocks).toBeGreaterThanOrEqual(last);
      const steps = rig.executor.steps.map(({ queryTokens }) => queryTokens[0]);
      expect(steps).toEqual([8, 8, 8, 8, tokens - 32]);
      // It is nobody's stream here.
      expect(rig.engine.stats()).toMatchObject({ prefills: 1, finished: 1, running: 0 });
      await rig.drain();
      idle(rig);
    },
  );

  it('ends when the tier has answered, not with the step that computes another prompt', async () => {
    const rig = new SchedulerRig();
    rig.submit('a', prompt(1, 43), { prefillOnly: { blocks: 10, draws: true } });
    rig.submit('b', prompt(2, 43));
    await rig.world.until(() => rig.tokens('a').length > 0);
    const steps = rig.executor.steps.length;
    await rig.world.until(() => rig.ended('a'));
    expect([rig.executor.steps.length, rig.last('a').finishReason]).toEqual([steps, 'prefilled']);
    // What its first token took is told with it.
    expect(
      rig.outputs
        .get('a')!
        .filter(({ cache }) => cache)
        .map(({ tokenIds }) => tokenIds.length),
    ).toEqual([1, 0]);
    await rig.world.until(() => rig.ended('b'));
    await rig.drain();
    idle(rig);
  });

  it('draws as any other would, and ends the answer with a token that does', async () => {
    const sampled = { temperature: 0.8, seed: 7n, maxTokens: 4 };
    const rig = new SchedulerRig();
    const alone = await rig.generate('alone', prompt(1, 43), sampled);
    const other = new SchedulerRig();
    other.submit('a', prompt(1, 43), { ...sampled, prefillOnly: { blocks: 10, draws: true } });
    await other.world.until(() => other.ended('a'));
    expect(other.tokens('a')).toEqual(alone.slice(0, 1));
    for (const [part, finishReason] of [
      [{ stopTokenIds: [alone[0]!] }, 'stop'],
      [{ maxTokens: 1 }, 'length'],
    ] as const) {
      const last = new SchedulerRig();
      last.submit('a', prompt(1, 43), { ...sampled, ...part, prefillOnly: { blocks: 10, draws: true } });
      await last.world.until(() => last.ended('a'));
      expect(last.last('a')).toMatchObject({ tokenIds: alone.slice(0, 1), finishReason });
      await last.drain();
      idle(last);
    }
  });

  it.each([1, 2, 3, 4, 5, 6, 8, 10])('aborted after %i events holds nothing, where it draws', async (events) => {
    const rig = new SchedulerRig({ limits: { exportShare: 0.1 } });
    rig.submit('a', prompt(1, 43), { prefillOnly: { blocks: 10, draws: true } });
    for (let i = 0; i < events; i++) await rig.world.advance();
    rig.engine.abort('a');
    await rig.drain();
    idle(rig);
  });

  it('says what the tier did not take, and ends all the same', async () => {
    let stores = 0;
    const rig = new SchedulerRig({ faults: { refuseStore: () => ++stores === 2 } });
    rig.submit('a', prompt(1, 48), { prefillOnly: { blocks: 12 } });
    await rig.world.until(() => rig.ended('a'));
    expect(rig.last('a')).toMatchObject({ finishReason: 'prefilled', handOff: { readyBlocks: 4 } });
    await rig.drain();
    idle(rig);
  });

  it.each([1, 4])('offers again what somebody else was writing, %i times', async (times) => {
    let stores = 0;
    const rig = new SchedulerRig({ faults: { busyStore: () => ++stores <= times } });
    rig.submit('a', prompt(1, 48), { prefillOnly: { blocks: 12 } });
    await rig.world.until(() => rig.ended('a'));
    expect(rig.last('a')).toMatchObject({ finishReason: 'prefilled', handOff: { readyBlocks: 12 } });
    await rig.drain();
    idle(rig);
  });

  it('makes room for others while it only waits for answers', async () => {
    const rig = new SchedulerRig({ blockCount: 17, limits: { exportShare: 1 } });
    const answers: (() => void)[] = [];
    rig.connector.store = (_hashes, _first, blocks, onReleased, { onSettled } = {}) => {
      onReleased();
      if (onSettled) answers.push(() => onSettled(blocks.length, false));
    };
    rig.submit('a', prompt(1, 48), { prefillOnly: { blocks: 12 } });
    await rig.world.until(() => answers.length === 3 && rig.world.pendingCount === 0);
    expect(rig.engine.load()).toMatchObject({ usedBlocks: 12, waiting: 1, tokensAhead: 0 });
    expect(await rig.generate('b', prompt(2, 40))).toEqual(naiveAnswer(prompt(2, 40), 4));
    expect(rig.ended('a')).toBe(false);
    for (const answer of answers) answer();
    await rig.world.until(() => rig.ended('a'));
    expect(rig.last('a')).toMatchObject({ finishReason: 'prefilled', handOff: { readyBlocks: 12 } });
    idle(rig);
  });

  it('who lacks the room that comes back by itself waits for it, and computes nothing twice', async () => {
    const limits = { maxStepTokens: 3, exportShare: 1 };
    const rig = new SchedulerRig({ windows: [6], blockCount: 5, limits, faults: { busyStore: () => !rig.ended('a') } });
    rig.submit('a', prompt(1, 10), { prefillOnly: { blocks: 2 } });
    for (let event = 0; event < 6; event++) await rig.world.advance();
    rig.submit('b', prompt(1, 22), { prefillOnly: { blocks: 5 } });
    await rig.world.until(() => rig.allEnded());
    expect(rig.last('b').finishReason).toBe('prefilled');
    expect(rig.engine.stats()).toMatchObject({ preemptions: 0, prefillTokens: 20 });
    await rig.drain();
    idle(rig);
  });

  it('does not offer it for ever', async () => {
    const rig = new SchedulerRig({ faults: { busyStore: () => true } });
    rig.submit('a', prompt(1, 48), { prefillOnly: { blocks: 12 } });
    await rig.world.until(() => rig.ended('a'));
    expect(rig.last('a')).toMatchObject({ finishReason: 'prefilled', handOff: { readyBlocks: 0 } });
    expect(rig.world.clock.nowUs()).toBeLessThan(500_000);
    await rig.drain();
    idle(rig);
  });

  it('offers the rest when exports have room again, and holds its blocks until then', async () => {
    const rig = new SchedulerRig({ blockCount: 32, limits: { exportShare: 0.1 } }); // three blocks at a time
    rig.submit('a', prompt(1, 64), { prefillOnly: { blocks: 16 } });
    await rig.world.until(() => rig.ended('a'));
    expect(rig.last('a')).toMatchObject({ finishReason: 'prefilled', handOff: { readyBlocks: 16 } });
    await rig.drain();
    idle(rig);
  });

  it('goes down at once also where blocks otherwise go ahead of eviction', async () => {
    const rig = new SchedulerRig({ writeDownAheadBlocks: 1 });
    rig.submit('a', prompt(1, 43), { prefillOnly: { blocks: 10 } });
    await rig.world.until(() => rig.ended('a'));
    expect(rig.last('a')).toMatchObject({ handOff: { readyBlocks: 10 } });
    expect(rig.connector.tier.size).toBe(10);
  });

  it('is sent elsewhere where no cache node is attached, before and while it is computed', async () => {
    const rig = new SchedulerRig({ attached: false });
    const submit = (): void => rig.submit('a', prompt(1, 43), { prefillOnly: { blocks: 10 } });
    expect(submit).toThrow('request a: no cache node is attached to take its blocks; prefill it elsewhere');
    rig.connector.attached = true;
    submit();
    await rig.world.until(() => rig.executor.steps.length === 2);
    rig.connector.attached = false;
    await rig.world.until(() => rig.ended('a'));
    expect(rig.last('a').error).toMatchObject({ code: 'DISCONNECTED', retry: true });
    await rig.drain();
    idle(rig);
  });

  it.each([1, 2, 3, 4, 5, 6, 8, 10])('aborted after %i events holds nothing', async (events) => {
    const rig = new SchedulerRig({ limits: { exportShare: 0.1 } });
    rig.submit('a', prompt(1, 43), { prefillOnly: { blocks: 10 } });
    for (let i = 0; i < events; i++) await rig.world.advance();
    rig.engine.abort('a');
    expect(rig.ended('a')).toBe(true);
    await rig.drain();
    idle(rig);
  });
});

describe('a hand-off', () => {
  it('takes room, says what it holds, waits, and computes the rest: token for token as one engine alone', async () => {
    const { world, p, d } = pair();
    await d.generate('before', prompt(1, 9), { maxTokens: 1 }); // two blocks are its own
    await d.drain();
    d.connector.tier.clear();
    d.submit('a', prompt(1, 43), { handOff: { blocks: 10, ...patience } });
    expect(d.engine.load()).toMatchObject({ waiting: 1, tokensAhead: 3 });
    await world.until(() => handOffs(d, 'a').length === 1);
    expect(handOffs(d, 'a')).toEqual([{ localBlocks: 2, readyBlocks: 0 }]);
    // The whole prompt's room is taken.
    expect(d.engine.load()).toMatchObject({ tokensAhead: 3, usedBlocks: 11, loadAheadS: 0, waitingBlocks: 0 });
    expect(d.engine.stats()).toMatchObject({ loading: 1, awaiting: 1, loads: 0 });
    const steps = d.executor.steps.length;
    p.submit('a', prompt(1, 43), { prefillOnly: { blocks: 10 } });
    await world.until(() => d.ended('a'));
    expect(d.tokens('a')).toEqual(naiveAnswer(prompt(1, 43), 4));
    // What has come is said as it comes; that all has, the first token says.
    const came = handOffs(d, 'a').map(({ readyBlocks }) => readyBlocks);
    expect(came.length).toBeGreaterThan(1);
    expect(came).toEqual([...new Set(came)].sort((x, y) => x - y));
    expect(came.every((blocks) => blocks === 0 || (blocks > 2 && blocks < 10))).toBe(true);
    expect(d.executor.steps[steps]!.queryTokens).toEqual(Int32Array.of(3));
    const { cache } = d.outputs.get('a')!.find((output) => output.cache)!;
    expect(cache).toMatchObject({
      cachedTokens: 40,
      handedTokens: 32,
      tokensByTier: { engine: 8, arena: 32 },
      loadUs: 0,
    });
    expect(cache!.handOffUs).toBeGreaterThan(0);
    expect(cache!.tailUs).toBeGreaterThan(0);
    for (const rig of [p, d]) await rig.drain();
    for (const rig of [p, d]) idle(rig);
    expect(d.engine.stats()).toMatchObject({
      handOffs: 1,
      handOffEnds: { complete: 1 },
      handedTokens: 32,
      shortLoads: 0,
    });
    expect(d.engine.load().loadBlocksPerS).toEqual({});
  });

  it('gets its room, and computes what is left, before prompts that run: they get the rest of the step', async () => {
    const { world, p, d } = pair({}, { blockCount: 80 });
    d.submit('long', prompt(3, 190), { maxTokens: 2 });
    await world.until(() => d.executor.steps.length === 1);
    // In the middle of a step that is full.
    d.submit('a', prompt(1, 43), { handOff: { blocks: 10, ...patience } });
    expect(d.engine.load()).toMatchObject({ usedBlocks: 4 + 11 });
    p.submit('a', prompt(1, 43), { prefillOnly: { blocks: 10 } });
    await world.until(() => d.ended('a'));
    const beside = d.executor.steps.find(({ queryTokens }) => queryTokens[0] === 3);
    expect([...beside!.queryTokens]).toEqual([3, 13]);
    expect(d.ended('long')).toBe(false);
    await world.until(() => d.ended('long'));
    expect(d.tokens('a')).toEqual(naiveAnswer(prompt(1, 43), 4));
    expect(d.tokens('long')).toEqual(naiveAnswer(prompt(3, 190), 2));
    for (const rig of [p, d]) await rig.drain();
    for (const rig of [p, d]) idle(rig);
  });

  it('leaves the room to those that came before it', async () => {
    const { world, d } = pair({}, { blockCount: 33, limits: { maxStepTokens: 4, maxSequences: 4 } });
    d.submit('first', prompt(3, 40), { maxTokens: 8 });
    await world.until(() => d.executor.steps.length === 1);
    // 12 blocks each: of the 32, the second one's are not taken yet.
    d.submit('second', prompt(4, 40), { maxTokens: 8 });
    d.submit('a', prompt(1, 40), { handOff: { blocks: 9, stallMs: 60_000, deadlineMs: 60_000 }, maxTokens: 8 });
    expect(handOffs(d, 'a')).toEqual([]);
    await world.until(() => d.ended('second'));
    expect(d.engine.stats()).toMatchObject({ preemptions: 0 });
    expect(d.engine.changeHandOff('a', 0)).toBe(true);
    await world.until(() => d.ended('a'));
    await d.drain();
    idle(d);
  });

  it.each([4, 131_000])('leaves no room to the answer of one before it that may have %i tokens', async (maxTokens) => {
    const { world, d } = pair({}, { blockCount: 64, maxModelTokens: 100_000, limits: { maxSequences: 1 } });
    d.submit('running', prompt(3, 8), { maxTokens: 60 });
    await world.until(() => d.tokens('running').length > 2);
    const given = d.tokens('running').length;
    d.submit('chat', prompt(4, 8), { maxTokens });
    d.submit('a', prompt(1, 43), { handOff: { blocks: 10, stallMs: 60_000, deadlineMs: 60_000 } });
    await world.until(() => handOffs(d, 'a').length === 1);
    // Before the next step.
    expect(d.tokens('running')).toHaveLength(given);
    expect(d.engine.load()).toMatchObject({ waiting: 2, waitingBlocks: 2 });
    for (const id of ['a', 'chat', 'running']) d.engine.abort(id);
    await d.drain();
    idle(d);
  });

  it('takes none of the room that one before it waits for, and holds up nobody behind it', async () => {
    let silent = true;
    const { world, d } = pair({}, { blockCount: 32, faults: { silentMatch: () => silent } });
    d.submit('first', prompt(3, 80)); // the tier does not answer for it
    silent = false;
    d.submit('a', prompt(1, 60), { handOff: { blocks: 15, stallMs: 60_000, deadlineMs: 60_000 } });
    expect(await d.generate('last', prompt(4, 8))).toEqual(naiveAnswer(prompt(4, 8), 4));
    expect(handOffs(d, 'a')).toEqual([]);
    expect(d.engine.load()).toMatchObject({ waiting: 2, usedBlocks: 0 });
    await world.until(() => d.ended('first') && handOffs(d, 'a').length === 1);
    expect(d.engine.stats()).toMatchObject({ preemptions: 0, handOffEnds: {} });
    d.engine.changeHandOff('a', 0);
    await world.until(() => d.ended('a'));
    await d.drain();
    idle(d);
  });

  it('of a whole prompt computes its last token here', async () => {
    const { world, p, d } = pair();
    p.submit('a', prompt(1, 40), { prefillOnly: { blocks: 10 } });
    d.submit('a', prompt(1, 40), { handOff: { blocks: 10, ...patience } });
    await world.until(() => d.ended('a'));
    expect(d.tokens('a')).toEqual(naiveAnswer(prompt(1, 40), 4));
    expect(d.executor.steps[0]!.queryTokens).toEqual(Int32Array.of(1));
  });

  it.each([
    ['nothing comes', 0, 'awaited'],
    ['the other worker stops in the middle', 4, 'awaited'],
  ])('goes on by itself when %s', async (_, blocks, reason) => {
    const { world, p, d } = pair();
    if (blocks > 0) p.submit('a', prompt(1, 43), { prefillOnly: { blocks } });
    d.submit('a', prompt(1, 43), { handOff: { blocks: 10, ...patience } });
    await world.until(() => d.ended('a'));
    expect(d.tokens('a')).toEqual(naiveAnswer(prompt(1, 43), 4));
    expect(d.connector.awaitedEnds).toEqual([reason]);
    expect(d.engine.stats()).toMatchObject({ handOffEnds: { [reason]: 1 }, handedTokens: 4 * blocks, shortLoads: 0 });
  });

  it('that is called off takes what is there; one that is shortened waits for no more', async () => {
    const { world, p, d } = pair();
    const begin = async (id: string, which: number): Promise<void> => {
      d.submit(id, prompt(which, 43), { handOff: { blocks: 10, stallMs: 60_000, deadlineMs: 60_000 } });
      await world.until(() => handOffs(d, id).length === 1);
    };
    await begin('a', 1);
    p.submit('a', prompt(1, 43), { prefillOnly: { blocks: 4 } });
    await world.until(() => p.ended('a'));
    expect(d.engine.changeHandOff('a', 0)).toBe(true);
    await world.until(() => d.ended('a'));
    expect(d.outputs.get('a')!.find((output) => output.cache)!.cache).toMatchObject({ handedTokens: 16 });
    expect(d.engine.changeHandOff('a', 0)).toBe(false);
    expect(d.engine.changeHandOff('nobody', 0)).toBe(false);

    await begin('b', 2);
    expect(d.engine.changeHandOff('b', 6)).toBe(true);
    expect(d.engine.load().tokensAhead).toBe(43 - 24);
    p.submit('b', prompt(2, 43), { prefillOnly: { blocks: 6 } });
    await world.until(() => d.ended('b'));
    expect(d.outputs.get('b')!.find((output) => output.cache)!.cache).toMatchObject({ handedTokens: 24 });
    for (const [id, which] of [['a', 1] as const, ['b', 2] as const])
      expect(d.tokens(id)).toEqual(naiveAnswer(prompt(which, 43), 4));
    expect(d.engine.stats().handOffEnds).toEqual({ changed: 2 });
  });

  it('may be shortened, or called off, while it waits for room', async () => {
    const { world, d } = pair({}, { blockCount: 14 });
    d.submit('long', prompt(3, 40), { maxTokens: 8 });
    await world.until(() => d.engine.stats().running === 1);
    d.submit('a', prompt(1, 40), { handOff: { blocks: 9, ...patience } });
    await world.advance();
    expect(handOffs(d, 'a')).toEqual([]);
    expect(d.engine.load().tokensAhead).toBeLessThan(40);
    expect(d.engine.changeHandOff('a', 0)).toBe(true);
    await world.until(() => d.ended('a'));
    expect(handOffs(d, 'a')).toHaveLength(1);
    expect(d.tokens('a')).toEqual(naiveAnswer(prompt(1, 40), 4));
    expect(d.engine.stats().handOffEnds).toEqual({ changed: 1 });
  });

  it('that is called off while as many wait as may is computed at once', async () => {
    const { world, d } = pair({}, { limits: { maxSequences: 1 } });
    const long = { stallMs: 60_000, deadlineMs: 60_000 };
    d.submit('a', prompt(1, 40), { handOff: { blocks: 9, ...long } });
    d.submit('b', prompt(2, 40), { handOff: { blocks: 9, ...long } });
    await world.until(() => handOffs(d, 'a').length === 1 && world.pendingCount === 0);
    expect(d.engine.changeHandOff('b', 0)).toBe(true);
    await world.until(() => d.ended('b'));
    expect(world.clock.nowUs()).toBeLessThan(1e6);
    expect(d.engine.stats()).toMatchObject({ awaiting: 1 });
    d.engine.abort('a');
    await d.drain();
    idle(d);
  });

  it('of what the engine holds, or without a cache node, waits for nothing', async () => {
    const { world, d } = pair();
    await d.generate('before', prompt(1, 43));
    d.submit('a', prompt(1, 43), { handOff: { blocks: 10, ...patience } });
    await world.until(() => d.ended('a'));
    expect(handOffs(d, 'a')).toEqual([{ localBlocks: 10, readyBlocks: 0 }]);
    d.connector.attached = false;
    d.submit('b', prompt(2, 43), { handOff: { blocks: 10, ...patience } });
    await world.until(() => d.ended('b'));
    expect(handOffs(d, 'b')).toEqual([{ localBlocks: 0, readyBlocks: 0 }]);
    expect(d.tokens('b')).toEqual(naiveAnswer(prompt(2, 43), 4));
    expect(d.engine.stats()).toMatchObject({ handOffs: 2, handOffEnds: { local: 1, 'no session': 1 } });
  });

  it('gives up its room for a request that came before it', async () => {
    const { world, d } = pair({}, { blockCount: 17 });
    d.submit('old', prompt(3, 20), { maxTokens: 30 });
    await world.until(() => d.engine.stats().running === 1);
    d.submit('a', prompt(1, 40), { handOff: { blocks: 9, stallMs: 60_000, deadlineMs: 60_000 } });
    await world.until(() => handOffs(d, 'a').length === 1);
    await world.until(() => d.ended('old'));
    // That one never loses its own.
    expect(d.engine.stats()).toMatchObject({ handOffEnds: { preempted: 1 }, preemptions: 1 });
    await world.until(() => d.ended('a'));
    expect(d.tokens('old')).toEqual(naiveAnswer(prompt(3, 20), 30));
    expect(d.tokens('a')).toEqual(naiveAnswer(prompt(1, 40), 4));
    expect(handOffs(d, 'a')).toHaveLength(1);
    await d.drain();
    idle(d);
  });

  it('that is the only one with room gives it up, also to a connector that ends it inside the call', async () => {
    for (const endsInside of [false, true]) {
      let silent = false;
      const { world, d } = pair({}, { blockCount: 32, maxPinnedBlocks: 10, faults: { silentMatch: () => silent } });
      await d.generate('pinned', prompt(2, 40), { maxTokens: 1 });
      await d.drain();
      silent = true;
      d.submit('old', prompt(3, 40));
      d.submit('a', prompt(1, 60), { handOff: { blocks: 15, stallMs: 60_000, deadlineMs: 60_000 } });
      await world.until(() => handOffs(d, 'a').length === 1 && world.pendingCount === 0);
      // Of the 31 blocks, 6 are left for the older one, who needs 10.
      expect(d.engine.pinPrefix('pin', Int32Array.from(prompt(2, 40)))).toBe(40);
      const endLoad = d.connector.endLoad.bind(d.connector);
      d.connector.endLoad = (...args) => {
        const { later } = world;
        if (endsInside) world.later = (call) => call();
        endLoad(...args);
        world.later = later;
      };
      world.fireNextTimer(); // the tier never answers for the older one
      await world.until(() => d.allEnded());
      expect(d.defects).toEqual([]);
      expect(d.engine.stats()).toMatchObject({ handOffEnds: { preempted: 1 }, preemptions: 1 });
      expect(d.tokens('old')).toEqual(naiveAnswer(prompt(3, 40), 4));
      expect(d.tokens('a')).toEqual(naiveAnswer(prompt(1, 60), 4));
      await d.drain();
      d.engine.unpinPrefix('pin');
      idle(d);
    }
  });

  it('of a caller that leaves frees its room at once', async () => {
    const { world, d } = pair();
    d.submit('a', prompt(1, 43), { handOff: { blocks: 10, stallMs: 60_000, deadlineMs: 60_000 } });
    await world.until(() => d.connector.awaiting.size === 1);
    d.engine.abort('a');
    await world.until(() => d.engine.load().usedBlocks === 0);
    expect(world.clock.nowUs()).toBeLessThan(10_000);
    expect(d.engine.stats().handOffEnds).toEqual({ gone: 1 });
    await d.drain();
    idle(d);
  });

  it.each([1, 2, 3, 4, 5, 6, 8, 10])(
    'aborted after %i events holds nothing, however late the tier is',
    async (events) => {
      const { world, p, d } = pair({}, { faults: { lateLoad: () => events % 2 === 0 } });
      p.submit('a', prompt(1, 43), { prefillOnly: { blocks: 10 } });
      d.submit('a', prompt(1, 43), { handOff: { blocks: 10, ...patience } });
      for (let i = 0; i < events; i++) await world.advance();
      d.engine.abort('a');
      p.engine.abort('a');
      for (const rig of [p, d]) await rig.drain();
      for (const rig of [p, d]) idle(rig);
      expect(d.connector.awaiting.size).toBe(0);
    },
  );
});
