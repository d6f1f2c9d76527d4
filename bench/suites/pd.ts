/**
 * What prefill and decode apart are worth: one prefill and one decode worker against two that do both, each on a host and beside a node
 * of its own, over links of 1 and of 10 Gbit/s. The same load, drawn beforehand, long prompts that arrive among running streams, goes to
 * one and to the other in turns: at rates that keep the prefill side of one prefill and one decode worker busy for half of the time and
 * the decode side for three quarters of it, and for goodput at higher ones, too. Two combined workers are not told the streams' target
 * (docs/handoff.md): their prompts take whole steps.
 *
 *   itl_p99_NG    99 of 100 pauses between two tokens of the streams are shorter; beside two combined: ratio ≥ 2
 *   ttft_p90_NG   to the first token of a long prompt; beside two combined: ratio ≥ 0.95
 *   goodput_NG    most requests a second within both targets, whatever the load; beside two combined: ratio ≥ 1.3
 *   hidden_NG     of the blocks that came to the decode worker, those that came before all were computed: ratio ≥ 0.8
 *   decision_NG   the median time of a request as the coordinator decides (of `mixed`, of the rounds' means), beside the better of always
 *                 and never: ratio ≥ 0.97; the worst of `mixed`, `short` and `warm`
 *   mean_decision_NG  the same of means: what it decides wrongly now and then, medians do not show
 *
 * Percentiles are of all rounds together. Each round has all ways, another one first. Only that coordinator of the prefill and the decode
 * worker runs that is asked, for each reads the events of its workers, asked or not; it is started anew for its turn and learns rates
 * before it counts. For `hidden`, `short` and `warm` all run.
 *
 * Targets are of the machine: two and a half times a lone prompt's first token, and 0.57 of the pause that a whole step of a prompt
 * makes. They are measured anew for each link, just before what they judge.
 *
 * `--from=N` begins with round N, which has a load of its own: a long run can be made in pieces.
 *
 * `--only=` names parts, with commas between: `mixed` (itl_p99, ttft_p90 and a part of decision), `goodput`, `hidden`, `short` and `warm`
 * (parts of decision). Parts that were not asked for have no figures.
 *
 * Of the two hosts that serve, each has a processor of its own, the same for both systems; the coordinator and the clients run where
 * there is time. All processors are kept busy at idle priority (even-cores.ts), for both systems alike: no host computes faster because
 * the other one rests, as it is where hosts do not share a machine. `--uneven` does without.
 *
 * What the times to the first tokens are made of is said for each way and each reason of the decision: of what was served alone its queue,
 * its loads and its prefill, of what was split the wait for room at the decode side, queue and prefill at the prefill side, the transfer
 * that was not hidden, and the tail. `--verbose` says it of each request, with the figures by which was decided.
 */
import { KvError } from '@kvtier/errors';
import { resolveModel } from '@kvtier/model';
import { hostsMissing } from '../../infra/hosts/hosts.ts';
import { argumentsOf } from '../arguments.ts';
import { evenCores } from '../even-cores.ts';
import { type BenchContext, type Figure, median, rate, type Suite, time } from '../figures.ts';
import { PdCluster, type Way } from '../pd-cluster.ts';
import { type DecidedWay, decidedWays, decisionFigures, inTurn, type Taken } from '../pd-decision.ts';
import {
  arrivals,
  ask,
  freshPrompt,
  isInTime,
  mixedLoad,
  percentile,
  saysParts,
  type Targets,
  type Timed,
} from '../pd-load.ts';

const links = [1, 10];
/**
 * Of what two combined workers do: a first token may take so many times as long as that of a lone prompt, and a pause so much of one in
 * which a whole step of a prompt is computed. A target that a fast machine keeps whatever it does would measure nothing. Of a
 * decode worker's pauses, most of which have no prompt beside them, 999 of 1,000 kept the latter here, and 99 of 100 were a sixth shorter.
 */
