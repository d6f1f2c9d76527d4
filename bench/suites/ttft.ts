/**
 * Time to first token through the real system: API server, engine, cache node, processes and all, with a 25-million-parameter shape.
 * Paired runs: each pair is a prompt of its own, asked cold and then warm (or, after SIGKILL of every process, from disk), so drift
 * of the machine cancels. Before every request the engine's own prefix cache is dropped; hits can only come from the tier. What is
 * computed with and without a tier is asked of both at once, and they take turns (taking-turns.ts), with their computing threads
 * pinned (pinning.ts).
 *
 *   warm     cold ÷ warm, blocks in the arena                    target ≥ 8
 *   restart  cold ÷ first request of a prompt after SIGKILL      target ≥ 5
 *   miss     nothing to hit: tier off ÷ tier on, taking turns    target ≥ 0.98
 *   miss_sustained  the same for prompts one after the other, without waiting for the write-down, more than the arena holds: the whole
 *                   time, so that what stores, evictions and writes to disk cost is in it    target ≥ 0.98
 */
import { join } from 'node:path';
import {
  complete,
  type Launched,
  launch,
  metricValues,
  resetPrefixCache,
  waitForWriteDown,
  waitUntilServing,
} from '@kvtier/cli';
import { KvError } from '@kvtier/errors';
import { argumentsOf } from '../arguments.ts';
import { type BenchContext, type Figure, median, type Suite, time } from '../figures.ts';
import { pinComputing } from '../pinning.ts';
import { type Runner, takeTurns } from '../taking-turns.ts';

const lengths = [2000, 4000];
const warmPairs = 7;
/** Prompts by length, for each pair of systems; the first of the two slices goes to either in turn. */
const missPairs: Readonly<Record<number, number>> = { 2000: 10, 4000: 8 };
/** Where its memory lies makes a process up to a tenth slower than the next one, for as long as it lives: so several of each. */
const missLaunches = 3;
/** Requests before anything counts: the code of a process that has just started is interpreted, and compiled beside its work. */
const missWarmUps = 8;
/**
 * Asked one after the other as one turn: 384 MiB of keys and values, for an arena of 256 MiB that the turns before have filled. Of each pair
 * of systems, after one turn that does not count.
 */
const sustained = { tokens: 2000, prompts: 12, turns: 3, arenaBytes: '256MiB' };
/** Ids of ordinary words in the demo tokenizer, which the random models use. */
const tokenIds = { from: 300, to: 1300 };

type Prompt = readonly number[];
type Systems = Readonly<Record<'on' | 'off', Launched>>;

/** Never the same twice in one run. */
function makePrompts(seed: number): (tokens: number) => Prompt {
  let state = seed;
  return (tokens) =>
    Array.from({ length: tokens }, () => {
      state = (Math.imul(state, 1664525) + 1013904223) >>> 0;
      return tokenIds.from + ((state >>> 8) % (tokenIds.to - tokenIds.from));
    });
}

async function ttft(system: Launched, prompt: Prompt): Promise<{ ms: number; cachedTokens: number }> {
  await resetPrefixCache(system.url);
  return ask(system, prompt);
}

async function ask(system: Launched, prompt: Prompt): Promise<{ ms: number; cachedTokens: number }> {
  const { ttftMs, cachedTokens } = await complete(system.url, {
    prompt,
    max_tokens: 1,
    temperature: 0,
    ignore_eos: true,
  });
  return { ms: ttftMs, cachedTokens };
}

function expectCached(what: string, prompt: Prompt, cachedTokens: number, isHit: boolean): void {
  const right = isHit ? cachedTokens >= 0.95 * prompt.length : cachedTokens === 0;
  if (!right)
    throw new Error(`${what}: ${cachedTokens} of ${prompt.length} prompt tokens were cached; not what is measured`);
}

async function start(context: BenchContext, name: string, flags: readonly string[], tier: boolean): Promise<Launched> {
  const system = await launch([
    ...['--port', '0', '--model', 'random:25m', '--data-dir', join(context.scratchDir, name)],
    ...flags,
  ]);
  await waitUntilServing(system.url, tier);
  return system;
}

const tierFlags = ['--arena-bytes', '2GiB', '--disk-bytes', '4GiB', '--kv-bytes', '256MiB'];

