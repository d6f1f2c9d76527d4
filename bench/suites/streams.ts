/**
 * What the coordinator adds to streams: 1,000 clients and more, one answer after another, over 8 fake engines, asked straight, through it and
 * through a bare proxy of Node in the same run: the p99 of first tokens, and between two tokens, through it beside that of both others, and
 * what is added to the straight one beside the 2 ms and the 1 ms that may be. `--seconds N` of each (default 20), `--clients N`, `--rate N`
 * tokens a second and answer. Any error ends it, and so does an answer that stands still, or where tokens are missing (whole.ts).
 * `memory_live` is flat when its ratio is 1: what is in use after a full collection at the end, beside a quarter of the time (before that
 * pools are filled and code is compiled). `memory` is what the process has, with all that V8 has not collected yet: up to several times as
 * much, and more by chance. Run it for minutes. The engines are asked straight, and by the proxy, for a minute at most.
 *
 * Where clients, engines and coordinator share few cores, much of what is added is waiting for a core: the log says how long each waited
 * beside how long it ran. `--apart` gives the coordinator, and the proxy, a core of its own, which V8's helper threads share with its event
 * loop: a collection takes longer there, and what is left is its own.
 */
import { join } from 'node:path';
import { argumentsOf } from '../arguments.ts';
import { type BenchContext, type Figure, rate, type Suite, time } from '../figures.ts';
import { timeFigures } from '../streams/figures.ts';
import { streamsCost } from '../streams/streams.ts';

async function run({ args, log, scratchDir }: BenchContext): Promise<Figure[]> {
  const given = argumentsOf('streams', args, {
    options: { seconds: 'count', clients: 'count', rate: 'count', apart: 'flag' },
  }).options;
  const options = {
    folder: join(scratchDir, 's'),
    clients: given.clients ?? 1_000,
    engines: 8,
    tokensPerS: given.rate ?? 5,
    answerTokens: 64,
    promptTokens: 64,
    seconds: given.seconds ?? 20,
    isApart: given.apart,
  };
  const { straight, proxied, through, proxyCpuS, coordinatorCpuS, residentMiB, liveMiB } = await streamsCost(
    options,
    log,
  );
  log(`the coordinator's memory, MiB: ${residentMiB.join(', ')}; CPU ${coordinatorCpuS.toFixed(1)} s`);
  const memoryIn = (quarter: number): number => {
    const looks = residentMiB.length / 4;
    return Math.max(...residentMiB.slice(Math.floor(looks * (quarter - 1)), Math.ceil(looks * quarter)));
  };
  return [
    ...timeFigures({ straight, proxied, through }),
    time('memory_live', liveMiB[1], 'MiB', liveMiB[0], 'after a quarter of the time'),
    time('memory', memoryIn(4), 'MiB', memoryIn(2), 'in the second quarter of the time'),
    rate(
      'tokens_per_cpu_second',
      through.tokens / coordinatorCpuS,
      'tokens/s',
      straight.tokens / straight.cpuS,
      'a gRPC client that reads them',
    ),
    rate(
      'tokens_per_cpu_than_proxy',
      through.tokens / coordinatorCpuS,
      'tokens/s',
      proxied.tokens / proxyCpuS,
      'a bare proxy that passes them on',
    ),
  ];
}

export default {
  name: 'streams',
  description: 'what the coordinator adds to 1,000 concurrent streams: time and CPU',
  run,
} satisfies Suite;
