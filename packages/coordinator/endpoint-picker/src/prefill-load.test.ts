/** What a prefill pod has to do while a gateway tells nothing of the answer yet: what its scrapes say. */
import { PodLoad, scrapeOf } from '@kvtier/registry/testing';
import { expect, it } from 'vitest';
import { BarePicker } from './testing/index.ts';

const tokensPerS = 10_000;

it('a prompt is computed there once it has had its time and nobody waits, whenever its answer comes', async () => {
  let nowMs = 1_000;
  const bare = new BarePicker();
  const { workers } = bare;
  const loads = (['decode', 'prefill'] as const).map((role) => {
    const load = new PodLoad(() => nowMs);
    Object.defineProperty(bare.add(role, role), 'load', { get: () => load.load(50_000, () => tokensPerS) });
    return load;
  });
  workers.sent = (number, share) => loads[number]!.send(share, nowMs, () => {});
  const idle = await scrapeOf('p', 'vllm:num_requests_waiting 0\nvllm:num_requests_running 1\n');
  const scrape = (): void => {
    for (const load of loads) load.scraped(idle, nowMs, load.open, nowMs);
  };
  /** Tokens ahead and requests that run, at both. */
  const ahead = (): number[][] => workers.all.map((worker) => [worker!.load.tokensAhead, worker!.load.running]);

  const { endpoint, prefiller, share } = await bare.pick();
  expect([endpoint, prefiller]).toEqual(['10.0.0.0:8000', '10.0.0.1:8000']);
  expect(ahead()).toEqual([
    [0, 1],
    [2_000, 0],
  ]);
  nowMs += 100; // half of its time
  scrape();
  expect(ahead()[1]).toEqual([2_000, 0]);
  nowMs += 100;
  scrape();
  expect(ahead()[1]).toEqual([0, 1]);
  share.firstToken();
  expect(ahead()).toEqual([
    [0, 1],
    [0, 0],
  ]);
  share.ended();
  bare.dispatch.close();
});

it('a prompt that takes long is computed there: the leg is the sidecar’s, and our own bound on legs cuts none', async () => {
  const bare = new BarePicker({ prefillMs: 100 });
  for (const role of ['decode', 'prefill'] as const)
    Object.assign(bare.add(role, role).load, { prefillTokensPerS: tokensPerS });
  const { prefiller, share } = await bare.pick(); // 200 ms
  expect(prefiller).toBe('10.0.0.1:8000');
  share.ended();
  bare.dispatch.close();
});
