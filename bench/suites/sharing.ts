/**
 * What sharing is worth: a prompt that worker A has computed is asked of a worker on another host, over a link of 1 and of 10 Gbit/s.
 * Three workers are asked the same prompt, one after the other in changing order, each on a host and beside a node of its own: one
 * that decides by itself (its load planner), one that imports whatever it costs, one that has no node and computes. The first must
 * never be slower than 1.03 of the better of the others.
 *
 *   import_MODEL_TOKENS_NG   time to first token with the import, beside computing
 *   planned_MODEL_TOKENS_NG  as the planner decides, beside the better of both: ratio ≥ 1 ÷ 1.03
 *   mean_MODEL_TOKENS_NG     the same of means: what the planner tries now and then, medians do not show
 *
 * Rounds are paired; which of both is better, all other rounds say (better-of-two.ts). Each figure is of several lives of all processes:
 * two that do the same differ by a tenth from one life to the next (what is compiled when, where memory lies), and not within one.
 *
 * Models: `25m` computes 16 KiB of keys and values per token in about 0.5 ms, so that importing wins on either link; `wide` computes
 * as many bytes in a tenth of the time, so that computing wins at 1 Gbit/s; `demo` lies between.
 */
import { mkdtempSync, rmSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { fileURLToPath } from 'node:url';
import { waitUntil } from '@kvtier/cli';
import { KvError } from '@kvtier/errors';
import { resolveModel } from '@kvtier/model';
import { makeRealModel, type RealShape } from '@kvtier/model/testing';
import { hosts, hostsMissing } from '../../infra/hosts/hosts.ts';
import { argumentsOf } from '../arguments.ts';
import { betterOfTwo } from '../better-of-two.ts';
import { type BenchContext, type Figure, median, type Suite, time } from '../figures.ts';
import { type Answer, SharingHosts, type Worker } from '../sharing-hosts.ts';

const links = [1, 10];
const models: Readonly<Record<string, readonly number[]>> = {
  wide: [480, 1920],
  demo: [480, 1920, 3840],
  '25m': [480, 1920],
};
/** Of each life; two lives have all orders once. Few rounds of many lives: it is lives that differ. */
const defaultRounds = 3;
const lives = 8;
const warmUps = 6;
const blockTokens = 16;
/** Ids of ordinary words in the demo tokenizer, which all of them use. */
const tokenIds = { from: 300, to: 1300 };
const demoDir = fileURLToPath(new URL('../../models/demo/model', import.meta.url));

/** Many bytes of keys and values, little to compute. */
const wide: RealShape = {
  architectures: ['LlamaForCausalLM'],
  model_type: 'llama',
  vocab_size: 3520,
  hidden_size: 128,
  intermediate_size: 128,
  num_hidden_layers: 4,
  num_attention_heads: 8,
  num_key_value_heads: 8,
  head_dim: 64,
  max_position_embeddings: 16_384,
  rms_norm_eps: 1e-5,
  rope_theta: 500_000,
  rope_scaling: null,
  tie_word_embeddings: true,
};

type Way = 'planned' | 'imported' | 'computed';
const ways: readonly Way[] = ['planned', 'imported', 'computed'];
/** All orders in turn: who asks the peer first finds its blocks and the way to them cold. */
const orders: readonly (readonly Way[])[] = [
  ['planned', 'imported', 'computed'],
  ['imported', 'planned', 'computed'],
  ['computed', 'planned', 'imported'],
  ['imported', 'computed', 'planned'],
  ['planned', 'computed', 'imported'],
  ['computed', 'imported', 'planned'],
];

interface Round {
  readonly answers: Readonly<Record<Way, Answer>>;
  /** Loads that the first one has given up until now. */
  readonly givenUp: number;
}

const suite: Suite = {
  name: 'sharing',
  description:
    'a prompt that another host has computed: imported over 1 and 10 Gbit/s, computed, and as the planner decides',
  needs: ['iproute2', 'nftables'],
  /** `npm run bench -- sharing [MODEL...] [ROUNDS of each life] [--gbit=N]` */
  async run(context) {
    const { options, words, number } = argumentsOf('sharing', context.args, {
      ...{ options: { gbit: 'count' }, words: Object.keys(models), number: 'ROUNDS' },
    });
    const { gbit: chosenLink } = options;
    const rounds = number ?? defaultRounds;
    const missing = hostsMissing();
    if (missing !== undefined) throw new KvError('SETUP', missing);
    const figures: Figure[] = [];
    for (const [model, lengths] of Object.entries(models)) {
      if (words.length > 0 && !words.includes(model)) continue;
      const dir = await modelFolder(context, model);
      for (const gbit of chosenLink === undefined ? links : [chosenLink]) {
        const taken = lengths.map((): Round[] => []);
        for (let life = 0; life < lives; life++) {
          const lived = await liveOnce(dir, lengths, gbit, rounds, life);
          for (const [at, theirs] of lived.entries()) taken[at]!.push(...theirs);
        }
        for (const [at, tokens] of lengths.entries())
          figures.push(...figuresOf(context, `${model}_${tokens}_${gbit}g`, taken[at]!));
      }
    }
    return figures;
  },
};
export default suite;

/** Nothing is evicted: of any of the models a token has 16 KiB at most, and a quarter more is what a tier keeps free. */
function arenaBytesFor(lengths: readonly number[], rounds: number): number {
  const bytes = (rounds + warmUps) * sum(lengths) * (16 << 10) * 1.25;
  return Math.ceil(bytes / (64 << 20)) * (64 << 20);
}

async function modelFolder(context: BenchContext, model: string): Promise<string> {
  if (model !== 'wide') return (await resolveModel(model === 'demo' ? model : `random:${model}`)).dir;
  const folder = join(context.scratchDir, 'wide');
  await makeRealModel(folder, wide, demoDir);
  return folder;
}

/** Rounds by length. The one that decides and the one that imports change places from one pair of lives to the next. */
async function liveOnce(
  dir: string,
  lengths: readonly number[],
  gbit: number,
  rounds: number,
  life: number,
): Promise<Round[][]> {
  const places = Math.floor(life / 2) % 2 === 0 ? (['b', 'c'] as const) : (['c', 'b'] as const);
  const cluster = await hosts(['a', 'b', 'c'], { gbit });
  const folder = mkdtempSync(join(tmpdir(), 'kvs-'));
  const sharing = new SharingHosts(cluster, folder);
  const sweep = (): void => {
    sharing.sweep();
    rmSync(folder, { recursive: true, force: true });
  };
  /** This process ends, by a signal or an error. Arenas are removed once nobody holds them any more. */
  const leave = (): void => {
    cluster.end();
    sweep();
  };
  process.once('exit', leave);
  try {
    const arenaBytes = arenaBytesFor(lengths, rounds);
    const first = await sharing.worker('a', dir, await sharing.node('a', [], arenaBytes));
    const asked: Record<Way, Worker> = {
      planned: await sharing.worker(places[0], dir, await sharing.node(places[0], ['a'], arenaBytes)),
      imported: await sharing.worker(places[1], dir, await sharing.node(places[1], ['a'], arenaBytes), {
        loads: 'always',
      }),
      computed: await sharing.worker('c', dir, null),
    };
    const prompts = makePrompts(1 + (Date.now() % 1_000_000));
    // Code is compiled, and rates are learned.
    for (let at = 0; at < warmUps; at++) for (const tokens of lengths) await round(first, asked, prompts(tokens), ways);
    const taken = lengths.map((): Round[] => []);
    for (let at = 0; at < rounds; at++)
      for (const [length, tokens] of lengths.entries())
        taken[length]!.push(await round(first, asked, prompts(tokens), orders[(life * rounds + at) % orders.length]!));
    return taken;
  } finally {
    await cluster.close();
    sweep();
    process.off('exit', leave);
  }
}

const givenUp = 'kvtier_connector_reasons_total{reason="load: slower than computing"}';
const inFlight = 'kvtier_node_events{event="fetch.inflight_bytes"}';

/** The prompt computed by `first`, and then asked of each of the others once their nodes know of it. */
async function round(
  first: Worker,
  asked: Readonly<Record<Way, Worker>>,
  prompt: readonly number[],
  order: readonly Way[],
): Promise<Round> {
  const listed = 'kvtier_tier_blocks{tier="peer"}';
  const nodes = [asked.planned, asked.imported];
  const before = await Promise.all(nodes.map((worker) => worker.metric(listed)));
  const { tokenIds: right } = await first.ask(prompt);
  const blocks = Math.floor(prompt.length / blockTokens);
  for (const [at, worker] of nodes.entries())
    await waitUntil(
      'the blocks in a peer’s list',
      20_000,
      async () => (await worker.metric(listed)) >= before[at]! + blocks,
    );
  await first.resetPrefixCache();
  const answers = {} as Record<Way, Answer>;
  for (const way of order) {
    // What was given up before may still be on its way.
    for (const worker of nodes)
      await waitUntil('an idle node', 20_000, async () => (await worker.metric(inFlight)) === 0);
    answers[way] = await asked[way].ask(prompt);
    if (answers[way].tokenIds.join() !== right.join())
      throw new KvError('IO', `sharing: ${way}: another answer than where it was computed`);
    await asked[way].resetPrefixCache(); // when it has given its own blocks away, too
  }
  return { answers, givenUp: await asked.planned.metric(givenUp) };
}

function figuresOf(context: BenchContext, name: string, rounds: readonly Round[]): Figure[] {
  const of = (way: Way): number[] => rounds.map(({ answers }) => answers[way].ms);
  const [imported, computed] = [median(of('imported')), median(of('computed'))];
  const planned = median(of('planned'));
  const told = betterOfTwo(
    rounds.map(({ answers }) => ({
      chosen: answers.planned.ms,
      ways: [answers.imported.ms, answers.computed.ms],
    })),
  );
  const better = (['imported', 'computed'] as const)[told.better];
  const share = (way: Way): string => rounds.map(({ answers }) => sum(Object.values(answers[way].byTier))).join(' ');
  const ms = (way: Way): string =>
    of(way)
      .map((each) => each.toFixed(1))
      .join(' ');
  context.log(`${name}: imported ${ms('imported')}; computed ${ms('computed')}; planned ${ms('planned')}`);
  context.log(
    `${name}: tokens from the peer: imported ${share('imported')}; planned ${share('planned')}; loads given up ${rounds.map((each) => each.givenUp).join(' ')}`,
  );
  const parts = (way: Way): string => {
    const medianOf = (part: (answer: Answer) => number): string =>
      median(rounds.map(({ answers }) => part(answers[way]))).toFixed(1);
    const parted = [0, 1, 2].map((part) => medianOf(({ partsMs }) => partsMs[part]!));
    return [...parted, medianOf(({ ms: all, partsMs }) => all - sum(partsMs))].join(' + ');
  };
  context.log(
    `${name}: medians of waiting + loading + computing + the rest: ${ways.map((way) => `${way} ${parts(way)}`).join('; ')}`,
  );
  const mean = (way: Way): number => sum(of(way)) / rounds.length;
  return [
    time(`import_${name}`, imported, 'ms', computed, 'computed, same prompts'),
    time(
      `planned_${name}`,
      planned,
      'ms',
      planned * told.ratio,
      `${better}, the better of both; each round by the others (by all: ${told.strict.toFixed(3)}); ratio ≥ 0.97`,
    ),
    time(`mean_${name}`, mean('planned'), 'ms', mean(better), `${better}, the better of both, by means`),
  ];
}

const sum = (values: readonly number[]): number => values.reduce((all, each) => all + each, 0);

/** Never the same twice in one run. */
function makePrompts(seed: number): (tokens: number) => number[] {
  let state = seed;
  return (tokens) =>
    Array.from({ length: tokens }, () => {
      state = (Math.imul(state, 1664525) + 1013904223) >>> 0;
      return tokenIds.from + ((state >>> 8) % (tokenIds.to - tokenIds.from));
    });
}
