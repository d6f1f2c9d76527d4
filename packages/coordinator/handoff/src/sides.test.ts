import { FakeHoldings, FakeWorkers, recordOf } from '@kvtier/dispatch/testing';
import { expect, it } from 'vitest';
import { sidesOf } from './sides.ts';

it('who may prefill: workers of the model that are for it by role, and that do not lean away from it now', () => {
  const workers = new FakeWorkers();
  const decode = workers.add('d');
  decode.record = recordOf('d', { role: 'decode' });
  workers.add('e').record = recordOf('e', { role: 'decode' });
  workers.add('p').record = recordOf('p', { role: 'prefill' });
  workers.add('other', { model: 'other' });
  workers.add('pod').record = recordOf('pod', { kind: 'openai' });
  const both = workers.add('both');
  const share = { requestId: 'r', tokensAhead: 0, blocks: 0, loadS: 0 };
  const names = () =>
    sidesOf(decode, share, workers.all, new Int32Array(0), new FakeHoldings(), () => 0).map(({ name }) => name);
  for (const leaning of [undefined, 'mixed', 'prefill'] as const) {
    both.leaning = leaning;
    expect(names()).toEqual(['d', 'p', 'both']);
  }
  both.leaning = 'decode';
  expect(names()).toEqual(['d', 'p']);
});
