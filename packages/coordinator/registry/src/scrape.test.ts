/** Metrics of vLLM and SGLang as a coordinator reads them, and what is refused. */
import fc from 'fast-check';
import { describe, expect, it } from 'vitest';
import { scrapeOf } from './scrape.ts';

const least = 'vllm:num_requests_waiting 0\nvllm:num_requests_running 0\n';

describe('scrapeOf', () => {
  it('adds up the engines of a pod, and averages their shares', async () => {
    const text = `# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{engine="0",model_name="a{b}c"} 2.0
vllm:num_requests_waiting{engine="1",model_name="a{b}c"} 3.0
vllm:num_requests_waiting_by_reason{engine="0",reason="capacity"} 9.0
vllm:num_requests_running{engine="0"} 1.0
vllm:num_requests_running{engine="1"} 4.0 1700000000000
vllm:kv_cache_usage_perc{engine="0"} 0.25
vllm:kv_cache_usage_perc{engine="1"} 0.75
vllm:cache_config_info{block_size="16",engine="0",num_gpu_blocks="100",prefix_caching_hash_algo="sha256"} 1.0
vllm:cache_config_info{block_size="16",engine="1",num_gpu_blocks="50"} 1.0
vllm:engine_sleep_state{engine="0",sleep_state="awake"} 0.0
vllm:request_prefill_kv_computed_tokens_sum{engine="0"} 1000.0
vllm:request_prefill_kv_computed_tokens_count{engine="0"} 4.0
vllm:request_prefill_time_seconds_sum{engine="0"} 0.5
vllm:prompt_tokens_by_source_total{engine="0",source="local_compute"} 700
vllm:prompt_tokens_by_source_total{engine="1",source="local_compute"} 300
vllm:prompt_tokens_by_source_total{engine="0",source="local_cache_hit"} 9000
vllm:inter_token_latency_seconds_sum{engine="0"} 3
vllm:inter_token_latency_seconds_count{engine="0"} 300
process_start_time_seconds 1.7e9`;
    expect(await scrapeOf('w', text)).toEqual({
      waiting: 5,
      running: 5,
      usedShare: 0.5,
      blockTokens: 16,
      totalBlocks: 150,
      hashAlgorithm: 'sha256',
      engines: 2,
      asleep: true,
      startedAt: '1700000000',
      prefills: 4,
      prefillTokens: 1_000,
      prefillS: 0.5,
      intervals: 300,
      intervalS: 3,
      computedTokens: 1_000,
    });
  });

  it('reads SGLang’s names', async () => {
    const text = `sglang:num_queue_reqs{tp_rank="0"} 7
sglang:num_running_reqs{tp_rank="0"} 2
sglang:token_usage{tp_rank="0"} 0.4
sglang:realtime_tokens_total{mode="prefill_compute",tp_rank="0"} 600
sglang:realtime_tokens_total{mode="prefill_cache",tp_rank="0"} 50
sglang:realtime_tokens_total{mode="decode",tp_rank="0"} 40
sglang:cache_config_info{num_pages="500",page_size="64"} 1`;
    expect(await scrapeOf('w', text)).toMatchObject({
      computedTokens: 600,
      waiting: 7,
      running: 2,
      usedShare: 0.4,
      blockTokens: 64,
      totalBlocks: 500,
      asleep: false,
      startedAt: '',
    });
  });

  it('counts an SGLang engine once, however many of its ranks tell of it', async () => {
    const ranks = (name: string, dpRank: string, values: readonly number[]): string =>
      values
        .map(
          (value, tp) =>
            `sglang:${name}{model_name="m",tp_rank="${tp}",pp_rank="0",moe_ep_rank="0"${dpRank}} ${value}\n`,
        )
        .join('');
    const of = (dpRank: string, values: Record<string, readonly number[]>): string =>
      Object.entries(values)
        .map(([name, each]) => ranks(name, dpRank, each))
        .join('');
    const alone = { num_queue_reqs: [7, 7, 6, 7], num_running_reqs: [2, 3, 3, 3], token_usage: [0.4, 0.4, 0.4, 0.4] };
    const pages = { page_size: [64, 64, 64, 64], num_pages: [500, 500, 500, 500] };
    expect(await scrapeOf('w', of('', { ...alone, ...pages }))).toMatchObject({
      ...{ waiting: 7, running: 3, usedShare: 0.4, blockTokens: 64, totalBlocks: 500, engines: 1 },
    });
    // Engines beside each other hold requests and pages of their own.
    const other = { num_queue_reqs: [1, 1], num_running_reqs: [4, 4], token_usage: [0.2, 0.2], num_pages: [250, 250] };
    const both = of(',dp_rank="0"', { ...alone, ...pages }) + of(',dp_rank="1"', other);
    const found = await scrapeOf('w', both);
    expect(found).toMatchObject({ waiting: 8, running: 7, blockTokens: 64, totalBlocks: 750, engines: 2 });
    expect(found.usedShare).toBeCloseTo(0.3);
    const crowd = { num_queue_reqs: [0], num_running_reqs: [0] };
    const many = Array.from({ length: 100 }, (_, rank) => of(`,dp_rank="${rank}"`, crowd)).join('');
    expect(await scrapeOf('w', many)).toMatchObject({ engines: 64 });
    const byPriority = ['', '0', '5'].map((priority, i) => [priority, [3, 1, 2][i]] as const);
    const lines = (name: string): string =>
      byPriority.map(([priority, value]) => `sglang:${name}{tp_rank="0",priority="${priority}"} ${value}\n`).join('');
    const queued = lines('num_queue_reqs') + lines('num_running_reqs');
    expect(await scrapeOf('w', queued)).toMatchObject({ waiting: 3, running: 3 });
    // Of what its front end counts, series are of kinds of requests.
    const kinds =
      'sglang:inter_token_latency_seconds_count{kind="a"} 2\nsglang:inter_token_latency_seconds_count{kind="b"} 3';
    expect(await scrapeOf('w', queued + kinds)).toMatchObject({ intervals: 5 });
    await expect(scrapeOf('w', of('', { ...alone, num_running_reqs: [1, Number.NaN, 2] }))).rejects.toThrow(
      'has NaN for',
    );
  });

  it('reads SGLang’s own gauges of its pages, which newer versions have in place of a line', async () => {
    const text = `sglang:num_queue_reqs{tp_rank="0"} 0
sglang:num_running_reqs{tp_rank="0"} 0
sglang:page_size{dp_rank="0"} 64.0
sglang:page_size{dp_rank="1"} 64.0
sglang:num_pages{dp_rank="0"} 500.0
sglang:num_pages{dp_rank="1"} 250.0`;
    expect(await scrapeOf('w', text)).toMatchObject({ blockTokens: 64, totalBlocks: 750 });
    const both = `${text}\nsglang:cache_config_info{num_pages="750",page_size="64"} 1`;
    expect(await scrapeOf('w', both)).toMatchObject({ blockTokens: 64, totalBlocks: 750 });
    const early = text.replace(/(64|500|250)\.0/g, '0.0');
    expect(await scrapeOf('w', early)).toMatchObject({ blockTokens: undefined, totalBlocks: undefined });
  });

  it('reads the names that vLLM had for figures before, and those of today where both are there', async () => {
    const before = `vllm:gpu_cache_usage_perc 0.25
vllm:time_per_output_token_seconds_sum 3
vllm:time_per_output_token_seconds_count 300`;
    expect(await scrapeOf('w', least + before)).toMatchObject({ usedShare: 0.25, intervals: 300, intervalS: 3 });
    const both = `${before}
vllm:kv_cache_usage_perc 0.5
vllm:inter_token_latency_seconds_sum 4
vllm:inter_token_latency_seconds_count 200`;
    expect(await scrapeOf('w', least + both)).toMatchObject({ usedShare: 0.5, intervals: 200, intervalS: 4 });
  });

  it('what a pod does not know yet is missing, not wrong', async () => {
    const text = `${least}vllm:cache_config_info{block_size="16",num_gpu_blocks="None"} 1.0`;
    expect(await scrapeOf('w', text)).toMatchObject({ blockTokens: 16, totalBlocks: undefined });
  });

  it.each([
    ['no load', 'up 1\n', 'has neither vllm:num_requests_waiting nor sglang:num_queue_reqs'],
    ['NaN', `${least}vllm:num_requests_waiting NaN`, 'has NaN for vllm:num_requests_waiting'],
    ['a negative count', `${least}vllm:num_requests_running -1`, 'has -1 for vllm:num_requests_running'],
    ['a huge count', `${least}vllm:num_requests_running 1e300`, 'has 1e+300 for'],
    ['no end', `${least}vllm:num_requests_running +Inf`, 'has Infinity for'],
    ['a share above all', `${least}vllm:kv_cache_usage_perc 1.5`, 'has 1.5 for vllm:kv_cache_usage_perc'],
    ['no number', `${least}vllm:kv_cache_usage_perc much`, 'has NaN for vllm:kv_cache_usage_perc'],
    ['blocks of no tokens', `${least}vllm:cache_config_info{block_size="0"} 1`, 'has blocks of "0" tokens'],
    ['blocks of many tokens', `${least}vllm:cache_config_info{block_size="1e9"} 1`, 'has blocks of "1e9" tokens'],
    ['pages of half a token', `${least}sglang:page_size 0.5`, 'has 0.5 for sglang:page_size'],
    ['pages of many tokens', `${least}sglang:page_size 1e9`, 'has 1000000000 for sglang:page_size'],
    ['no pages', `${least}sglang:num_pages NaN`, 'has NaN for sglang:num_pages'],
    ['too many blocks', `${least}vllm:cache_config_info{num_gpu_blocks="${'9'.repeat(20)}"} 1`, 'blocks'],
  ])('%s is refused', async (_, text, why) => {
    await expect(scrapeOf('w', text)).rejects.toThrow(
      expect.objectContaining({ code: 'PROTOCOL', message: expect.stringContaining(why) }),
    );
  });

  it('whatever the text, it answers what can be or refuses, and soon', async () => {
    const words = fc.constantFrom(
      'vllm:num_requests_waiting',
      'vllm:num_requests_running',
      '{a="',
      '"}',
      '{',
      '}',
      ' ',
      '\n',
      '1',
      '#',
      '\\',
      'vllm:cache_config_info{block_size="',
    );
    await fc.assert(
      fc.asyncProperty(fc.array(fc.oneof(words, fc.string()), { maxLength: 60 }), async (parts) => {
        try {
          const scrape = await scrapeOf('w', parts.join(''));
          for (const value of [scrape.waiting, scrape.running, scrape.usedShare])
            expect(value).toBeGreaterThanOrEqual(0);
        } catch (error) {
          expect(error).toMatchObject({ code: 'PROTOCOL' });
        }
      }),
    );
    const from = performance.now();
    await scrapeOf(
      'w',
      `${least}${'other_metric{a="b",c="d"} 1\n'.repeat(100_000)}vllm:num_requests_waiting{${'a="b",'.repeat(100_000)}} 1`,
    );
    // Linear, some 30 ms; with the square of either length it would be minutes.
    expect(performance.now() - from).toBeLessThan(10_000);
  });

  it('a long word where labels are costs its length, not the square of it', async () => {
    const cpuMs = (): number => process.cpuUsage().user / 1_000;
    const fromMs = cpuMs();
    const lines = `vllm:num_requests_waiting{${'a'.repeat(16_000)}} 1\n`.repeat(20);
    expect((await scrapeOf('w', `${lines}${least}`)).waiting).toBeGreaterThanOrEqual(0);
    expect(cpuMs() - fromMs).toBeLessThan(1_000); // some 10; with the square 4,000 and more
  });
});