const suite: Suite = {
  name: 'ttft',
  description: 'time to first token: computed, from the arena, from disk after SIGKILL, and with nothing to hit',
  /** `npm run bench -- ttft miss` measures only the misses, `sustained` only those without a pause, `hits` only the rest. */
  async run(context) {
    const { words } = argumentsOf('ttft', context.args, { words: ['hits', 'miss', 'sustained'] });
    const isChosen = (part: (typeof words)[number]): boolean => words.length === 0 || words.includes(part);
    const prompts = makePrompts(1 + (Date.now() % 1_000_000));
    return [
      ...(isChosen('hits') ? await measureHits(context, prompts) : []),
      ...(isChosen('miss') ? await measureMisses(context, prompts) : []),
      ...(isChosen('sustained') ? await measureSustained(context, prompts) : []),
    ];
  },
};
export default suite;

async function measureHits(context: BenchContext, newPrompt: (tokens: number) => Prompt): Promise<Figure[]> {
  const plan = lengths.flatMap((tokens) =>
    Array.from({ length: warmPairs }, () => ({ tokens, prompt: newPrompt(tokens) })),
  );
  const cold: number[] = [];
  const warm: number[] = [];
  const restart: number[] = [];
  let system = await start(context, 'tier', tierFlags, true);
  try {
    for (const tokens of lengths) await ttft(system, newPrompt(tokens)); // first-touch costs
    for (const [index, { tokens, prompt }] of plan.entries()) {
      const first = await ttft(system, prompt);
      expectCached('cold', prompt, first.cachedTokens, false);
      const second = await ttft(system, prompt);
      expectCached('warm', prompt, second.cachedTokens, true);
      cold[index] = first.ms;
      warm[index] = second.ms;
      context.log(`${tokens} tokens: cold ${first.ms.toFixed(1)} ms, warm ${second.ms.toFixed(1)} ms`);
    }
    await waitForWriteDown(system.url);
    context.log('SIGKILL for all processes');
    await system.killAll();
    system = await start(context, 'tier', tierFlags, true);
    for (const tokens of lengths) await ttft(system, newPrompt(tokens));
    for (const [index, { tokens, prompt }] of plan.entries()) {
      const { ms, cachedTokens } = await ttft(system, prompt);
      expectCached('restart', prompt, cachedTokens, true);
      restart[index] = ms;
      context.log(`${tokens} tokens: after SIGKILL ${ms.toFixed(1)} ms`);
    }
  } finally {
    await system.stop();
  }
  const figures = (name: string, values: readonly number[]): Figure[] => {
    const each = lengths.map((tokens) => {
      const of = (all: readonly number[]): number => median(all.filter((_, i) => plan[i]!.tokens === tokens));
      return time(`${name}_${tokens}`, of(values), 'ms', of(cold), 'cold, same prompts, same run');
    });
    return [worst(name, each), ...each];
  };
  return [...figures('warm', warm), ...figures('restart', restart)];
}

async function measureMisses(context: BenchContext, newPrompt: (tokens: number) => Prompt): Promise<Figure[]> {
  const taken = lengths.map((tokens) => ({ tokens, on: [] as number[], ratios: [] as number[] }));
  for (let launch = 0; launch < missLaunches; launch++) {
    const on = await start(context, `miss-on-${launch}`, tierFlags, true);
    let off: Launched | undefined;
    try {
      off = await start(context, `miss-off-${launch}`, ['--no-tier', '--kv-bytes', '256MiB'], false);
      for (let i = 0; i < missWarmUps; i++) await miss({ on, off }, newPrompt(lengths[i % lengths.length]!), 'on');
      for (const { pids } of [on, off]) pinComputing(pids());
      for (const { tokens, on: ms, ratios } of taken) {
        for (let pair = 0; pair < missPairs[tokens]!; pair++) {
          const ran = await miss({ on, off }, newPrompt(tokens), pair % 2 === 0 ? 'off' : 'on');
          ms.push(ran.on);
          ratios.push(ran.off / ran.on);
        }
        const last = ratios.slice(-missPairs[tokens]!);
        context.log(`${tokens} tokens, nothing to hit, off ÷ on: ${last.map((ratio) => ratio.toFixed(3)).join(' ')}`);
      }
    } finally {
      await on.stop();
      await off?.stop();
    }
  }
  const each = taken.map(({ tokens, on, ratios }) => {
    const value = median(on);
    const limitName = 'tier off, paired: on × median of off ÷ on, the same prompt in slices of turns';
    return time(`miss_${tokens}`, value, 'ms', value * median(ratios), limitName);
  });
  return [worst('miss', each), ...each];
}

