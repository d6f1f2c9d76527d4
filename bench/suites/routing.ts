/**
 * Routing policies in a simulated cluster (bench/routing), on the bundled traces or on one of yours:
 * `npm run bench -- routing --trace FILE` (Mooncake's JSON lines), at half of saturation, at it, and at twice. `--generated`: made-up
 * loads of kinds that the traces lack. Our own policy stands beside the best of the others, by the median of three draws. And what a decision and a request cost
 * among 64 workers and 10 million blocks; `--cost`: these alone.
 *
 * The replay refuses nobody: all policies serve the same requests, however long they wait. A coordinator would refuse with 429 who waits in
 * front of its workers for longer than `routing.maxWaitMs`, or finds `routing.maxWaiting` there. So the table says beside p90 and throughput
 * which share has its first token later than that; what these figures count as served, service would not have.
 */
import { KvError } from '@kvtier/errors';
import { argumentsOf } from '../arguments.ts';
import { type BenchContext, type Figure, rate, type Suite, time } from '../figures.ts';
import { compare, header, type Load, line, loads, ours, type Row } from '../routing/compare.ts';
import { decisionCost } from '../routing/decision.ts';
import { generated, generatedNames } from '../routing/generated.ts';
import { hardware } from '../routing/hardware.ts';
import { requestCost } from '../routing/request-cost.ts';
import { bundledTraces, readTrace, readTraces, type Trace } from '../traces.ts';

/** A decision may take so long; and a copy of a block so many bytes. */
const askedUs = 50;
const askedBytes = 64;
/** CPU of a request with hashing. */
const askedCpuMs = 2;

async function run({ args, log }: BenchContext): Promise<Figure[]> {
  const traces = tracesOf(args);
  log(`simulated: ${JSON.stringify(hardware)}`);
  const figures: Figure[] = [];
  for (const trace of traces) {
    log(`${trace.name}: ${trace.requests.length} requests, blocks of ${trace.blockTokens} tokens\n${header}`);
    const rows = compare(trace, hardware, (row) => log(line(row)));
    for (const load of Object.keys(loads) as Load[]) figures.push(...figuresOf(trace.name, load, rows));
  }
  const cost = decisionCost();
  log(
    `storing a copy of a block: ${cost.storeNs.toFixed(0)} ns; one by one in a Map: ${cost.mapP50Us.toFixed(0)} µs a prompt`,
  );
  figures.push(
    time('decision_p99', cost.p99Us, 'us', askedUs, '50 us, 64 workers, 10 M blocks, 6,250 blocks'),
    time('decision_p50', cost.p50Us, 'us', cost.mapP50Us, "the prompt's blocks in one Map, one by one"),
    time('index_bytes', cost.indexBytes / cost.copies, 'bytes a copy', askedBytes, '64 bytes a block and copy'),
  );
  for (const [name, algorithm] of [
    ['cpu_request', 'sha256_cbor'],
    ['cpu_request_xxhash', 'xxhash_cbor'],
  ] as const) {
    const { cpuMs, hashMs } = await requestCost(algorithm);
    log(`${name}: ${hashMs.toFixed(2)} ms of it hashing with ${algorithm}`);
    figures.push(time(name, cpuMs, 'ms', askedCpuMs, '2 ms of CPU, 100,000 tokens, hashing included'));
  }
  return figures;
}

function tracesOf(args: readonly string[]): Trace[] {
  const { options } = argumentsOf('routing', args, {
    options: { trace: 'text', generated: 'flag', cost: 'flag' },
  });
  const { trace: path, generated: isGenerated, cost: isCostAlone } = options;
  if ([path !== undefined, isGenerated, isCostAlone].filter(Boolean).length > 1)
    throw new KvError('CONFIG', 'bench routing: --trace, --generated and --cost exclude each other; say one of them');
  if (isCostAlone) return [];
  if (isGenerated) return generatedNames.map((name) => generated(name));
  if (path === undefined) return readTraces(bundledTraces);
  return [readTrace(path, path.split('/').at(-1)!.split(/[._]/)[0]!)];
}

function figuresOf(trace: string, load: Load, rows: readonly Row[]): Figure[] {
  const here = rows.filter((row) => row.load === load);
  const mine = here.find(({ policy }) => policy === ours)!;
  // `predicted` is ours without the queue.
  const others = here.filter(({ policy }) => policy !== ours && policy !== 'predicted');
  const soonest = others.reduce((a, b) => (b.ttftP90S < a.ttftP90S ? b : a));
  const fastest = others.reduce((a, b) => (b.tokensPerS > a.tokensPerS ? b : a));
  return [
    time(`ttft_p90_${trace}_${load}`, mine.ttftP90S * 1000, 'ms', soonest.ttftP90S * 1000, soonest.policy),
    rate(`throughput_${trace}_${load}`, mine.tokensPerS, 'tokens/s', fastest.tokensPerS, fastest.policy),
  ];
}

export default {
  name: 'routing',
  description: 'routing policies in a simulated cluster; cost of a decision',
  run,
} satisfies Suite;