const [ttftTimes, pauseShare] = [2.5, 0.57];
/** Prompt tokens of a whole step, at all workers: some 0.2 s of a processor, as 8,192 of them are of a GPU. */
const stepTokens = 256;
const shape = { streamTokens: 48, answerTokens: 64, promptTokens: 1_600, promptAnswerTokens: 8 };
/** Streams at a time, for what a decode worker does at most. */
const streamsAtOnce = 8;
/**
 * Of what a prefill worker, and a decode worker, does at most: loads at which neither side has more to do than it can. The share of the
 * combined ones' pauses in which a whole step is computed is a usual pause × such steps a second, some 2 %, so that a p99 is one of them.
 */
const usualLoad = { prompt: 0.5, stream: 0.75 };
/** For goodput, times the usual load. */
const factors = [1, 1.5, 2];
const defaultRounds = 3;
/** Of the usual load, so that of some ninety prompts nine are beyond the p90. Of others, whose requests are only counted. */
const [roundMs, otherMs] = [60_000, 24_000];
const loneRounds = 5;

const suite: Suite = {
  name: 'pd',
  description:
    'prefill and decode apart against two combined workers, long prompts among streams, over 1 and 10 Gbit/s',
  needs: ['iproute2', 'nftables'],
  /** `npm run bench -- pd [ROUNDS] [--from=N] [--gbit=N] [--only=PART,PART] [--uneven] [--verbose]` */
  async run(context) {
    const { options, number: rounds = defaultRounds } = given(context);
    const missing = hostsMissing();
    if (missing !== undefined) throw new KvError('SETUP', missing);
    const only: ReadonlySet<Part> = new Set(options.only ?? parts);
    const { dir } = await resolveModel('random:25m');
    const cluster = await PdCluster.start(dir, stepTokens);
    const rest = options.uneven ? () => {} : evenCores();
    try {
      const figures: Figure[] = [];
      for (const gbit of options.gbit === undefined ? links : [options.gbit]) {
        await cluster.rate(gbit);
        const targets = await targetsOf(cluster);
        context.log(`${gbit} Gbit/s: targets ${targets.ttftMs} ms to the first token, ${targets.itlMs} ms between two`);
        figures.push(...(await measure(context, cluster, targets, gbit, rounds, only)));
      }
      return figures;
    } finally {
      rest();
      await cluster.close();
    }
  },
};
export default suite;

const parts = ['mixed', 'goodput', 'hidden', 'short', 'warm'] as const;
type Part = (typeof parts)[number];

const given = ({ args }: BenchContext) =>
  argumentsOf('pd', args, {
    options: { from: 'index', gbit: 'count', only: parts, uneven: 'flag', verbose: 'flag' },
    number: 'ROUNDS',
  });

async function targetsOf(cluster: PdCluster): Promise<Targets> {
  const url = cluster.url('combined');
  const [firsts, pauses]: [number[], number[]] = [[], []];
  for (let at = 0; at < 2 * loneRounds; at++) {
    firsts.push((await ask(url, 'prompt', freshPrompt(shape.promptTokens), 1)).ttftMs);
    pauses.push(...(await ask(url, 'stream', freshPrompt(shape.streamTokens), shape.answerTokens)).gapsMs);
  }
  const firstMs = median(firsts.slice(loneRounds)); // code is compiled
  const stepMs = (firstMs * stepTokens) / shape.promptTokens + median(pauses);
  return { ttftMs: Math.ceil(ttftTimes * firstMs), itlMs: Math.ceil(pauseShare * stepMs) };
}

