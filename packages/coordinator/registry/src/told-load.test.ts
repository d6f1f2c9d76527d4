/** Every number of a load, one at a time: what can be is taken as it is, what cannot be is refused by its name. */
import type { EngineLoad } from '@kvtier/wire/grpc';
import { expect, it } from 'vitest';
import { engineLoad } from './testing/scripted-engine.ts';
import { loadOf } from './told-load.ts';

const rates = { prefillTokensPerS: 1.5, stepS: 0.1, stepPerRequestS: 0.01, freedBlocksPerS: 2.5 };
const whole = (): EngineLoad => ({
  ...engineLoad(),
  ...{ bootEpoch: 'e', waiting: 1, running: 2, tokensAhead: 3n, usedBlocks: 4n, waitingBlocks: 5n, loadAheadS: 0.5 },
  ...{
    rates: { ...rates, loadBlocksPerS: { arena: 7.5 } },
    taken: [8, 9],
    begun: [8],
    ended: [7],
    step: { tokens: 3, forS: 0.25 },
  },
});

it('what can be is taken as it was told', () => {
  const { count: _, ...told } = { ...whole(), tokensAhead: 3, usedBlocks: 4, totalBlocks: 100, waitingBlocks: 5 };
  expect(loadOf('a', whole())).toEqual(told);
  const bare = loadOf('a', engineLoad());
  expect([bare.rates, bare.step]).toEqual([undefined, undefined]);
});

const counts = ['waiting', 'running'];
const wide = ['tokensAhead', 'usedBlocks', 'totalBlocks', 'waitingBlocks'];
const rateNames = Object.keys(rates);
const tiers = (count: number): object => Object.fromEntries(Array.from({ length: count }, (_, i) => [`t${i}`, 1]));
const notRates = [Number.NaN, -1, Number.POSITIVE_INFINITY, 1e13];
it.each<[string, object]>([
  ...counts.flatMap((name) =>
    [Number.NaN, -1, 0.5, 2 ** 41].map((value): [string, object] => [name, { [name]: value }]),
  ),
  ...wide.flatMap((name) => [-1n, 2n ** 41n].map((value): [string, object] => [name, { [name]: value }])),
  ...[-1, 0.5, 2 ** 41].map((tokens): [string, object] => ['step.tokens', { step: { tokens, forS: 0 } }]),
  ...notRates.map((forS): [string, object] => ['step.forS', { step: { tokens: 1, forS } }]),
  ...notRates.map((loadAheadS): [string, object] => ['loadAheadS', { loadAheadS }]),
  ...rateNames.flatMap((name) =>
    notRates.map((value): [string, object] => [
      `rates.${name}`,
      { rates: { ...rates, loadBlocksPerS: {}, [name]: value } },
    ]),
  ),
  ...[Number.NaN, -0.1, 1.01, Number.POSITIVE_INFINITY].map((pacingTrust): [string, object] => [
    'rates.pacingTrust',
    { rates: { ...rates, loadBlocksPerS: {}, pacingTrust } },
  ]),
  ...[{ arena: -1 }, { arena: Number.NaN }, { ['t'.repeat(65)]: 1 }, tiers(65)].map(
    (loadBlocksPerS): [string, object] => ['rates.loadBlocksPerS', { rates: { ...rates, loadBlocksPerS } }],
  ),
  ...['taken', 'begun', 'ended'].flatMap((name) =>
    [[-1], [0.5], new Array(2 ** 20 + 1).fill(0)].map((numbers): [string, object] => [name, { [name]: numbers }]),
  ),
  ['bootEpoch', { bootEpoch: 'e'.repeat(4_097) }],
])('%s that cannot be is refused (%#)', (name, part) => {
  let line = '';
  try {
    loadOf('a', { ...whole(), ...part });
  } catch (error) {
    expect(error).toMatchObject({ code: 'PROTOCOL' });
    line = (error as Error).message;
  }
  expect(line.split(': ').slice(0, 2).join(': ')).toBe(`worker a: its load is told with nonsense (${name}`);
  expect(line).toMatch(/\); run workers and coordinator of one version$/);
});

it('a share of nothing and of all is taken', () => {
  for (const pacingTrust of [0, 1])
    expect(loadOf('a', { ...whole(), rates: { ...rates, loadBlocksPerS: {}, pacingTrust } }).rates).toMatchObject({
      pacingTrust,
    });
});

it('as many tiers and requests as may be are taken', () => {
  const load = { ...whole(), rates: { ...rates, loadBlocksPerS: tiers(64) as Record<string, number> } };
  expect(Object.keys(loadOf('a', load).rates!.loadBlocksPerS)).toHaveLength(64);
  expect(loadOf('a', { ...whole(), taken: new Array(2 ** 20).fill(2 ** 32 - 1) }).taken).toHaveLength(2 ** 20);
});
