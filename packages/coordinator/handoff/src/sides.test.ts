/** The workers as the decision sees them. */
import { FakeHoldings, FakeWorkers, recordOf } from '@kvtier/dispatch/testing';
import { expect, it } from 'vitest';
import { sidesOf } from './sides.ts';

const none = { requestId: 'r', tokensAhead: 0, blocks: 0, loadS: 0 };

it('are those of the model that take prefill, the decode side first, without the request itself', () => {
  const workers = new FakeWorkers();
  const decode = workers.add('d');
  decode.record = recordOf('d', { role: 'decode' });
  workers.add('p').record = recordOf('p', { role: 'prefill' });
  workers.add('other', { model: 'other' });
  workers.add('d2').record = recordOf('d2', { role: 'decode' });
  workers.add('both', {}, { tokensAhead: 7 });
  workers.add('leans').leaning = 'decode';
  workers.add('pod').record = recordOf('pod', { kind: 'openai', role: 'prefill' });
  const share = { requestId: 'r', tokensAhead: 100, blocks: 9, loadS: 1 };
  workers.sent(0, share);
  const sides = sidesOf(
    decode,
    share,
    workers.all,
    new Int32Array(8),
    new FakeHoldings(),
    (number) => number,
    (number) => 10 + number,
  );
  expect(sides.map(({ name, legs, awaiting }) => [name, legs, awaiting])).toEqual([
    ['d', 0, 10],
    ['p', 1, 11],
    ['both', 4, 14],
  ]);
  expect(sides.map(({ waiting, tokensAhead }) => [waiting, tokensAhead])).toEqual([
    [0, 0],
    [0, 0],
    [0, 7],
  ]);
});

it('trust their pace as they say, and as engines do at first where they do not', () => {
  const workers = new FakeWorkers();
  const decode = workers.add('d', {}, { pacingTrust: 0.6 });
  for (const [name, load] of Object.entries({ unsaid: {}, never: { pacingTrust: 0 } })) workers.add(name, {}, load);
  const sides = sidesOf(
    decode,
    none,
    workers.all,
    new Int32Array(0),
    new FakeHoldings(),
    () => 0,
    () => 0,
  );
  expect(sides.map(({ pacingTrust }) => pacingTrust)).toEqual([0.6, 0.7, 0.7]);
});

it('share blocks only where all that names them is the same', () => {
  const workers = new FakeWorkers();
  const decode = workers.add('d');
  for (const [at, facts] of [
    {},
    { namespaces: ['0011223344556677'] },
    { modelDigest: 'ab' },
    { hashSeed: 'other' },
  ].entries())
    workers.add(`w${at}`, facts);
  const [first, ...others] = sidesOf(
    decode,
    none,
    workers.all,
    new Int32Array(0),
    new FakeHoldings(),
    () => 0,
    () => 0,
  );
  expect(others.map(({ identity }) => identity === first.identity)).toEqual([true, false, false, false]);
});
