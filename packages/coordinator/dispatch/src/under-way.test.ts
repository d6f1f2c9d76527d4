/** What the dispatcher expects of prompts that are being computed. */
import { afterEach, expect, it } from 'vitest';
import type { Choice, DispatchRequest } from './choice.ts';
import { Dispatcher } from './dispatcher.ts';
import { FakeHoldings, FakeWorkers } from './testing/index.ts';

const opened: Dispatcher[] = [];
afterEach(() => {
  for (const dispatcher of opened.splice(0)) dispatcher.close();
});

function rig() {
  const workers = new FakeWorkers();
  const dispatcher = new Dispatcher({ workers, holdings: new FakeHoldings(), random: () => 0.5 });
  opened.push(dispatcher);
  return { workers, dispatcher };
}

const request = (part: Partial<DispatchRequest> = {}): DispatchRequest => ({
  ...{ id: 'r', model: 'demo', among: undefined, except: new Set<string>(), session: '' },
  ...{ tokens: 160, blockTokens: 16, maxTokens: 16, keys: new Int32Array(20) },
  ...part,
});
const never = new AbortController().signal;
const nameOf = ({ worker }: Choice): string => worker.record.name;
/** A second of work. */
const busy = { tokensAhead: 10_000, waiting: 1 };

it('counts of a request only what it will compute once what is computed before it is there', async () => {
  const { workers, dispatcher } = rig();
  workers.add('a');
  workers.add('b', {}, busy);
  await dispatcher.choose(request(), never);
  expect(nameOf(await dispatcher.choose(request(), never))).toBe('a');
  expect(workers.shares.map(({ tokensAhead }) => tokensAhead)).toEqual([160, 1]);
});

it('expects nothing of what a worker was computing that is away, or another one', async () => {
  for (const change of ['away', 'other'] as const) {
    const { workers, dispatcher } = rig();
    const first = workers.add('a');
    workers.add('b', {}, busy);
    await dispatcher.choose(request(), never);
    if (change === 'away') {
      first.state = 'joining';
      workers.changed();
      await expect(dispatcher.choose(request({ among: new Set(['a']) }), never)).rejects.toThrow('no');
      first.state = 'ready';
    } else workers.all[0] = { ...first, record: { ...first.record, name: 'c' } };
    workers.changed();
    await dispatcher.choose(request(), never);
    expect([change, ...workers.shares.map(({ tokensAhead }) => tokensAhead)]).toEqual([change, 160, 160]);
  }
});
