/** What a request adds to a step is learned from all pods of a model together, and of each model apart. */
import { createLogger } from '@kvtier/telemetry';
import { afterEach, beforeEach, expect, it, vi } from 'vitest';
import { Fleet } from './fleet.ts';
import { Pod } from './testing/pod.ts';
import { SpokenDiscovery } from './testing/rig.ts';

const patience = { timeout: 20_000, interval: 5 };
let fleet: Fleet;
let discovery: SpokenDiscovery;
let pods: Pod[];
beforeEach(async () => {
  fleet = new Fleet({
    logger: createLogger('pod-test', 'silent'),
    times: { scrapeMs: 20, askMs: 5_000, podSilentMs: 5_000 },
  });
  discovery = new SpokenDiscovery();
  await fleet.start(discovery);
  pods = [];
});
afterEach(async () => {
  await fleet.close();
  for (const pod of pods) await pod.stop();
});

/** A pod with always as many streams: each scrape shows a hundred more tokens of each. */
async function podOf(model: string, running: number, stepS: number): Promise<Pod> {
  const pod = Object.assign(new Pod(), { model, figures: { waiting: 0, running, usedShare: 0 } });
  Object.defineProperty(pod, 'extra', {
    get: () => {
      const count = pod.scrapes * 100 * running;
      return `vllm:inter_token_latency_seconds_count ${count}\nvllm:inter_token_latency_seconds_sum ${count * stepS}\n`;
    },
  });
  await pod.start();
  pods.push(pod);
  return pod;
}

it('pods with few streams and with many say it together', async () => {
  const named = { a: await podOf('m', 4, 0.014), b: await podOf('m', 20, 0.03), c: await podOf('other', 9, 0.05) };
  discovery.say(...Object.entries(named).map(([name, { address }]) => ({ name, kind: 'openai' as const, address })));
  const loadOf = (name: string) => fleet.workers().find((one) => one?.record.name === name)!.load;
  await vi.waitFor(() => {
    for (const name of ['a', 'b']) {
      expect(loadOf(name).stepPerRequestS).toBeCloseTo(0.001, 6);
      expect(loadOf(name).stepS).toBeCloseTo(0.01, 6);
    }
    expect(loadOf('c').stepS).toBeCloseTo(0.05, 6);
  }, patience);
  expect(loadOf('c').stepPerRequestS).toBe(0);
});
