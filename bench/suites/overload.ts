/**
 * What is served in time when more is asked than can be: one prefill and one decode worker, real processes, each on a host and beside a
 * node of its own, behind a coordinator that knows by when each first token is wanted. `at` saturation as many requests come in a
 * second as clients that ask without a pause are answered; then twice as many. Arrivals are drawn beforehand from a seed.
 *
 *   goodput_prefill  long prompts, short answers: answers a second whose first token came in time, at twice saturation; beside those at
 *                    saturation: ratio ≥ 0.9
 *   goodput_decode   short prompts, long answers
 *   goodput_both     both long
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
import { evenCores } from '../even-cores.ts';
import { type BenchContext, type Figure, median, rate, type Suite } from '../figures.ts';
import { PdCluster } from '../pd-cluster.ts';
import { arrivals, ask, freshPrompt } from '../pd-load.ts';

const shapes = {
  prefill: { prompt: 1_600, answer: 8 },
  decode: { prompt: 64, answer: 200 },
  both: { prompt: 800, answer: 100 },
};
type Shape = (typeof shapes)['both'];
/** Clients that ask without a pause. */
const busyClients = 12;
/** A first token is in time within so many times what a lone request takes. */
const ttftTimes = 6;
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
    const missing = hostsMissing();
    if (missing !== undefined) throw new KvError('SETUP', missing);
    const seconds = Number(context.args.find((arg) => /^\d+$/.test(arg)) ?? defaultSeconds);
    const { dir } = await resolveModel('random:25m');
    const cluster = await PdCluster.start(dir);
    const rest = context.args.includes('--uneven') ? () => {} : evenCores();
    try {
      await cluster.rate(gbit);
      await cluster.coordinate({ ttftMs: 2_000, itlMs: 200 }, ['predicted']);
      const url = cluster.url('predicted');
      const figures: Figure[] = [];
      const only = context.args
        .find((arg) => arg.startsWith('--only='))
        ?.slice('--only='.length)
        .split(',');
      for (const [name, shape] of Object.entries(shapes).filter(([name]) => only?.includes(name) ?? true))
        figures.push(await measure(context, url, name, shape, seconds));
      return figures;
    } finally {
      rest();
      await cluster.close();
    }
  },
};
export default suite;

async function measure(context: BenchContext, url: string, name: string, shape: Shape, seconds: number) {
  const lone: number[] = [];
  for (let i = 0; i < 6; i++) lone.push((await ask(url, 'prompt', freshPrompt(shape.prompt), 1)).ttftMs);
  const ttftMs = Math.ceil(ttftTimes * median(lone.slice(3))); // code is compiled
  await busy(url, shape, seconds / 4); // rates are learned
  const perS = await busy(url, shape, seconds);
  context.log(`${name}: ${perS.toFixed(2)} answers a second at most; a first token is in time within ${ttftMs} ms`);
  const goods: number[] = [];
  for (const factor of [1, 2]) {
    const due = arrivals({ prompt: perS * factor, stream: 0 }, seconds * 1_000, 11);
    const beginMs = performance.now();
    const outcomes = await Promise.all(
      due.map(async ({ atMs }) => {
        await sleep(Math.max(0, beginMs + atMs - performance.now()));
        return askInTime(url, shape, ttftMs);
      }),
    );
    const count = (what: Outcome['what']): number => outcomes.filter((outcome) => outcome.what === what).length;
    if (context.args.includes('--verbose'))
      for (const [at, { what, firstMs, decision }] of outcomes.entries())
        context.log(`  ${due[at]!.atMs.toFixed(0)} ms: ${what}, ${firstMs?.toFixed(0) ?? '-'} ms; ${decision}`);
    goods.push(count('in time') / seconds);
    context.log(
      `${name}, ${factor} times: ${due.length} asked, ${count('in time')} in time, ${count('late')} late, ` +
        `${count('refused')} told to come again`,
    );
  }
  return rate(`goodput_${name}`, goods[1]!, 'answers/s', goods[0]!, 'at saturation');
}

/** Answers a second. */
async function busy(url: string, shape: Shape, seconds: number): Promise<number> {
  const beganMs = performance.now();
  let answered = 0;
  const client = async (): Promise<void> => {
    while (performance.now() < beganMs + seconds * 1_000) {
      await ask(url, 'prompt', freshPrompt(shape.prompt), shape.answer);
      answered++;
    }
  };
  await Promise.all(Array.from({ length: busyClients }, client));
  return (answered / (performance.now() - beganMs)) * 1_000;
}

interface Outcome {
  readonly what: 'in time' | 'late' | 'refused';
  readonly firstMs: number | undefined;
  /** What the coordinator decided, and by which figures. */
  readonly decision: string;
}

async function askInTime(url: string, shape: Shape, ttftMs: number): Promise<Outcome> {
  const beganMs = performance.now();
  const response = await fetch(`${url}/v1/completions`, {
    method: 'POST',
    headers: { 'content-type': 'application/json', 'x-slo-ttft-ms': String(ttftMs) },
    body: JSON.stringify({
      ...{ prompt: freshPrompt(shape.prompt), max_tokens: shape.answer, temperature: 0 },
      ...{ stream: true, return_token_ids: true, ignore_eos: true },
    }),
    signal: AbortSignal.timeout(limitMs),
  });
  if (response.status === 429 && response.headers.has('retry-after')) {
    return { what: 'refused', firstMs: undefined, decision: (await response.text()).slice(0, 300) };
  }
  if (response.status !== 200) throw new KvError('REQUEST', `${url}: ${response.status} ${await response.text()}`);
  let firstMs: number | undefined;
  let text = '';
  const decoder = new TextDecoder();
  for await (const bytes of response.body!) {
    firstMs ??= performance.now();
    text = (text + decoder.decode(bytes, { stream: true })).slice(-4_096);
    if (text.includes('"error"')) throw new KvError('REQUEST', `${url}: ${text.slice(-300)}`);
  }
  if (!text.endsWith('data: [DONE]\n\n')) throw new KvError('REQUEST', `${url}: the stream broke off`);
  const tookMs = firstMs! - beganMs;
  const decision = response.headers.get('x-kvtier-handoff') ?? '';
  return { what: tookMs <= ttftMs ? 'in time' : 'late', firstMs: tookMs, decision };
}
