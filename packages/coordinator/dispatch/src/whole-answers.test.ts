/** Pods whose answers come as a whole take as many requests as they have time for: no first token tells that a prompt is computed. */
import { PodLoad, scrapeOf } from '@kvtier/registry/testing';
import { afterEach, beforeEach, expect, it, vi } from 'vitest';
import { Dispatcher } from './dispatcher.ts';
import { FakeHoldings, FakeWorkers, recordOf } from './testing/fake-workers.ts';

beforeEach(() => {
  vi.useFakeTimers({ toFake: ['Date', 'setTimeout', 'clearTimeout', 'setImmediate', 'clearImmediate'] });
  vi.spyOn(performance, 'now').mockImplementation(() => Date.now());
});
afterEach(() => {
  vi.restoreAllMocks();
  vi.useRealTimers();
});

const idle = await scrapeOf('p', 'vllm:num_requests_waiting 0\nvllm:num_requests_running 0\n');
const tokensPerS = 10_000;
const answerMs = 4_000;

it.each([
  ['streamed', true, undefined],
  ['whole', false, undefined],
  ['whole, and all lean to prefill', false, 'prefill' as const],
])('of 40 prompts that come within 2 s none is refused: %s', async (_, isStreamed, leaning) => {
  const workers = new FakeWorkers();
  const pods = ['a', 'b'].map((name) => {
    const pod = new PodLoad();
    const worker = workers.add(name, { totalBlocks: 50_000 });
    worker.record = recordOf(name, { kind: 'openai', address: 'http://10.0.0.1:8000' });
    worker.leaning = leaning;
    Object.defineProperty(worker, 'load', { get: () => pod.load(50_000, () => tokensPerS) });
    return pod;
  });
  workers.sent = (number, share) => pods[number]!.send(share, performance.now(), () => workers.told());
  const running = [0, 0];
  const scrape = (): void => {
    const nowMs = performance.now();
    for (const [at, pod] of pods.entries()) pod.scraped({ ...idle, running: running[at]! }, nowMs, pod.open, nowMs);
    workers.told();
  };
  const dispatcher = new Dispatcher({ workers, holdings: new FakeHoldings(), maxWaitMs: 5_000 });
  const ends: string[] = [];
  const one = async (at: number): Promise<void> => {
    const choice = await dispatcher.choose(
      {
        ...{ id: `r${at}`, model: 'demo', among: undefined, except: new Set<string>(), isStreamed },
        ...{ tokens: 2_000, blockTokens: 16, maxTokens: 300, session: '' },
        keys: Int32Array.from({ length: 250 }, (_, half) => at * 1_000 + half),
      },
      new AbortController().signal,
    );
    const { number } = choice.worker;
    running[number]!++;
    if (isStreamed) setTimeout(() => choice.firstToken(true), 50);
    setTimeout(() => {
      running[number]!--;
      ends.push('answered');
      choice.ended(300);
    }, answerMs);
  };
  let most = 0;
  for (let ms = 0; ms < 12_000; ms += 50) {
    if (ms % 250 === 0) scrape();
    if (ms < 2_000) void one(ms / 50).catch(({ message }: Error) => void ends.push(message));
    await vi.advanceTimersByTimeAsync(50);
    most = Math.max(most, running[0]! + running[1]!);
  }
  expect(ends).toEqual(new Array(40).fill('answered'));
  expect(most).toBeGreaterThanOrEqual(30);
  dispatcher.close();
});
