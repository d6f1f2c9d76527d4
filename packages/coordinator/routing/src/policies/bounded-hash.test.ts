import { expect, it } from 'vitest';
import { policies, type RoutedRequest, type WorkerState } from '../index.ts';

const request: RoutedRequest = { tokens: 64, maxTokens: 1, blockTokens: 16, keys: new Int32Array(8), session: '' };

function cpuMsOf(work: () => void): number {
  const { user, system } = process.cpuUsage();
  work();
  const now = process.cpuUsage();
  return (now.user + now.system - user - system) / 1_000;
}

it('sorts no points anew when a worker joins a thousand others', () => {
  const policy = policies['bounded-hash']();
  const idle = { waiting: 0, running: 0 } as WorkerState;
  const workers = new Array<WorkerState>(1_000).fill(idle);
  const choose = (): number => policy.choose(request, workers, 0, () => 0.5);
  const firstMs = cpuMsOf(choose);
  const tenMs = cpuMsOf(() => {
    for (let i = 0; i < 10; i++) {
      workers.push(idle);
      choose();
    }
  });
  // Each of them would take as long as the first time; measured: a fiftieth.
  expect(tenMs).toBeLessThan(2 * Math.max(firstMs, 10));
});
