/** One simulated worker: what its steps compute. */
import { expect, it } from 'vitest';
import { hardware } from './routing/hardware.ts';
import { type Job, SimulatedWorker } from './routing/worker.ts';

const blockTokens = 64;

const jobOf = (number: number, blocks: number[], inputTokens: number): Job => ({
  ...{ number, arrivedS: 0, blocks: Int32Array.from(blocks), inputTokens, outputTokens: 1_000 },
  ...{ ready: 0, held: 0, generated: 0, firstTokenS: -1, endedS: -1, expected: inputTokens, expectedAnswer: 1_000 },
  found: { gpu: 0, host: 0, peer: 0 },
});

it('a request whose blocks come while a step runs is computed by the next step, not by that one', () => {
  const worker = new SimulatedWorker(0, hardware, blockTokens, {
    stored: () => {},
    removed: () => {},
    // Of the second request another host holds all.
    elsewhere: (_worker, job, from) => (job.number === 1 ? job.blocks.length - from : 0),
  });
  const computing = jobOf(0, [], 1_000);
  const brought = jobOf(1, [1, 2, 3, 4], 400);
  worker.enqueue(computing);
  worker.enqueue(brought);
  const [load] = worker.begin(0);
  const firstEndsS = worker.endsS!;
  expect(load!.atS).toBeLessThan(firstEndsS);
  worker.loaded(brought);
  expect(worker.waiting).toBe(2);
  expect(worker.tokensAhead).toBe(1_000 + 400 - 4 * blockTokens);
  worker.finish(firstEndsS);
  expect([computing.firstTokenS, brought.firstTokenS]).toEqual([firstEndsS, -1]);
  worker.begin(firstEndsS);
  const secondEndsS = worker.endsS!;
  const { stepS, prefillTokensPerS, stepPerRequestS } = hardware;
  const computedS = (400 - 4 * blockTokens) / prefillTokensPerS;
  expect(secondEndsS - firstEndsS).toBeCloseTo(Math.max(stepS, computedS) + 2 * stepPerRequestS, 9);
  worker.finish(secondEndsS);
  expect(brought.firstTokenS).toBe(secondEndsS);
});

it('says of a step that only gives tokens for how long it has run, however many of them run at once', () => {
  const worker = new SimulatedWorker(0, hardware, blockTokens, {
    stored: () => {},
    removed: () => {},
    elsewhere: () => 0,
  });
  expect(worker.step(0)).toEqual({});
  const job = jobOf(0, [], 100);
  worker.enqueue(job);
  worker.begin(0);
  expect(worker.step(0.003)).toEqual({ stepTokens: 100, stepForS: 0.003 });
  const firstEndsS = worker.endsS!;
  worker.finish(firstEndsS);
  worker.begin(firstEndsS);
  const tokenS = hardware.stepS + hardware.stepPerRequestS;
  const { stepTokens, stepForS } = worker.step(firstEndsS + 5 * tokenS + 0.002);
  expect(stepTokens).toBe(0);
  expect(stepForS).toBeCloseTo(0.002, 9);
});

it('was busy for as long as its steps ran, however often arrivals cut the steps ahead of it', () => {
  const worker = new SimulatedWorker(0, hardware, blockTokens, {
    stored: () => {},
    removed: () => {},
    elsewhere: () => 0,
  });
  worker.enqueue(jobOf(0, [], 100));
  worker.begin(0);
  let nowS = worker.endsS!;
  worker.finish(nowS);
  for (let arrival = 0; arrival < 100; arrival++) {
    worker.begin(nowS);
    worker.interrupt(nowS);
    nowS = worker.endsS!;
    worker.finish(nowS);
  }
  expect(worker.busyS).toBeCloseTo(nowS, 9);
});