/** Both systems asked a prompt that neither knows; ms that each ran until its first token. */
async function miss(systems: Systems, prompt: Prompt, first: 'on' | 'off'): Promise<Record<'on' | 'off', number>> {
  for (const { url } of Object.values(systems)) await resetPrefixCache(url);
  const ran = await inTurns(systems, [prompt], first);
  await waitForWriteDown(systems.on.url); // it must not burden the next one
  return ran;
}

/** Both systems asked prompts that neither knows, one after the other; ms that each ran until the last one's first token. */
async function inTurns(
  systems: Systems,
  prompts: readonly Prompt[],
  first: 'on' | 'off',
): Promise<Record<'on' | 'off', number>> {
  const second = first === 'on' ? 'off' : 'on';
  const runnerOf = (which: 'on' | 'off'): Runner => ({
    pids: systems[which].pids(),
    ask: async () => {
      const beganMs = performance.now();
      let lastMs = 0;
      for (const prompt of prompts) {
        const askedMs = performance.now();
        const { ms, cachedTokens } = await ask(systems[which], prompt);
        expectCached('miss', prompt, cachedTokens, false);
        lastMs = askedMs - beganMs + ms;
      }
      return lastMs;
    },
  });
  const [ofFirst, ofSecond] = (await takeTurns([runnerOf(first), runnerOf(second)])) as [number, number];
  return first === 'on' ? { on: ofFirst, off: ofSecond } : { on: ofSecond, off: ofFirst };
}

/** Write-down is never waited for: a turn has what the one before has left, and leaves as much. */
async function measureSustained(context: BenchContext, newPrompt: (tokens: number) => Prompt): Promise<Figure[]> {
  const flags = ['--arena-bytes', sustained.arenaBytes, '--disk-bytes', '4GiB', '--kv-bytes', '256MiB'];
  const all: Record<'on' | 'off', number>[] = [];
  for (let launch = 0; launch < missLaunches; launch++) {
    const on = await start(context, `sustained-on-${launch}`, flags, true);
    let off: Launched | undefined;
    try {
      off = await start(context, `sustained-off-${launch}`, ['--no-tier', '--kv-bytes', '256MiB'], false);
      const systems = { on, off };
      const turn = (first: 'on' | 'off'): Promise<Record<'on' | 'off', number>> =>
        inTurns(
          systems,
          Array.from({ length: sustained.prompts }, () => newPrompt(sustained.tokens)),
          first,
        );
      await turn('on');
      for (const { pids } of [on, off]) pinComputing(pids());
      for (let at = 0; at < sustained.turns; at++) all.push(await turn((launch + at) % 2 === 0 ? 'off' : 'on'));
      const evicted = (await metricValues(on.url, 'kvtier_tier_evictions')).get('{tier="arena"}') ?? 0;
      if (evicted === 0) throw new KvError('IO', 'bench ttft: the arena never filled; not what is measured');
      const last = all.slice(-sustained.turns).map((each) => (each.off / each.on).toFixed(3));
      context.log(`sustained, nothing to hit, off ÷ on: ${last.join(' ')}; ${evicted} blocks left the arena`);
    } finally {
      await on.stop();
      await off?.stop();
    }
  }
  const value = median(all.map((each) => each.on));
  const limit = value * median(all.map((each) => each.off / each.on));
  const limitName = `tier off, paired: ${sustained.prompts} prompts of ${sustained.tokens} tokens without a pause`;
  return [time('miss_sustained', value, 'ms', limit, limitName)];
}

/** The figure of the length that does worst, under the name alone. */
function worst(name: string, each: readonly Figure[]): Figure {
  const least = each.reduce((a, b) => (b.ratio < a.ratio ? b : a));
  return { ...least, name, limitName: `${least.limitName} (${least.name})` };
}
