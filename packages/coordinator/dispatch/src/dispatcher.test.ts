/** Who gets a request, and that nothing stays counted. */
import { maxMedia } from '@kvtier/kv-index';
import { type PolicyName, policies } from '@kvtier/routing';
import fc from 'fast-check';
import { describe, expect, it } from 'vitest';
import type { DispatchRequest } from './choice.ts';
import { Dispatcher, type DispatcherOptions } from './dispatcher.ts';
import { Outdated } from './outdated.ts';
import { nameOf, never, request, rig } from './testing/dispatcher-rig.ts';
import { FakeHoldings, type FakeWorker, factsOf, recordOf } from './testing/index.ts';

describe('a choice', () => {
  it('is the worker that serves it soonest, says why, and is counted until its end', async () => {
    const { workers, holdings, dispatcher } = rig();
    workers.add('a');
    workers.add('b');
    holdings.blocks[1] = 8;
    const choice = await dispatcher.choose(request(), never);
    expect([nameOf(choice), choice.policy, choice.match.blocks]).toEqual(['b', 'predicted', 8]);
    expect(choice.why).toBe('ahead 0 ms, 0 waiting, 0 running, computes 32 of 160 tokens');
    expect(workers.shares).toEqual([{ requestId: expect.stringMatching(/^r/), tokensAhead: 32, blocks: 11, loadS: 0 }]);
    expect([workers.open, holdings.sentTo]).toEqual([[0, 1], [1]]);
    choice.firstToken();
    choice.firstToken();
    expect(workers.all[1]!.load).toMatchObject({ waiting: 0, running: 1, tokensAhead: 0 });
    choice.ended();
    choice.ended();
    choice.firstToken();
    expect(workers.all[1]!.load).toMatchObject({ waiting: 0, running: 0 });
    expect([workers.open, dispatcher.stats()]).toEqual([
      [0, 0],
      { policy: 'predicted', waiting: 0, given: 0, chosen: 1, saturated: 0, policyBytes: 0 },
    ]);
  });

  it('says that it is a guess where it was made among several by what they hold, and that is guessed of some', async () => {
    const isGuessed = async (part: Partial<DispatchRequest>, count = 2, options: Partial<DispatcherOptions> = {}) => {
      const { workers, holdings, dispatcher } = rig(options);
      for (let i = 0; i < count; i++) workers.add(`w${i}`);
      return [false, true].map(async (guesses) => {
        Object.assign(holdings, { guesses: () => guesses });
        const choice = await dispatcher.choose(request(part), never);
        choice.ended();
        return choice.isGuessed;
      });
    };
    const both = async (...of: Parameters<typeof isGuessed>) => Promise.all(await isGuessed(...of));
    expect(await both({})).toEqual([false, true]);
    expect(await both({ keys: new Int32Array(0) })).toEqual([false, false]);
    expect(await both({}, 1)).toEqual([false, false]);
    expect(await both({}, 2, { policy: 'sticky' })).toEqual([false, true]);
    expect(await both({}, 2, { policy: 'least-loaded' })).toEqual([false, false]);
  });

  it('is a worker whose pool holds the prompt; why there is none depends on who could come', async () => {
    const { workers, dispatcher } = rig();
    const small = workers.add('small', { maxTotalTokens: 160 });
    const large = workers.add('large', { maxTotalTokens: 161 });
    const whyNot = (part: Partial<DispatchRequest> = {}) =>
      dispatcher.choose(request(part), never).then(nameOf, ({ code, message }) => [code, message]);
    expect(await whyNot()).toBe('large');
    expect(await whyNot({ wantedTokens: 1 })).toBe('large');
    expect(await whyNot({ wantedTokens: 2 })).toBe('large');
    expect(await whyNot({ tokens: 159, wantedTokens: 2 })).toBe('large');
    expect(await whyNot({ except: new Set(['large']) })).toEqual(['DISCONNECTED', expect.any(String)]);
    const fits =
      "the prompt has 160 tokens; at most 159 fit into its workers' pools with room for an answer; shorten it";
    expect(await whyNot({ among: new Set(['small']), wantedTokens: 5 })).toEqual(['TOO_LONG', `model demo: ${fits}`]);
    large.state = 'silent';
    workers.changed();
    expect(await whyNot()).toEqual(['DISCONNECTED', expect.any(String)]);
    expect(await whyNot({ tokens: 159, wantedTokens: 2 })).toBe('small');
    large.state = 'refused';
    workers.changed();
    expect(await whyNot()).toEqual(['TOO_LONG', `model demo: ${fits}`]);
    small.state = 'silent';
    workers.changed();
    expect(await whyNot()).toEqual(['DISCONNECTED', expect.any(String)]);
  });

  it('waits for the worker whose pool holds it, and is lost with it', async () => {
    const { workers, dispatcher } = rig();
    workers.add('small', { maxTotalTokens: 160 });
    const large = workers.add('large', { maxTotalTokens: 1_000 }, { waiting: 1, tokensAhead: 1_000_000 });
    const waits = dispatcher.choose(request(), never).catch(({ code }) => code);
    const cut = dispatcher.choose(request({ tokens: 80, wantedTokens: 100 }), never);
    expect(dispatcher.stats().waiting).toBe(2);
    large.state = 'silent';
    workers.changed();
    expect([await waits, nameOf(await cut)]).toEqual(['DISCONNECTED', 'small']);
  });

  it('reckons with the time that a step has run since its worker told it', async () => {
    const { workers, dispatcher } = rig();
    // 60 ms of work each, in a step that began 50 and 5 ms ago.
    const stepping = (forMs: number) => ({
      ...{ waiting: 1, tokensAhead: 600, stepTokens: 600, stepBegunAtMs: performance.now() - forMs },
    });
    workers.add('a', {}, stepping(5));
    workers.add('b', {}, stepping(50));
    expect(nameOf(await dispatcher.choose(request(), never))).toBe('b');
  });

  it('goes where the step that gives tokens ends first', async () => {
    const { workers, dispatcher } = rig();
    const stepping = (forMs: number) => ({
      ...{ running: 1, stepS: 1, stepPerRequestS: 0, stepBegunAtMs: performance.now() - forMs },
    });
    for (let i = 0; i < 8; i++) workers.add(`a${i}`, {}, stepping(0));
    workers.add('b', {}, stepping(100));
    expect(nameOf(await dispatcher.choose(request(), never))).toBe('b');
  });

  it('counts what is sent at once: the next request goes elsewhere', async () => {
    const { workers, dispatcher } = rig();
    for (const name of ['a', 'b', 'c']) workers.add(name);
    const names = [];
    for (let i = 0; i < 3; i++)
      names.push(nameOf(await dispatcher.choose(request({ keys: new Int32Array(0) }), never)));
    expect(names.sort()).toEqual(['a', 'b', 'c']);
  });

  it('is not the worker that runs as many as it can, whatever it holds, while another has a place', async () => {
    const { workers, holdings, dispatcher } = rig();
    workers.add('a', { maxRunning: 8 }, { running: 8, usedBlocks: 100, freedBlocksPerS: 10 });
    workers.add('b');
    holdings.blocks[0] = 8;
    expect(nameOf(await dispatcher.choose(request(), never))).toBe('b');
    workers.all[0]!.facts = factsOf({ maxRunning: 16 });
    expect(nameOf(await dispatcher.choose(request(), never))).toBe('a');
  });

  it('brings in from elsewhere what is brought faster than computed', async () => {
    const { workers, holdings, dispatcher } = rig();
    const slow = workers.add('a');
    const fast = workers.add('b');
    slow.load.loadBlocksPerS = [0, 0, 0, 100];
    fast.load.loadBlocksPerS = [0, 0, 0, 1e6];
    holdings.remote = { remoteBlocks: 10, remoteMedium: 3 };
    expect(nameOf(await dispatcher.choose(request(), never))).toBe('b');
    expect(workers.shares[0]!.tokensAhead).toBe(1);
    expect(workers.shares[0]!.loadS).toBeCloseTo(1e-5, 9);
  });

  it('counts what its worker brings in of its own, and room for as much of an answer as is likely', async () => {
    const { workers, holdings, dispatcher } = rig();
    workers.add('a').load.loadBlocksPerS = [0, 100, 50];
    const byMedium = new Int32Array(maxMedia);
    byMedium.set([2, 4, 3]);
    Object.assign(holdings, { match: () => [{ blocks: 9, byMedium }] });
    await dispatcher.choose(request({ maxTokens: 100_000 }), never);
    expect(workers.shares).toMatchObject([{ tokensAhead: 16, blocks: 74, loadS: 4 / 100 + 3 / 50 }]);
  });

  it('takes a worker that has not measured for as fast as the others are on average, and of none that has for 4,000 tokens a second', async () => {
    const { workers, dispatcher } = rig();
    const ahead = { waiting: 1, tokensAhead: 200, prefillTokensPerS: 0 };
    const [a, b] = [workers.add('a', {}, ahead), workers.add('b', {}, ahead)];
    const whyOf = async (): Promise<string> => {
      const choice = await dispatcher.choose(request({ among: new Set(['b']), keys: new Int32Array(0) }), never);
      choice.ended();
      Object.assign(b.load, ahead);
      return choice.why.split(',')[0]!;
    };
    expect(await whyOf()).toBe('ahead 50 ms');
    a.load.prefillTokensPerS = 1_000;
    expect(await whyOf()).toBe('ahead 200 ms');
    workers.add('c', {}, { ...ahead, prefillTokensPerS: 3_000 });
    expect(await whyOf()).toBe('ahead 100 ms');
  });

  it('is of the model, ready, named and not failed before', async () => {
    const { workers, dispatcher } = rig({ policy: 'round-robin' });
    workers.add('other', { model: 'other' });
    workers.add('draining').record = { ...workers.all[1]!.record, draining: true };
    workers.add('silent').state = 'silent';
    workers.add('prefill').record = { ...workers.all[3]!.record, role: 'prefill' };
    workers.add('x');
    workers.add('y');
    workers.changed();
    const names = async (part: Partial<DispatchRequest>) => {
      const seen = new Set<string>();
      for (let i = 0; i < 4; i++) seen.add(nameOf(await dispatcher.choose(request(part), never)));
      return [...seen].sort();
    };
    expect(await names({})).toEqual(['x', 'y']);
    expect(await names({ except: new Set(['x']) })).toEqual(['y']);
    expect(await names({ among: new Set(['x', 'silent']) })).toEqual(['x']);
    expect(await names({ model: 'other' })).toEqual(['other']);
    await expect(dispatcher.choose(request({ model: 'none' }), never)).rejects.toMatchObject({
      code: 'DISCONNECTED',
      message: 'model none: no worker is ready to serve it (0 are joining, draining or silent); try again',
    });
    await expect(dispatcher.choose(request({ except: new Set(['x', 'y']) }), never)).rejects.toMatchObject({
      message: 'model demo: none of its 2 workers may be chosen, after 2 failed; try again',
    });
  });

  it('is never a worker that reads its tokens as other words, also when it comes to be one while the request waits', async () => {
    const { workers, dispatcher } = rig();
    const outdated = {
      code: 'DISCONNECTED',
      message: 'model demo: its tokenizer or chat template was replaced after the request was read; try again',
    };
    const busy = { waiting: 4, tokensAhead: 100_000 };
    const [a, b] = [workers.add('a', { textDigest: 'old' }, busy), workers.add('b', { textDigest: 'old' }, busy)];
    const waiting = dispatcher.choose(request({ textDigest: 'old' }), never);
    const silent = dispatcher.choose(request(), never);
    const refused = expect(waiting).rejects.toMatchObject(outdated);
    expect(dispatcher.stats().waiting).toBe(2);
    // Both are other processes of the same names at the next look.
    for (const worker of [a, b]) worker.facts = factsOf({ textDigest: 'new' });
    workers.changed();
    await refused;
    await expect(waiting).rejects.toBeInstanceOf(Outdated);
    for (const { load } of [a, b]) Object.assign(load, { waiting: 0, tokensAhead: 0 });
    workers.changed();
    (await silent).ended();
    await expect(dispatcher.choose(request({ textDigest: 'old' }), never)).rejects.toMatchObject(outdated);
    (await dispatcher.choose(request({ textDigest: 'new' }), never)).ended();
    b.facts = factsOf(); // does not say
    workers.changed();
    expect(nameOf(await dispatcher.choose(request({ textDigest: 'old' }), never))).toBe('b');
    // Named by the client, and not there: that is why, and not its tokens.
    await expect(
      dispatcher.choose(request({ textDigest: 'old', among: new Set(['c']) }), never),
    ).rejects.not.toBeInstanceOf(Outdated);
  });

  it('is, of an answer that has begun, one to which its tokens are the same words, whatever made its prompt of a text', async () => {
    const { workers, dispatcher } = rig({ policy: 'round-robin' });
    workers.add('a', { textDigest: 'new', tokenDigest: 'same' });
    workers.add('b', { textDigest: 'old', tokenDigest: 'other' });
    workers.add('c', { textDigest: 'old' }); // does not say
    workers.changed();
    const chosen = async (part: Partial<DispatchRequest>): Promise<string> => {
      const choice = await dispatcher.choose(request({ textDigest: 'old', ...part }), never);
      choice.ended();
      return nameOf(choice);
    };
    const of = async (part: Partial<DispatchRequest>): Promise<string[]> => {
      const names: string[] = [];
      for (let i = 0; i < 4; i++) names.push(await chosen(part));
      return [...new Set(names)].sort();
    };
    expect(await of({})).toEqual(['b', 'c']);
    const begunAt = { modelDigest: '', tokenDigest: 'same' };
    expect(await of({ begunAt })).toEqual(['a', 'c']);
    await expect(chosen({ begunAt, except: new Set(['a', 'c']) })).rejects.toBeInstanceOf(Outdated);
  });

  it('is, of an answer that has begun, one with the weights that it began with', async () => {
    const { workers, dispatcher } = rig({ policy: 'round-robin' });
    workers.add('a', { modelDigest: 'other' });
    workers.changed();
    const begunAt = { modelDigest: 'these' };
    expect(nameOf(await dispatcher.choose(request(), never))).toBe('a');
    await expect(dispatcher.choose(request({ begunAt }), never)).rejects.toBeInstanceOf(Outdated);
    workers.add('b', { modelDigest: 'these' });
    workers.changed();
    expect(nameOf(await dispatcher.choose(request({ begunAt }), never))).toBe('b');
  });

  it('is a prefill worker only while no other of its model is ready, and never where that is off', async () => {
    const { workers, dispatcher } = rig({ policy: 'round-robin' });
    const strict = new Dispatcher({
      workers,
      holdings: new FakeHoldings(),
      policy: 'round-robin',
      prefillServes: false,
    });
    const decode = workers.add('d');
    workers.add('p').record = { ...decode.record, name: 'p', role: 'prefill' };
    workers.changed();
    for (const one of [dispatcher, strict]) expect(nameOf(await one.choose(request(), never))).toBe('d');
    decode.state = 'silent';
    workers.changed();
    expect(nameOf(await dispatcher.choose(request(), never))).toBe('p');
    await expect(strict.choose(request(), never)).rejects.toMatchObject({
      code: 'DISCONNECTED',
      message:
        'model demo: no decode worker is ready to serve it (1 are joining, draining or silent, ' +
        '1 only prefill, and handoff.fallback is off); try again',
    });
    decode.state = 'ready';
    workers.changed();
    expect(nameOf(await dispatcher.choose(request(), never))).toBe('d');
    strict.close();
  });

  it('is refused when the first token would come later than it is wanted: at once, or when it has waited so long', async () => {
    const { workers, dispatcher } = rig();
    for (const name of ['a', 'b']) workers.add(name, {}, { waiting: 1, tokensAhead: 30_000 });
    const by = (ms: number) => dispatcher.choose(request({ firstTokenByMs: performance.now() + ms }), never);
    // Before anything else happens.
    const first = Promise.race([by(2_000), new Promise(setImmediate)]);
    await expect(first).rejects.toMatchObject({ code: 'BUSY', retryAfterS: 3 });
    for (const worker of workers.all) worker!.load.tokensAhead = 8_000;
    await expect(by(900)).rejects.toMatchObject({ code: 'BUSY', message: expect.stringContaining('was wanted') });
    expect(dispatcher.stats()).toMatchObject({ waiting: 0, given: 0, saturated: 2 });
  });

  it('is for the role that is asked for, and where its worker leans now', async () => {
    const { workers, dispatcher } = rig({ policy: 'round-robin' });
    workers.add('p').record = recordOf('p', { role: 'prefill' });
    workers.add('d').record = recordOf('d', { role: 'decode' });
    const both = workers.add('both');
    const names = async (role?: 'prefill') => {
      workers.changed();
      const seen = new Set<string>();
      for (let i = 0; i < 4; i++) seen.add(nameOf(await dispatcher.choose(request({ role }), never)));
      return [...seen].sort();
    };
    expect([await names('prefill'), await names()]).toEqual([['p'], ['both', 'd']]);
    both.leaning = 'prefill';
    expect([await names('prefill'), await names()]).toEqual([['both', 'p'], ['d']]);
    both.leaning = 'mixed';
    expect([await names('prefill'), await names()]).toEqual([
      ['both', 'p'],
      ['both', 'd'],
    ]);
    both.leaning = 'decode';
    expect([await names('prefill'), await names()]).toEqual([['p'], ['both', 'd']]);
    // Nobody is turned away because of a leaning.
    both.leaning = 'prefill';
    workers.all[1]!.state = 'silent';
    expect([await names('prefill'), await names()]).toEqual([['both', 'p'], ['both']]);
    workers.all[1]!.state = 'ready';
    workers.changed();
    expect(nameOf(await dispatcher.choose(request({ among: new Set(['both', 'p']) }), never))).toBe('both');
    expect(nameOf(await dispatcher.choose(request({ except: new Set(['d']) }), never))).toBe('both');
    workers.all[1]!.state = 'silent';
    both.leaning = undefined;
    workers.all[0]!.state = 'silent';
    workers.changed();
    await expect(dispatcher.choose(request({ role: 'prefill' }), never)).rejects.toMatchObject({
      code: 'DISCONNECTED',
    });
  });

  it('one that waits for a worker that turns away goes on waiting for it', async () => {
    const { workers, dispatcher } = rig({ policy: 'predicted', maxWaitMs: 5_000 });
    // Two of each lane: a lone worker is not waited for.
    const [a, b, c] = ['a', 'b', 'c', 'd'].map((name) => workers.add(name, {}, { tokensAhead: 1e6 })) as FakeWorker[];
    c!.leaning = 'prefill';
    workers.changed();
    const only = dispatcher.choose(request({ among: new Set(['b']) }), never);
    for (const leaning of ['prefill', 'decode', 'mixed', 'prefill'] as const) {
      await new Promise(setImmediate);
      b!.leaning = leaning;
      workers.changed();
      // The look at the queues takes it over.
      await dispatcher.choose(request({ model: 'none' }), never).catch(() => {});
    }
    await new Promise(setImmediate);
    expect(dispatcher.stats()).toMatchObject({ waiting: 1, given: 0 });
    a!.load.tokensAhead = 0;
    b!.load.tokensAhead = 0;
    workers.changed();
    expect(nameOf(await only)).toBe('b');
    expect(dispatcher.stats()).toMatchObject({ waiting: 0, given: 1 });
  });

  it.each(Object.keys(policies) as PolicyName[])('%s chooses only what it may', async (policy) => {
    const { workers, dispatcher } = rig({ policy });
    for (let i = 0; i < 5; i++) workers.add(`w${i}`);
    await fc.assert(
      fc.asyncProperty(
        fc.uniqueArray(fc.integer({ min: 0, max: 4 }), { minLength: 1, maxLength: 4 }),
        fc.integer({ min: 1, max: 400 }),
        async (failed, tokens) => {
          const except = new Set(failed.map((i) => `w${i}`));
          const choice = await dispatcher.choose(request({ except, tokens }), never);
          choice.ended();
          expect(except.has(nameOf(choice))).toBe(false);
        },
      ),
      { numRuns: 50 },
    );
    expect(workers.open).toEqual([0, 0, 0, 0, 0]);
  });

  it('knows a worker under another number as another one', async () => {
    const { workers, dispatcher } = rig({ policy: 'round-robin' });
    const gone = workers.add('a');
    workers.add('b');
    (await dispatcher.choose(request(), never)).ended();
    workers.all[0] = { ...gone, record: { ...gone.record, name: 'c' } };
    workers.changed();
    const names = new Set<string>();
    for (let i = 0; i < 2; i++) names.add(nameOf(await dispatcher.choose(request(), never)));
    expect(names).toEqual(new Set(['b', 'c']));
  });

  it('does not look for what another worker of its number was sent: policies forget it', async () => {
    // Of equals it is the last one.
    const { workers, dispatcher } = rig({ policy: 'hash-trie', random: () => 0 });
    const all = [workers.add('a'), workers.add('b')];
    const keys = Int32Array.from({ length: 20 }, (_, at) => at + 1);
    const chosen = async (among?: string): Promise<string> => {
      const choice = await dispatcher.choose(request({ keys, among: among ? new Set([among]) : undefined }), never);
      choice.ended();
      return nameOf(choice);
    };
    for (const name of ['a', 'b']) await chosen(name);
    expect(await chosen()).toBe('b');
    workers.all[1] = { ...all[1]!, record: recordOf('c') };
    workers.changed();
    expect(await chosen()).toBe('a');
  });
});