async function measure(
  context: BenchContext,
  cluster: PdCluster,
  targets: Targets,
  gbit: number,
  rounds: number,
  only: ReadonlySet<Part>,
): Promise<Figure[]> {
  const isGood = (one: Timed): boolean => isInTime(one, targets);
  const good = (all: readonly Timed[], ms = roundMs): number => all.filter(isGood).length / (ms / 1000);
  const say = (way: string, all: readonly Timed[]): void => {
    if (!given(context).options.verbose) return;
    for (const each of all)
      context.log(
        `${gbit} Gbit/s ${way}: ${each.kind} of ${each.tokens}, ttft ${each.ttftMs.toFixed(0)} ms (${saysParts([each])}), ` +
          `whole ${each.wholeMs.toFixed(0)}, pauses ${each.gapsMs
            .slice(0, 8)
            .map((gapMs) => gapMs.toFixed(0))
            .join(' ')}: ` +
          `${each.decision} ${each.degraded}`,
      );
  };
  await cluster.coordinate(targets, ['predicted', 'never']);
  // Code is compiled, and rates are learned.
  const lone: number[] = [];
  for (let at = 0; at < 2 * loneRounds; at++)
    for (const way of ['combined', 'predicted'] as const)
      lone.push((await ask(cluster.url(way), 'prompt', freshPrompt(shape.promptTokens), 1)).ttftMs);
  const streamsOnce = async (): Promise<number> => {
    const begin = performance.now();
    const one = (): Promise<Timed> =>
      ask(cluster.url('never'), 'stream', freshPrompt(shape.streamTokens), shape.answerTokens);
    await Promise.all(Array.from({ length: streamsAtOnce }, one));
    return (performance.now() - begin) / 1000;
  };
  const streamsS = [await streamsOnce(), await streamsOnce(), await streamsOnce()];
  await cluster.coordinate(targets, ['predicted']);
  const most = { prompt: 1000 / median(lone.slice(2 * loneRounds)), stream: streamsAtOnce / median(streamsS) };
  context.log(
    `${gbit} Gbit/s: at most ${most.prompt.toFixed(2)} long prompts and ${most.stream.toFixed(2)} streams a second`,
  );
  const load = async (way: Way, ms: number, seed: number, factor = 1): Promise<Timed[]> => {
    const { prompt, stream } = usualLoad;
    const due = arrivals({ prompt: most.prompt * prompt * factor, stream: most.stream * stream * factor }, ms, seed);
    const all = await mixedLoad(cluster.url(way), shape, due);
    say(way, all);
    return all;
  };
  const isLoaded = only.has('mixed') || only.has('goodput');
  for (const way of ['combined', 'predicted'] as const) if (isLoaded) await load(way, otherMs / 4, 7);
  const from = given(context).options.from ?? 0;
  const taken: Record<Way, Timed[][]> = { predicted: [], combined: [], always: [], never: [] };
  /** Requests a second within both targets, by factor. */
  const goods: Record<'predicted' | 'combined', number[][]> = { predicted: [], combined: [] };
  const lones = async (way: Way): Promise<void> => {
    for (let at = 0; at < 2 * loneRounds; at++)
      await ask(cluster.url(way), 'prompt', freshPrompt(shape.promptTokens), 1);
  };
  let alone: DecidedWay = 'predicted';
  const turnTo = async (way: DecidedWay): Promise<void> => {
    if (way === alone) return;
    await cluster.coordinate(targets, [way]);
    await lones(way);
    await load(way, otherMs / 4, 7);
    alone = way;
  };
  const loaded: readonly DecidedWay[] = only.has('mixed') ? decidedWays : only.has('goodput') ? ['predicted'] : [];
  for (let at = from; at < from + rounds; at++) {
    const isEven = at % 2 === 0;
    const both: ('predicted' | 'combined')[] = isEven ? ['predicted', 'combined'] : ['combined', 'predicted'];
    for (const way of inTurn(loaded, at)) {
      await turnTo(way);
      for (const one of way === 'predicted' ? both : [way]) taken[one].push(await load(one, roundMs, 100 + at));
      for (const one of way === 'predicted' && only.has('goodput') ? both : []) {
        const byFactor: number[] = [];
        for (const factor of factors)
          byFactor.push(
            factor === 1 ? good(taken[one].at(-1)!) : good(await load(one, otherMs, 100 + at, factor), otherMs),
          );
        goods[one].push(byFactor);
      }
    }
  }
  await cluster.coordinate(targets, decidedWays);
  for (const way of decidedWays) if (way !== alone) await lones(way);
  const figures: Figure[] = [];
  if (only.has('mixed')) figures.push(...mixed(context, gbit, taken, good, targets.itlMs));
  if (only.has('goodput')) figures.push(goodput(context, gbit, goods));
  if (only.has('hidden')) figures.push(await hidden(context, cluster, gbit, say));
  const kinds = (['mixed', 'short', 'warm'] as const).filter((kind) => only.has(kind));
  if (kinds.length > 0) figures.push(...(await decision(context, cluster, gbit, taken, kinds, say)));
  return figures;
}

