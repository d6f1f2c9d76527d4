/**
 * What a pod's `/metrics` (Prometheus' text form) says of its load, in vLLM's and in SGLang's names. A pod may be of several engines
 * (data parallel), each with its series: counts are added, shares averaged. Of SGLang the ranks of one engine may each have theirs, too,
 * of the same requests: these count once. What is missing is undefined, what is nonsense refused.
 *
 * Names: the Gateway API inference extension's model server protocol; vLLM's `vllm:*`, SGLang's `sglang:*`.
 */
import { KvError } from '@kvtier/errors';
import { SliceTimer } from '@kvtier/runtime';

export interface Scrape {
  readonly waiting: number;
  readonly running: number;
  /** Share of the KV blocks that is held, 0 to 1. */
  readonly usedShare: number;
  readonly blockTokens: number | undefined;
  readonly totalBlocks: number | undefined;
  readonly hashAlgorithm: string;
  /** Data-parallel engines that tell of themselves, at most 64. */
  readonly engines: number;
  /** It has put its weights away: it takes no requests until somebody wakes it. */
  readonly asleep: boolean;
  /** Seconds since 1970 at the start of its process; '': it does not say. */
  readonly startedAt: string;
  /** Since that start, of requests that have ended: how many, prompt tokens computed, seconds of that, tokens of answers, seconds between them. */
  readonly prefills: number;
  readonly prefillTokens: number;
  readonly prefillS: number;
  readonly intervals: number;
  readonly intervalS: number;
  /** Since that start: tokens of prompts that are computed, told as soon as one is. */
  readonly computedTokens: number;
}

/** Of several names of one figure the first that a pod has counts: some serve an old name beside the new one. */
const names = {
  waiting: ['vllm:num_requests_waiting', 'sglang:num_queue_reqs'],
  running: ['vllm:num_requests_running', 'sglang:num_running_reqs'],
  usedShare: ['vllm:kv_cache_usage_perc', 'vllm:gpu_cache_usage_perc', 'sglang:token_usage'],
  config: ['vllm:cache_config_info', 'sglang:cache_config_info'],
  // SGLang from 0.5.12 on, in place of its line above; 0 until it knows.
  pageTokens: ['sglang:page_size'],
  pages: ['sglang:num_pages'],
  sleep: ['vllm:engine_sleep_state'],
  startedAt: ['process_start_time_seconds'],
  prefills: ['vllm:request_prefill_kv_computed_tokens_count'],
  prefillTokens: ['vllm:request_prefill_kv_computed_tokens_sum'],
  prefillS: ['vllm:request_prefill_time_seconds_sum'],
  intervals: [
    'vllm:inter_token_latency_seconds_count',
    'vllm:time_per_output_token_seconds_count', // before 0.11
    'sglang:inter_token_latency_seconds_count',
  ],
  intervalS: [
    'vllm:inter_token_latency_seconds_sum',
    'vllm:time_per_output_token_seconds_sum', // before 0.11
    'sglang:inter_token_latency_seconds_sum',
  ],
  // By where tokens came from: those alone that were computed.
  computedTokens: ['vllm:prompt_tokens_by_source_total', 'sglang:realtime_tokens_total'],
} as const;
type Field = keyof typeof names;
const computed = ({ labels }: Sample): boolean =>
  labels.get('source') === 'local_compute' || labels.get('mode') === 'prefill_compute';
const known: ReadonlySet<string> = new Set(Object.values(names).flat());

interface Sample {
  readonly value: number;
  readonly labels: ReadonlyMap<string, string>;
}

/** As many as a record may say (`events.ranks`). */
const mostEngines = 64;
const mostBlockTokens = 65_536;
const mostBlocks = 2 ** 40;
const mostRequests = 2 ** 32;

/** In slices: a text may be long, and nothing else. @throws KvError PROTOCOL: no load in there, or a number that cannot be */
export async function scrapeOf(worker: string, text: string): Promise<Scrape> {
  const samples = await read(text);
  const of = (field: Field): readonly Sample[] => {
    for (const name of names[field]) {
      const list = samples.get(name);
      if (list !== undefined && list.length > 0) return name.startsWith('sglang:') ? ofEngines(list) : list;
    }
    return [];
  };
  const refuse = (what: string): never => {
    throw new KvError('PROTOCOL', `worker ${worker}: /metrics ${what}; serve vLLM's or SGLang's metrics there`);
  };
  const sum = (field: Field, most: number, counts: (sample: Sample) => boolean = () => true): number => {
    let total = 0;
    for (const sample of of(field)) {
      if (!counts(sample)) continue;
      const { value } = sample;
      if (!(value >= 0 && value <= most)) refuse(`has ${value} for ${names[field].join(' or ')}`);
      total += value;
    }
    return total;
  };
  if (of('waiting').length === 0 || of('running').length === 0)
    refuse(`has neither ${names.waiting[0]} nor ${names.waiting[1]}`);
  // A share may exceed 1 by rounding alone.
  const shares = sum('usedShare', 1.001);
  const { blockTokens, totalBlocks, hashAlgorithm } = cacheOf(of, refuse);
  const asleep = of('sleep').some(({ value, labels }) => labels.get('sleep_state') === 'awake' && value === 0);
  const started = of('startedAt')[0]?.value;
  return {
    waiting: Math.round(sum('waiting', mostRequests)),
    running: Math.round(sum('running', mostRequests)),
    usedShare: Math.min(1, of('usedShare').length === 0 ? 0 : shares / of('usedShare').length),
    blockTokens,
    totalBlocks,
    hashAlgorithm: hashAlgorithm.slice(0, 64),
    engines: enginesOf(of('waiting')),
    asleep,
    startedAt: started === undefined ? '' : String(started),
    prefills: sum('prefills', Number.MAX_SAFE_INTEGER),
    prefillTokens: sum('prefillTokens', Number.MAX_SAFE_INTEGER),
    prefillS: sum('prefillS', Number.MAX_SAFE_INTEGER),
    intervals: sum('intervals', Number.MAX_SAFE_INTEGER),
    intervalS: sum('intervalS', Number.MAX_SAFE_INTEGER),
    computedTokens: sum('computedTokens', Number.MAX_SAFE_INTEGER, computed),
  };
}

