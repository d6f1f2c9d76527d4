/** Whoever asks for metrics, and however often: each worker is asked once at a time, and not again for a moment. */
import type { Worker } from '@kvtier/registry';
import { expect, it, vi } from 'vitest';
import type { Engines } from './engines.ts';
import { Harness } from './testing/harness.ts';
import { SharedMetrics } from './worker-metrics.ts';

const at = new Harness();

it('ten who ask at once, at either listener, share what each worker is asked once', async () => {
  let arrived = 0;
  const moreMetrics = async (): Promise<string> => `arrived ${++arrived}`;
  await at.open({ operations: { host: '127.0.0.1', port: 0 }, moreMetrics });
  await at.start('b');
  await at.workers(at.named('a'), at.named('b'));
  const engine = vi.spyOn(at.fleet, 'engine').mockImplementation((number) => {
    const metrics = async (): Promise<string> => {
      await vi.waitUntil(() => arrived === 10, { timeout: 20_000, interval: 5 });
      return `# TYPE kvtier_engine_steps_total counter\nkvtier_engine_steps_total ${number}\n`;
    };
    return { metrics } as unknown as ReturnType<typeof at.fleet.engine>;
  });
  const urls = Array.from({ length: 10 }, (_, i) => (i % 2 === 0 ? at.server.url : at.server.operationsUrl!));
  const texts = await Promise.all(urls.map(async (url) => (await fetch(`${url}/metrics`)).text()));
  expect(engine.mock.calls.map(([number]) => number).sort()).toEqual([0, 1]);
  for (const text of texts)
    expect(text).toContain('kvtier_engine_steps_total{worker="a"} 0\nkvtier_engine_steps_total{worker="b"} 1\n');
});

it('an answer is good for a quarter of a second after it came, and one that is on its way for as long as it takes', async () => {
  let nowMs = 0;
  const asked: ((text: string) => void)[] = [];
  const workers = [{ number: 0, state: 'ready', record: { kind: 'kvtier', name: 'a' } } as Worker];
  const metrics = () => new Promise<string>((resolve) => asked.push(resolve));
  const engines = { workers: () => workers, engine: () => ({ metrics }) } as unknown as Engines;
  const shared = new SharedMetrics(engines, () => nowMs);
  const first = shared.text();
  nowMs = 1_000;
  const second = shared.text();
  expect(asked).toHaveLength(1);
  asked[0]!('up 1');
  expect([await first, await second]).toEqual(['up 1', 'up 1']);
  nowMs = 1_249;
  expect([await shared.text(), asked.length]).toEqual(['up 1', 1]);
  nowMs = 1_250;
  const third = shared.text();
  expect(asked).toHaveLength(2);
  asked[1]!('up 2');
  expect(await third).toBe('up 2');
});
