/**
 * Time to first token through the real system: door, engine, cache node, processes and all, with a 25-million-parameter shape.
 * Paired runs: each pair is a prompt of its own, asked cold and then warm (or, after SIGKILL of every process, from disk), so drift
 * of the machine cancels. Before every request the engine's own prefix cache is dropped; hits can only come from the tier.
 *
 *   warm     cold ÷ warm, blocks in the arena                    target ≥ 8
 *   restart  cold ÷ first request of a prompt after SIGKILL      target ≥ 5
 *   miss     nothing to hit: tier off ÷ tier on, A/B/B/A order   target ≥ 0.98
 */
import { join } from 'node:path';
import { complete, type Launched, launch, resetPrefixCache, waitForWriteDown, waitUntilServing } from '@kvtier/cli';
import { type BenchContext, type Figure, median, type Suite, time } from '../figures.ts';

const lengths = [2000, 4000];
const warmPairs = 7;
/** Rounds of A/B/B/A by prompt length, in each pair of systems: two pairs each, more where a run is short. */
const missRounds: Readonly<Record<number, number>> = { 2000: 8, 4000: 6 };
/** Where its memory lies makes a process up to a tenth slower than the next one, for as long as it lives: so several of each. */
const missLaunches = 3;
/** Requests before anything counts: the code of a process that has just started is interpreted, and compiled beside its work. */
const missWarmUps = 8;
/** Ids of ordinary words in the demo tokenizer, which the random models use. */
const tokenIds = { from: 300, to: 1300 };

type Prompt = readonly number[];

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
  /** `npm run bench -- ttft miss` measures only the misses, `hits` only the rest. */
  async run(context) {
    const prompts = makePrompts(1 + (Date.now() % 1_000_000));
    const isChosen = (part: string): boolean => context.args.length === 0 || context.args.includes(part);
    return [
      ...(isChosen('hits') ? await measureHits(context, prompts) : []),
      ...(isChosen('miss') ? await measureMisses(context, prompts) : []),
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
  const taken = new Map(lengths.map((tokens) => [tokens, { on: [] as number[], off: [] as number[] }]));
  for (let launch = 0; launch < missLaunches; launch++) {
    const on = await start(context, `miss-on-${launch}`, tierFlags, true);
    let off: Launched | undefined;
    try {
      off = await start(context, `miss-off-${launch}`, ['--no-tier', '--kv-bytes', '256MiB'], false);
      const systems = { on, off };
      for (let i = 0; i < missWarmUps; i++) {
        for (const system of [on, off]) await ttft(system, newPrompt(lengths[i % lengths.length]!));
      }
      await waitForWriteDown(on.url);
      for (const [tokens, ms] of taken) {
        for (let round = 0; round < missRounds[tokens]!; round++) {
          for (const which of ['off', 'on', 'on', 'off'] as const) {
            const prompt = newPrompt(tokens);
            const { ms: elapsed, cachedTokens } = await ttft(systems[which], prompt);
            expectCached('miss', prompt, cachedTokens, false);
            ms[which].push(elapsed);
            if (which === 'on') await waitForWriteDown(on.url); // its write-down must not burden the next one
          }
        }
        const ratios = roundRatios(ms).slice(-missRounds[tokens]!);
        context.log(`${tokens} tokens, nothing to hit, off ÷ on: ${ratios.map((ratio) => ratio.toFixed(3)).join(' ')}`);
      }
    } finally {
      await on.stop();
      await off?.stop();
    }
  }
  const each = [...taken].map(([tokens, ms]) => {
    const value = median(ms.on);
    // The machine drifts more between rounds than the tier costs: what counts is off ÷ on within each round.
    const limit = value * median(roundRatios(ms));
    return time(`miss_${tokens}`, value, 'ms', limit, 'tier off, paired: on × median off ÷ on of A/B/B/A rounds');
  });
  return [worst('miss', each), ...each];
}

/** Off ÷ on of each A/B/B/A round: within a round, a linear drift of the machine cancels. */
function roundRatios({ on, off }: Readonly<Record<'on' | 'off', readonly number[]>>): number[] {
  const rounds = Array.from({ length: on.length / 2 }, (_, round) => round * 2);
  return rounds.map((i) => (off[i]! + off[i + 1]!) / (on[i]! + on[i + 1]!));
}

/** The figure of the length that does worst, under the name alone. */
function worst(name: string, each: readonly Figure[]): Figure {
  const least = each.reduce((a, b) => (b.ratio < a.ratio ? b : a));
  return { ...least, name, limitName: `${least.limitName} (${least.name})` };
}
