/** What those who watch the load are told of each request: that it is here, that it runs, that it is over, each once and in that order. */
import { KvError } from '@kvtier/errors';
import type { GenerateRequest as Asked, OnOutput, Output } from '@kvtier/scheduler';
import { type GenerateEvent, GenerateEvents, type GenerateRequest } from '@kvtier/wire/grpc';
import { beforeEach, expect, it } from 'vitest';
import { Generations } from './generations.ts';
import type { LoadWatches } from './load-watches.ts';
import type { WorkerMetrics } from './metrics.ts';

let outputs: OnOutput[];
let noted: string[];
/** Of answers, as they are counted. */
let tokens: number;
let pauses: number;
let refusal: KvError | undefined;
let generations: Generations;
beforeEach(() => {
  outputs = [];
  noted = [];
  tokens = 0;
  pauses = 0;
  refusal = undefined;
  const engine = {
    submit: (_: Asked, onOutput: OnOutput) => {
      if (refusal) throw refusal;
      outputs.push(onOutput);
    },
    abort: () => true,
    changeHandOff: () => true,
    tellFirstToken: () => true,
  };
  const note = (what: string) => (sender: string, number: number) => void noted.push(`${what} ${sender} ${number}`);
  const watches = { taken: note('taken'), begun: note('begun'), over: note('over') } as Partial<LoadWatches>;
  const ignore = (): void => {};
  const observeTokens = (count: number): void => {
    tokens += count;
  };
  const observePause = (): void => void pauses++;
  const metrics = { observeEnd: ignore, observeTokens, observeFirstToken: ignore, observePause };
  generations = new Generations({
    engine,
    watches: watches as LoadWatches,
    metrics: metrics as Partial<WorkerMetrics> as WorkerMetrics,
  });
});

const begin = (sentNumber?: number, part: Partial<GenerateRequest> = {}) =>
  generations.begin(
    {
      requestId: 'r',
      promptTokenIds: [1],
      ...(sentNumber && { sender: 'me', sentNumber }),
      ...part,
    } as GenerateRequest,
    () => {},
  );
const output = (part: Partial<Output>): Output => ({ tokenIds: [], finishReason: '', ...part });

it('one that answers, however it ends', () => {
  const leave = begin(7);
  outputs[0]!(output({ handOff: { localBlocks: 0, readyBlocks: 1 } }));
  expect(noted).toEqual(['taken me 7']);
  outputs[0]!(output({ tokenIds: [5] }));
  outputs[0]!(output({ tokenIds: [6] }));
  expect(noted).toEqual(['taken me 7', 'begun me 7']);
  outputs[0]!(output({ tokenIds: [6], finishReason: 'stop' }));
  expect(pauses).toBe(2);
  leave();
  expect(noted).toEqual(['taken me 7', 'begun me 7', 'over me 7']);
  begin(8)();
  expect(noted.slice(3)).toEqual(['taken me 8', 'over me 8']);
  begin(9);
  outputs[2]!(output({ error: new KvError('IO', 'gone') }));
  expect(noted.slice(5)).toEqual(['taken me 9', 'over me 9']);
});

it('one whose times are longer than a message holds is told the longest, and its neighbours go on', () => {
  const told: GenerateEvent[] = [];
  generations.begin({ requestId: 'r', promptTokenIds: [1] } as unknown as GenerateRequest, (event) => told.push(event));
  const use = { promptTokens: 1, cachedTokens: 0, tokensByTier: {}, queueUs: 2 ** 32, loadUs: 1.4, prefillUs: 1e15 };
  const cache = { ...use, handedTokens: 0, handOffUs: 2 ** 40, tailUs: 2 ** 32 - 1 };
  outputs[0]!(output({ tokenIds: [5], cache }));
  const most = 2 ** 32 - 1;
  const times = { queueUs: most, loadUs: 1, prefillUs: most, handOffUs: most, tailUs: most };
  const { events } = GenerateEvents.decode(GenerateEvents.encode({ events: [{ number: 1, event: told[0] }] }).finish());
  expect(events[0]!.event!.cache).toMatchObject(times);
});

it('one that is refused was never here, and one without a number is not named', () => {
  begin();
  outputs[0]!(output({ tokenIds: [5], finishReason: 'stop' }));
  refusal = new KvError('BUSY', 'full');
  begin(7);
  expect(noted.filter((line) => !line.startsWith('over'))).toEqual([]);
});

it('a token that is drawn for another worker’s answer counts where that answer is given', () => {
  begin(7, { prefillOnly: { blocks: 1, stepBlocks: 0, draws: true } });
  outputs[0]!(output({ tokenIds: [5] }));
  outputs[0]!(output({ handOff: { localBlocks: 0, readyBlocks: 1 }, finishReason: 'prefilled' }));
  expect([tokens, pauses, noted]).toEqual([0, 0, ['taken me 7', 'over me 7']]);
  // Unless the answer ends with it: then nothing of it goes on there.
  begin(9, { prefillOnly: { blocks: 1, stepBlocks: 0, draws: true } });
  outputs[1]!(output({ tokenIds: [5], finishReason: 'stop' }));
  expect(tokens).toBe(1);
  begin(8, { handOff: { blocks: 1, stallMs: 1, deadlineMs: 1 } });
  outputs[2]!(output({ tokenIds: [5, 6], finishReason: 'length' }));
  expect(tokens).toBe(3);
});
