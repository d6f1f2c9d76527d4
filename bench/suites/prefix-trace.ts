/**
 * The radix tree against the block pool on recorded requests: prefix hits per capacity (of the trace's distinct blocks, one
 * id as one block, both in the same bytes), and the time that each takes per request with blocks of 16 tokens.
 * Options: --traces DIR (default: the beginnings of three traces that come with the project), --policy NAME of the tree.
 * "whole" is the tree that evicts whole nodes, as SGLang's does; without it, no more of a leaf than is needed.
 * Beside the tree's figures stand the block pool's of the same run; beside the pool's hits those without any limit.
 */
import { parseArgs } from 'node:util';
import { KvError } from '@kvtier/errors';
import { type RadixPolicy, radixPolicies } from '@kvtier/prefix-cache';
import { type Figure, median, rate, type Suite, time } from '../figures.ts';
import { replayIds, timeRequests } from '../trace-replay.ts';
import { bundledTraces, readTraces, type Trace } from '../traces.ts';

/** Percent of the distinct blocks. */
const capacities = [1, 5, 10, 25, 50];
const blockTokens = 16;
const rounds = 5;
/** Tokens of the requests that are timed, so that a long trace takes no longer than a short one. */
const timedTokens = 3_000_000;

function optionsOf(args: readonly string[]): { traces: string; policy: RadixPolicy } {
  let values: { traces?: string; policy?: string };
  try {
    ({ values } = parseArgs({ args: [...args], options: { traces: { type: 'string' }, policy: { type: 'string' } } }));
  } catch (error) {
    throw new KvError('CONFIG', `prefix-trace: ${(error as Error).message}; there are --traces DIR and --policy NAME`);
  }
  const policy = radixPolicies.find((name) => name === (values.policy ?? 'lru'));
  if (!policy) throw new KvError('CONFIG', `--policy: "${values.policy}" is not one of ${radixPolicies.join(', ')}`);
  return { traces: values.traces ?? bundledTraces, policy };
}

function hitFigures(trace: Trace, policy: RadixPolicy, log: (line: string) => void): Figure[] {
  const { name, requests, uniqueBlocks } = trace;
  const infinite = replayIds('blocks', requests, uniqueBlocks);
  const percent = (hits: number): number => (100 * hits) / infinite.accesses;
  const figures: Figure[] = [];
  for (const capacity of capacities) {
    const blocks = Math.ceil((uniqueBlocks * capacity) / 100);
    const pool = replayIds('blocks', requests, blocks);
    const radix = replayIds('radix', requests, blocks, { policy });
    const whole = replayIds('radix', requests, blocks, { policy, trimLeaves: false });
    if (pool.tooLarge > 0) log(`${name} at ${capacity} %: ${pool.tooLarge} requests do not fit and find nothing`);
    const at = `${name}_hits_at_${capacity}pct`;
    figures.push(
      rate(`${at}_radix`, percent(radix.hits), '%', percent(pool.hits), 'block pool of as many bytes'),
      rate(`${at}_radix_whole`, percent(whole.hits), '%', percent(pool.hits), 'block pool of as many bytes'),
      rate(`${at}_blocks`, percent(pool.hits), '%', percent(infinite.hits), 'no limit of capacity'),
    );
  }
  const unlimited = replayIds('radix', requests, uniqueBlocks, { policy });
  const limit = percent(infinite.hits);
  return [
    ...figures,
    rate(`${name}_hits_unlimited_radix`, percent(unlimited.hits), '%', limit, 'block pool, no limit'),
  ];
}

function timeFigures(trace: Trace, policy: RadixPolicy, log: (line: string) => void): Figure[] {
  const { name, blockTokens: idTokens } = trace;
  let tokens = 0;
  const requests = trace.requests.filter((ids) => {
    tokens += ids.length * idTokens;
    return tokens <= timedTokens;
  });
  const unique = new Set(requests.flatMap((ids) => [...ids])).size;
  const longest = requests.reduce((most, ids) => Math.max(most, ids.length), 0) * idTokens + 1;
  // A quarter of what is distinct, so that both evict; a request must fit.
  const blocks = Math.max(Math.ceil((unique * idTokens) / blockTokens / 4), Math.ceil(longest / blockTokens));
  const times = Array.from({ length: rounds + 1 }, () =>
    timeRequests(requests, idTokens, { blocks, blockTokens, maxModelTokens: longest, policy }),
  ).slice(1); // the first round warms up
  const of = (pick: (one: (typeof times)[number]) => number): number => median(times.map(pick));
  const meanTokens = Math.round(requests.reduce((sum, ids) => sum + ids.length * idTokens, 0) / requests.length);
  log(`${name}: ${requests.length} requests of ${meanTokens} tokens on average, ${blocks} blocks of ${blockTokens}`);
  const radixUs = of(({ radixUs }) => radixUs);
  const pool = of(({ blocksUs }) => blocksUs);
  const hashed = of(({ blocksUs, hashUs }) => blocksUs + hashUs);
  return [
    time(`${name}_request`, radixUs, 'us', hashed, 'block pool, its hashes (sha256_cbor) included'),
    time(`${name}_request_unhashed`, radixUs, 'us', pool, 'block pool, hashes given'),
  ];
}

const suite: Suite = {
  name: 'prefix-trace',
  description: 'radix tree against block pool on recorded requests: hits per capacity, time per request',
  async run({ args, log }) {
    const { traces, policy } = optionsOf(args);
    const figures: Figure[] = [];
    for (const trace of readTraces(traces)) {
      log(`${trace.name}: ${trace.requests.length} requests, ${trace.uniqueBlocks} distinct blocks`);
      figures.push(...hitFigures(trace, policy, log), ...timeFigures(trace, policy, log));
    }
    return figures;
  },
};

export default suite;
