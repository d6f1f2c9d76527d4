/**
 * What is served in time when more is asked than can be: one prefill and one decode worker, real processes, each on a host and beside a
 * node of its own, behind a coordinator that knows by when each first token is wanted. Saturation is as much as clients that ask
 * without a pause are answered at most, or, where more of it is served in time, the first load beyond, in steps of a fifth, of which more
 * than a seventh is not. It is looked for anew in each run; then it and twice as much are asked for in turns. Arrivals are drawn beforehand
 * from a seed. In time: the first token, and each pause behind it (goodput.ts).
 *
 *   goodput_prefill  long prompts, short answers: answers in time a second at twice saturation; beside those at saturation: ratio ≥ 0.9
 *   goodput_decode   short prompts, long answers
 *   goodput_both     both long
 *   of_most_*        the same beside all answers a second of clients that ask without a pause and want nothing in time: what the machine
 *                    can do, so that a bad saturation flatters nobody
 *
 * What is not served is told so with 429 and `Retry-After`, or by the time its first token was wanted; anything else, and whoever has no
 * answer by `limitMs`, is an error.
 *
 * All processors are kept busy at idle priority (even-cores.ts), or at saturation a worker would compute faster than beyond it, whenever the
 * other one rests: hosts of their own do not. `--uneven` does without.
 */
import { setTimeout as sleep } from 'node:timers/promises';
import { KvError } from '@kvtier/errors';
import { resolveModel } from '@kvtier/model';
import { hostsMissing } from '../../infra/hosts/hosts.ts';
import { argumentsOf } from '../arguments.ts';
import { evenCores } from '../even-cores.ts';
import { type BenchContext, type Figure, median, rate, type Suite } from '../figures.ts';
import { type Ended, type Served, saturation, says, served } from '../goodput.ts';
import { PdCluster } from '../pd-cluster.ts';
import { arrivals, ask, askUnlessRefused, freshPrompt, type Targets } from '../pd-load.ts';

const shapes = {
  prefill: { prompt: 1_600, answer: 8 },
  decode: { prompt: 64, answer: 200 },
  both: { prompt: 800, answer: 100 },
};
type Shape = (typeof shapes)['both'];
/** So many clients ask without a pause, or more of them, as long as more of them get more answers, so many times. */
const [busyClients, grows] = [[12, 24, 48], 1.05] as const;
/** A first token is in time within so many times what a lone request takes. */
const ttftTimes = 6;
/** A pause between two tokens is at most. */
const itlMs = 200;
/** Of the arrivals: of the search, and of each round. */
const [searchSeed, seeds] = [10, [11, 12]] as const;
const gbit = 10;
const defaultSeconds = 20;
/** Whoever waits for longer waits for ever. */
const limitMs = 60_000;

const suite: Suite = {
  name: 'overload',
  description: 'answers in time at twice saturation beside those at saturation: prefill overloaded, decode, both',
  needs: ['iproute2', 'nftables'],
  /** `npm run bench -- overload [SECONDS] [--only=SHAPE,SHAPE] [--uneven] [--verbose]`; verbose: each request, what was decided, and when it came */
  async run(context) {
    const { options, number: seconds = defaultSeconds } = given(context);
    const missing = hostsMissing();
    if (missing !== undefined) throw new KvError('SETUP', missing);
    const { dir } = await resolveModel('random:25m');
    const cluster = await PdCluster.start(dir);
    const rest = options.uneven ? () => {} : evenCores();
    try {
      await cluster.rate(gbit);
      await cluster.coordinate({ ttftMs: 2_000, itlMs }, ['predicted']);
      const url = cluster.url('predicted');
      const figures: Figure[] = [];
      for (const [name, shape] of Object.entries(shapes).filter(([name]) => options.only?.includes(name) ?? true))
        figures.push(...(await measure(context, url, name, shape, seconds)));
      return figures;
    } finally {
      rest();
      await cluster.close();
    }
  },
};
export default suite;

const given = ({ args }: BenchContext) =>
  argumentsOf('overload', args, {
    options: { only: Object.keys(shapes), uneven: 'flag', verbose: 'flag' },
    number: 'SECONDS',
  });

