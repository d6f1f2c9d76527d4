/** One log line a request at the engine worker, by which it is found as the coordinator's. */
import { KvError } from '@kvtier/errors';
import type { GenerateRequest as Asked, OnOutput } from '@kvtier/scheduler';
import type { Logger } from '@kvtier/telemetry';
import type { GenerateRequest } from '@kvtier/wire/grpc';
import { expect, it } from 'vitest';
import { Generations } from './generations.ts';
import type { LoadWatches } from './load-watches.ts';
import type { WorkerMetrics } from './metrics.ts';

const traceparent = '00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01';
const request = { requestId: 'r', promptTokenIds: [1, 2, 3] } as GenerateRequest;

function opened(logRequests: boolean) {
  const lines: [unknown, unknown][] = [];
  const submitted: Asked[] = [];
  const outputs: OnOutput[] = [];
  const submit = (asked: Asked, onOutput: OnOutput): void => {
    if (asked.requestId.startsWith('refused')) throw new KvError('BUSY', 'full');
    submitted.push(asked);
    outputs.push(onOutput);
  };
  const engine = { submit, abort: () => true, changeHandOff: () => true, tellFirstToken: () => true };
  const ignore = (): void => {};
  const generations = new Generations({
    engine,
    watches: {} as LoadWatches,
    metrics: {
      observeEnd: ignore,
      observeTokens: ignore,
      observeFirstToken: ignore,
      observePause: ignore,
    } as Partial<WorkerMetrics> as WorkerMetrics,
    requestLogger: logRequests
      ? ({ info: (...line: [unknown, unknown]) => void lines.push(line) } as Partial<Logger> as Logger)
      : undefined,
  });
  return { generations, lines, submitted, outputs };
}

it('of one that is served: the client’s trace, how it ended, and where its time went', () => {
  const { generations, lines, submitted, outputs } = opened(true);
  const abort = generations.begin({ ...request, traceparent }, () => {});
  const cache = { promptTokens: 3, cachedTokens: 2, tokensByTier: { disk: 2 } };
  const times = { queueUs: 1_400, loadUs: 2_600, prefillUs: 3_000 };
  outputs[0]!({ tokenIds: [8], finishReason: '', cache: { ...cache, ...times } });
  expect(lines).toEqual([]);
  outputs[0]!({ tokenIds: [9], finishReason: 'stop' });
  abort();
  const spent = { queueMs: 1, loadMs: 3, prefillMs: 3, firstTokenMs: expect.any(Number), ms: expect.any(Number) };
  const ended = { outcome: 'stop', promptTokens: 3, tokens: 2, cachedTokens: 2, tokensByTier: { disk: 2 } };
  expect(lines).toEqual([[{ request: 'r', traceparent, part: undefined, ...ended, ...spent }, 'request']]);
  expect(submitted[0]).not.toHaveProperty('traceparent'); // it is for lines alone
});

it('of one that fails, is refused or is called off; what is no trace is left out, and served all the same', () => {
  const { generations, lines, outputs } = opened(true);
  generations.begin({ ...request, traceparent: `${traceparent}\n{"forged":1}`, prefillOnly: { blocks: 1 } }, () => {});
  outputs[0]!({ tokenIds: [], finishReason: '', error: new KvError('IO', 'gone') });
  generations.begin({ ...request, requestId: `refused${'x'.repeat(1_000)}` }, () => {});
  generations.begin({ ...request, handOff: { blocks: 1, stallMs: 1, deadlineMs: 1 } }, () => {})();
  const none = { traceparent: undefined, promptTokens: 3, tokens: 0 };
  expect(lines.map(([fields]) => fields)).toMatchObject([
    { request: 'r', part: 'prefill', outcome: 'IO', ...none },
    { request: `refused${'x'.repeat(249)}`, part: undefined, outcome: 'BUSY', ...none },
    { request: 'r', part: 'decode', outcome: 'CANCELLED', ...none },
  ]);
});

it('none where it is not asked for', () => {
  const { generations, lines, outputs } = opened(false);
  generations.begin({ ...request, traceparent }, () => {});
  outputs[0]!({ tokenIds: [8], finishReason: 'stop' });
  expect(lines).toEqual([]);
});