const peer = 'two combined workers, same load in turns, not told of targets';

type Goods = Readonly<Record<'predicted' | 'combined', readonly (readonly number[])[]>>;
function goodput(context: BenchContext, gbit: number, goods: Goods): Figure {
  const of = (way: 'predicted' | 'combined'): number => {
    const each = factors.map((_, at) => median(goods[way].map((one) => one[at]!)));
    const said = each.map((perS, at) => `${perS.toFixed(2)} at ${factors[at]!.toFixed(2)}`).join(', ');
    context.log(`${gbit} Gbit/s ${way}: goodput a second ${said} times the usual load`);
    return Math.max(...each);
  };
  return rate(`goodput_${gbit}g`, of('predicted'), '/s', of('combined'), `${peer}; ratio ≥ 1.3`);
}

function mixed(
  context: BenchContext,
  gbit: number,
  taken: Readonly<Record<Way, Timed[][]>>,
  good: (all: readonly Timed[]) => number,
  itlMs: number,
): Figure[] {
  // Of all rounds together: those of one round are too few for a percentile.
  const of = (way: Way, figure: (all: readonly Timed[]) => number): number => figure(taken[way].flat());
  const gaps = (all: readonly Timed[]): number[] => streams(all).flatMap(({ gapsMs }) => gapsMs);
  const itl = (all: readonly Timed[]): number => percentile(gaps(all), 0.99);
  const longGaps = (all: readonly Timed[]): number =>
    (gaps(all).filter((gapMs) => gapMs > itlMs).length / gaps(all).length) * 100;
  const ttft = (all: readonly Timed[]): number =>
    percentile(
      prompts(all).map(({ ttftMs }) => ttftMs),
      0.9,
    );
  for (const way of ['predicted', 'combined', 'always', 'never'] as const)
    context.log(
      `${gbit} Gbit/s ${way}: itl p99 ${of(way, itl).toFixed(1)} ms, ${of(way, longGaps).toFixed(1)} % above the target, ` +
        `ttft p90 ${of(way, ttft).toFixed(0)} ms, in time ${(of(way, good) / taken[way].length).toFixed(2)}/s, split ${taken[way].flat().filter(isSplit).length} of ${taken[way].flat().length}`,
    );
  for (const way of ['predicted', 'combined', 'always', 'never'] as const)
    for (const [why, all] of byReason(prompts(taken[way].flat())))
      context.log(
        `${gbit} Gbit/s ${way}, ${why}: ${all.length} prompts, ttft ${(all.reduce((sum, { ttftMs }) => sum + ttftMs, 0) / all.length).toFixed(0)} ms: ` +
          saysParts(all),
      );
  return [
    time(`itl_p99_${gbit}g`, of('predicted', itl), 'ms', of('combined', itl), `${peer}; ratio ≥ 2`),
    time(`ttft_p90_${gbit}g`, of('predicted', ttft), 'ms', of('combined', ttft), `${peer}; ratio ≥ 0.95`),
  ];
}

