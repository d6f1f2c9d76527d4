/**
 * What the engine adds to a step: from the end of one to the launch of the next, during which a GPU stands still. The executor
 * computes nothing and ends each step when the event loop is free; each token is encoded as the worker's service does.
 * `--steps N` of each (default 2,000).
 */
import { KvError } from '@kvtier/errors';
import type { Step, StepResult } from '@kvtier/executor';
import { ChainHasher } from '@kvtier/identity';
import { Engine, noConnector } from '@kvtier/scheduler';
import { GenerateEvent } from '@kvtier/wire/grpc';
import { argumentsOf } from '../arguments.ts';
import { type BenchContext, type Figure, median, type Suite, time } from '../figures.ts';
import { IdleExecutor } from '../idle-executor.ts';

const blockTokens = 16;
const promptTokens = 64;
/** Milliseconds that may lie between two steps. */
const askedMs = (sequences: number): number => 0.1 + 0.003 * sequences;

/** Ends a step in a turn of its own, as the answer of a native thread does, and notes when the next one begins. */
class WaitingExecutor extends IdleExecutor {
  readonly gapsMs: number[] = [];
  sequences = 0;
  #endedMs = 0;

  override execute(step: Step): Promise<StepResult> {
    const { length } = step.queryTokens;
    if (length === this.sequences && length === step.tokenIds.length)
      this.gapsMs.push(performance.now() - this.#endedMs);
    const answer: StepResult = { tokenIds: new Int32Array(length).fill(7), logits: null, elapsedUs: 1_000 };
    return new Promise((resolve) => {
      setImmediate(() => {
        this.#endedMs = performance.now();
        resolve(answer);
      });
    });
  }
}

async function gaps(sequences: number, steps: number): Promise<number[]> {
  const blockCount = 1 + sequences * Math.ceil((promptTokens + steps + 64) / blockTokens);
  const executor = new WaitingExecutor({ blockCount, blockTokens });
  executor.sequences = sequences;
  const engine = new Engine({
    executor,
    connector: noConnector,
    hasher: new ChainHasher({ algorithm: 'sha256', blockTokens, rootSeed: 'bench' }),
    eosTokenIds: [],
    limits: { maxStepTokens: Math.max(512, sequences), maxSequences: sequences, maxWaiting: sequences },
  });
  let written = 0;
  const done = Array.from(
    { length: sequences },
    (_, i) =>
      new Promise<void>((resolve, reject) =>
        engine.submit(
          {
            requestId: `r${i}`,
            promptTokenIds: Uint32Array.from({ length: promptTokens }, (_, at) => (at === 0 ? i + 1 : 5)),
            maxTokens: steps,
            temperature: 0,
            topK: 0,
            topP: 1,
            ignoreEos: true,
          },
          ({ tokenIds, finishReason, error }) => {
            const event = { tokenIds: [...tokenIds], finishReason, cache: undefined, failure: undefined };
            written += GenerateEvent.encode(event).finish().length;
            if (error) reject(error);
            else if (finishReason !== '') resolve();
          },
        ),
      ),
  );
  await Promise.all(done);
  await engine.close();
  if (written === 0) throw new KvError('IO', 'bench steps: nobody was told anything');
  return executor.gapsMs.slice(executor.gapsMs.length >> 2); // warm
}

async function run({ args, log }: BenchContext): Promise<Figure[]> {
  const { steps = 2_000 } = argumentsOf('steps', args, { options: { steps: 'count' } }).options;
  if (steps < 100) throw new KvError('CONFIG', 'bench steps: --steps needs a whole number of 100 or more');
  const figures: Figure[] = [];
  for (const sequences of [1, 32, 256]) {
    const sorted = (await gaps(sequences, steps)).sort((a, b) => a - b);
    const p99 = sorted[Math.floor(sorted.length * 0.99)]!;
    log(`${sequences} sequences: ${sorted.length} steps, p99 ${(p99 * 1000).toFixed(0)} µs`);
    figures.push(
      time(
        `between_steps_${sequences}`,
        median(sorted) * 1000,
        'µs',
        askedMs(sequences) * 1000,
        '0.1 ms + 3 µs a sequence',
      ),
    );
  }
  return figures;
}

export default {
  name: 'steps',
  description: 'what the engine adds between two steps, at 1, 32 and 256 sequences',
  run,
} satisfies Suite;
