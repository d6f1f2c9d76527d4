/**
 * What the coordinator adds to streams: 1,000 clients and more, one answer after another, over 8 fake engines, asked straight, through it and
 * through a bare proxy of Node in the same run: `than_proxy` is ours beside what that adds. `--seconds N` of each (default 20), `--clients N`, `--rate N` tokens a second and answer. Any error ends it.
 * `memory_live` is flat when its ratio is 1: what is in use after a full collection at the end, beside a quarter of the time (before that
 * pools are filled and code is compiled). `memory` is what the process has, with all that V8 has not collected yet: up to several times as
 * much, and more by chance. Run it for minutes. The engines are asked straight, and by the
 * proxy, for a minute at most.
 *
 * Where clients, engines and coordinator share few cores, much of what is added is waiting for a core: the log says how long each waited
 * beside how long it ran. `--apart` gives the coordinator, and the proxy, a core of its own, which V8's helper threads share with its event
 * loop: a collection takes longer there, and what is left is its own.
 */
import { join } from 'node:path';
import { KvError } from '@kvtier/errors';
import { type BenchContext, type Figure, rate, type Suite, time } from '../figures.ts';
import { type Streams, streamsCost } from '../streams/streams.ts';

/** Milliseconds that may be added at the 99th percentile. */
const [askedFirstMs, askedGapMs] = [2, 1];

async function run({ args, log, scratchDir }: BenchContext): Promise<Figure[]> {
  const options = {
    folder: join(scratchDir, 's'),
    clients: numberOf(args, '--clients', 1_000),
    engines: 8,
    tokensPerS: numberOf(args, '--rate', 5),
    answerTokens: 64,
    promptTokens: 64,
    seconds: numberOf(args, '--seconds', 20),
    isApart: args.includes('--apart'),
  };
  const { straight, proxied, through, proxyCpuS, coordinatorCpuS, residentMiB, liveMiB } = await streamsCost(
    options,
    log,
  );
  log(`the coordinator's memory, MiB: ${residentMiB.join(', ')}; CPU ${coordinatorCpuS.toFixed(1)} s`);
  const errors = Object.entries({ ...straight.errors, ...proxied.errors, ...through.errors });
  if (errors.length > 0) throw new KvError('IO', `bench streams: ${JSON.stringify(errors)}`);
  const added = (name: 'first' | 'gaps', by: Streams): number => by[name].p99 - straight[name].p99;
  const memoryIn = (quarter: number): number => {
    const looks = residentMiB.length / 4;
    return Math.max(...residentMiB.slice(Math.floor(looks * (quarter - 1)), Math.ceil(looks * quarter)));
  };
  return [
    time('added_first_token_p99', added('first', through), 'ms', askedFirstMs, '2 ms'),
    time('added_between_tokens_p99', added('gaps', through), 'ms', askedGapMs, '1 ms'),
    time('first_token_than_proxy', added('first', through), 'ms', added('first', proxied), 'what a bare proxy adds'),
    time('between_tokens_than_proxy', added('gaps', through), 'ms', added('gaps', proxied), 'what a bare proxy adds'),
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

function numberOf(args: readonly string[], name: string, otherwise: number): number {
  const at = args.indexOf(name);
  if (at === -1) return otherwise;
  const value = Number(args[at + 1]);
  if (Number.isInteger(value) && value > 0) return value;
  throw new KvError('CONFIG', `bench streams: ${name} needs a whole number above 0`);
}

export default {
  name: 'streams',
  description: 'what the coordinator adds to 1,000 concurrent streams: time and CPU',
  run,
} satisfies Suite;