/**
 * A series for each data parallel engine. Its ranks (tensor and pipeline parallel, of experts), all of which tell where it is started so,
 * schedule the same requests, and one may be a step behind: the most counts. By priority all is told again, beside the sum, whose priority
 * is empty.
 */
function ofEngines(samples: readonly Sample[]): readonly Sample[] {
  const engines = new Map<string, Sample>();
  for (const sample of samples) {
    if ((sample.labels.get('priority') ?? '') !== '') continue;
    const own = [...sample.labels].filter(([name]) => name === 'dp_rank' || !name.endsWith('_rank'));
    const engine = JSON.stringify(own.toSorted());
    const last = engines.get(engine);
    if (last === undefined || !(last.value >= sample.value || Number.isNaN(last.value))) engines.set(engine, sample);
  }
  return [...engines.values()];
}

/** vLLM numbers them in one label, SGLang in another. */
const enginesOf = (samples: readonly Sample[]): number =>
  Math.min(mostEngines, new Set(samples.map(({ labels }) => labels.get('engine') ?? labels.get('dp_rank'))).size);

/** In lines whose labels say it (vLLM's, SGLang's before 0.5.12), or in gauges of their own. */
function cacheOf(of: (field: Field) => readonly Sample[], refuse: (what: string) => never) {
  let blockTokens: number | undefined;
  let totalBlocks: number | undefined;
  let hashAlgorithm = '';
  for (const { labels } of of('config')) {
    const size = labels.get('block_size') ?? labels.get('page_size');
    const blocks = labels.get('num_gpu_blocks') ?? labels.get('num_pages');
    hashAlgorithm = labels.get('prefix_caching_hash_algo') ?? hashAlgorithm;
    if (size !== undefined)
      blockTokens = wholeOf(size, mostBlockTokens) ?? refuse(`has blocks of ${JSON.stringify(size)} tokens`);
    // vLLM says "None" until it knows.
    if (blocks !== undefined && /^\d+$/.test(blocks))
      totalBlocks = (totalBlocks ?? 0) + (wholeOf(blocks, mostBlocks) ?? refuse(`has ${blocks} blocks`));
  }
  const gauge = (field: Field, most: number): number[] =>
    of(field)
      .filter(({ value }) => value !== 0)
      .map(({ value }) => wholeOf(String(value), most) ?? refuse(`has ${value} for ${names[field].join(' or ')}`));
  const pages = gauge('pages', mostBlocks);
  return {
    blockTokens: blockTokens ?? gauge('pageTokens', mostBlockTokens)[0],
    totalBlocks: totalBlocks ?? (pages.length > 0 ? pages.reduce((all, one) => all + one) : undefined),
    hashAlgorithm,
  };
}

function wholeOf(text: string, most: number): number | undefined {
  const value = Number(text);
  return /^\d+$/.test(text) && value >= 1 && value <= most ? value : undefined;
}

const mostSamples = 512;
/** vLLM's longest line has some 2,000. */
const mostLineChars = 16_384;
const linesPerLook = 256;
/** What a line of ours may begin with. */
const beginnings = new Set([...known].map((name) => name.charCodeAt(0)));

/** Of each name the samples, at most some hundred; other lines, and those that are too long, are passed over. */
async function read(text: string): Promise<Map<string, Sample[]>> {
  const samples = new Map<string, Sample[]>();
  const timer = new SliceTimer();
  for (let at = 0, lines = 1; at < text.length; lines++) {
    const next = text.indexOf('\n', at);
    const end = next < 0 ? text.length : next;
    let isRead = false;
    if (beginnings.has(text.charCodeAt(at)) && end - at <= mostLineChars) {
      const line = text.slice(at, end);
      const nameEnd = line.search(/[{\s]/);
      const name = nameEnd < 0 ? line : line.slice(0, nameEnd);
      if (known.has(name)) {
        const list = samples.get(name) ?? [];
        isRead = list.length < mostSamples;
        const sample = isRead ? sampleOf(line.slice(nameEnd)) : undefined;
        if (sample) list.push(sample);
        samples.set(name, list);
      }
    }
    at = end + 1;
    // A line of two thousand labels takes longer than hundreds that are passed by.
    if ((isRead || lines % linesPerLook === 0) && timer.due) await timer.next();
  }
  return samples;
}

/** A name begins at a boundary: else a long run of letters would be read anew from each of them. */
const labelPattern = /\b([A-Za-z_]\w*)="((?:[^"\\]|\\.)*)"/g;

/** What follows a name: `{a="b"} 1.5` or ` 1.5`, and perhaps a time. */
function sampleOf(rest: string): Sample | undefined {
  const brace = rest.startsWith('{') ? rest.lastIndexOf('}') : -1;
  if (rest.startsWith('{') && brace < 0) return undefined;
  const labels = new Map<string, string>();
  for (const [, name, value] of rest.slice(0, brace + 1).matchAll(labelPattern)) labels.set(name!, value!);
  const value = rest
    .slice(brace + 1)
    .trim()
    .split(/\s+/)[0]!;
  return value === '' ? undefined : { value: value === '+Inf' ? Number.POSITIVE_INFINITY : Number(value), labels };
}