async function measure(context: BenchContext, url: string, name: string, shape: Shape, seconds: number) {
  const lone: number[] = [];
  for (let i = 0; i < 6; i++) lone.push((await ask(url, 'prompt', freshPrompt(shape.prompt), 1)).ttftMs);
  const targets = { ttftMs: Math.ceil(ttftTimes * median(lone.slice(3))), itlMs }; // code is compiled
  await busy(url, shape, seconds / 4, busyClients[0]); // rates are learned
  const mostPerS = await most(url, shape, seconds);
  context.log(
    `${name}: ${mostPerS.toFixed(2)} answers a second at most; in time are a first token within ${targets.ttftMs} ms and ` +
      `pauses of ${itlMs} ms`,
  );
  const load = async (perS: number, seed: number): Promise<Served> => {
    const found = await ended(context, url, shape, targets, perS, seconds, seed);
    const all = served(found, targets, seconds * 1_000);
    context.log(`${name}, ${perS.toFixed(2)} a second: ${says(all)}; ${all.goodPerS.toFixed(2)} in time a second`);
    return all;
  };
  const perS = await saturation(mostPerS, (perS) => load(perS, searchSeed));
  const found: Record<1 | 2, Served[]> = { 1: [], 2: [] };
  for (const [round, seed] of seeds.entries())
    for (const factor of round % 2 === 0 ? ([1, 2] as const) : ([2, 1] as const))
      found[factor].push(await load(perS * factor, seed));
  if (found[1].every(({ inTime, asked }) => inTime === asked))
    throw new KvError(
      'CONFIG',
      `bench overload: ${name}: all of ${perS.toFixed(2)} a second was in time, so that is no saturation; ask for more SECONDS`,
    );
  const goodOf = (all: readonly Served[]): number => all.reduce((sum, { goodPerS }) => sum + goodPerS, 0) / all.length;
  const [once, twice] = [goodOf(found[1]), goodOf(found[2])];
  return [
    rate(`goodput_${name}`, twice, 'answers/s', once, `at saturation, ${perS.toFixed(2)} asked; ratio ≥ 0.9`),
    rate(`of_most_${name}`, twice, 'answers/s', mostPerS, 'all answers of clients that ask without a pause'),
  ];
}

/** Answers a second, in time or not, of as many clients as are answered most. */
async function most(url: string, shape: Shape, seconds: number): Promise<number> {
  let perS = 0;
  for (const clients of busyClients) {
    const before = perS;
    perS = Math.max(before, await busy(url, shape, seconds, clients));
    if (perS < grows * before) break;
  }
  return perS;
}

/** Answers a second. */
async function busy(url: string, shape: Shape, seconds: number, clients: number): Promise<number> {
  const beganMs = performance.now();
  let answered = 0;
  const client = async (): Promise<void> => {
    while (performance.now() < beganMs + seconds * 1_000) {
      const answer = await askUnlessRefused(url, 'prompt', freshPrompt(shape.prompt), shape.answer);
      if (!('refused' in answer)) answered++;
    }
  };
  await Promise.all(Array.from({ length: clients }, client));
  return (answered / (performance.now() - beganMs)) * 1_000;
}

/** Each is sent when it is due, however those before it are served. */
function ended(
  context: BenchContext,
  url: string,
  shape: Shape,
  { ttftMs: wantedMs }: Targets,
  perS: number,
  seconds: number,
  seed: number,
): Promise<Ended[]> {
  const { verbose } = given(context).options;
  const beganMs = performance.now();
  return Promise.all(
    arrivals({ prompt: perS, stream: 0 }, seconds * 1_000, seed).map(async ({ atMs }) => {
      await sleep(Math.max(0, beganMs + atMs - performance.now()));
      const prompt = freshPrompt(shape.prompt);
      const answer = await askUnlessRefused(url, 'prompt', prompt, shape.answer, { wantedMs, limitMs });
      const endMs = performance.now() - beganMs;
      if ('refused' in answer) {
        if (verbose) context.log(`  ${atMs.toFixed(0)} ms: refused; ${answer.refused.slice(0, 300)}`);
        return { endMs, answer: undefined };
      }
      const { ttftMs, gapsMs, decision } = answer;
      const pauseMs = Math.max(0, ...gapsMs);
      if (verbose)
        context.log(
          `  ${atMs.toFixed(0)} ms: first token after ${ttftMs.toFixed(0)} ms, longest pause ${pauseMs.toFixed(0)}, ` +
            `ended at ${endMs.toFixed(0)}; ${decision}`,
        );
      return { endMs, answer };
    }),
  );
}