const streams = (all: readonly Timed[]): Timed[] => all.filter(({ kind }) => kind === 'stream');
const prompts = (all: readonly Timed[]): Timed[] => all.filter(({ kind }) => kind === 'prompt');
/** By what was decided, why, and what fell short. */
function byReason(all: readonly Timed[]): Map<string, Timed[]> {
  const found = new Map<string, Timed[]>();
  for (const one of all) {
    const why = /why=([a-z-]+)/.exec(one.decision)?.[1] ?? 'not decided';
    const what = `${isSplit(one) ? 'split' : 'none'}, ${why}${one.degraded === '' ? '' : `, ${one.degraded}`}`;
    const kind = found.get(what);
    if (kind === undefined) found.set(what, [one]);
    else kind.push(one);
  }
  return found;
}
const isSplit = ({ decision: text }: Timed): boolean => text.startsWith('split ');

type Say = (way: string, all: readonly Timed[]) => void;

/** Lone long prompts, split and not, in turns. */
async function hidden(context: BenchContext, cluster: PdCluster, gbit: number, say: Say): Promise<Figure> {
  const [added, alone]: [number[], number[]] = [[], []];
  const before = await cluster.blocks('always');
  for (let at = 0; at < loneRounds; at++) {
    const split = await ask(cluster.url('always'), 'prompt', freshPrompt(shape.promptTokens), 1);
    const whole = await ask(cluster.url('never'), 'prompt', freshPrompt(shape.promptTokens), 1);
    say('lone', [split, whole]);
    added.push(split.ttftMs - whole.ttftMs);
    alone.push(whole.ttftMs);
  }
  const after = await cluster.blocks('always');
  const [come, early] = [after.come - before.come, after.hidden - before.hidden];
  const wireMs = (shape.promptTokens * bytesPerToken * 8) / (gbit * 1e6);
  context.log(
    `${gbit} Gbit/s: a lone prompt takes ${median(alone).toFixed(0)} ms, split ${median(added).toFixed(0)} ms more; ` +
      `its blocks are ${wireMs.toFixed(0)} ms on the link; ${early} of ${come} came before all were computed`,
  );
  const limit = `all ${come} blocks; ${wireMs.toFixed(0)} ms on the link beside ${median(alone).toFixed(0)} ms of prefill; ratio ≥ 0.8`;
  return rate(`hidden_${gbit}g`, early / come, 'share', 1, limit);
}
const bytesPerToken = 16 << 10;

/** They take so little time that what else a machine does is seen in each: of forty a median differs by a twentieth. */
const turns = { short: 160, warm: 50 };
/** Less than a block: nothing is decided of it. */
const wakingTokens = 8;

/** Requests one after another, as decided and both ways, in turns. */
async function decision(
  context: BenchContext,
  cluster: PdCluster,
  gbit: number,
  loaded: Readonly<Record<Way, Timed[][]>>,
  kinds: readonly ('mixed' | 'short' | 'warm')[],
  say: Say,
): Promise<Figure[]> {
  const byKind = new Map<string, Taken>();
  const timesOf = (all: Readonly<Record<DecidedWay, Timed[][]>>): Taken => {
    const of = (way: DecidedWay): number[][] => all[way].map((round) => round.map(({ wholeMs }) => wholeMs));
    return { predicted: of('predicted'), always: of('always'), never: of('never') };
  };
  for (const kind of kinds) {
    if (kind === 'mixed') {
      byKind.set(kind, timesOf(loaded));
      continue;
    }
    const lone: Record<DecidedWay, Timed[][]> = { predicted: [], always: [], never: [] };
    for (let at = 0; at < turns[kind]; at++) {
      const held = kind === 'warm' ? freshPrompt(shape.promptTokens) : [];
      if (kind === 'warm') await ask(cluster.url('never'), 'prompt', held, 1);
      for (const way of inTurn(decidedWays, at)) {
        // Who was just asked has its code and its memory at hand: all have been.
        await ask(cluster.url(way), 'prompt', freshPrompt(wakingTokens), 1);
        lone[way].push([await ask(cluster.url(way), 'prompt', [...held, ...freshPrompt(48)], 8)]);
      }
    }
    for (const way of decidedWays) say(`${kind} ${way}`, lone[way].flat());
    byKind.set(kind, timesOf(lone));
  }
  return decisionFigures(gbit, byKind, context.log);
}
