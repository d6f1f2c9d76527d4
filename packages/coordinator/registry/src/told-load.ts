/**
 * What a worker says of its load, checked number by number: it comes up to fifty times a second from each worker, and a schema took longer
 * than all else that is done with a message. What cannot be is refused with one line.
 */
import { KvError } from '@kvtier/errors';
import type { EngineLoad, EngineRates, RunningStep } from '@kvtier/wire/grpc';

/** Beyond these a number is nonsense, whatever it counts. */
const mostCount = 2 ** 40;
const mostRate = 1e12;
const mostText = 4_096;
const mostTierName = 64;
const mostTiers = 64;
const mostNamed = 1 << 20;
const lists = ['taken', 'begun', 'ended'] as const;

/** Units as in engine.proto. */
export interface ToldLoad {
  readonly bootEpoch: string;
  readonly draining: boolean;
  readonly waiting: number;
  readonly running: number;
  readonly tokensAhead: number;
  readonly step: RunningStep | undefined;
  readonly usedBlocks: number;
  readonly totalBlocks: number;
  readonly waitingBlocks: number;
  readonly loadAheadS: number;
  readonly rates: EngineRates | undefined;
  /** Numbers of our requests. */
  readonly taken: readonly number[];
  readonly begun: readonly number[];
  readonly ended: readonly number[];
}

/** @throws KvError PROTOCOL, one line */
export function loadOf(worker: string, load: EngineLoad): ToldLoad {
  const refuse = (where: string, what: string): never => {
    throw new KvError(
      'PROTOCOL',
      `worker ${worker}: its load is told with nonsense (${where}: ${what}); run workers and coordinator of one version`,
    );
  };
  const count = (where: string, value: number): number =>
    Number.isInteger(value) && value >= 0 && value <= mostCount ? value : refuse(where, `${value} counts nothing`);
  const rate = (where: string, value: number): number =>
    value >= 0 && value <= mostRate ? value : refuse(where, `${value} is no rate`);
  const share = (where: string, value: number): number =>
    value >= 0 && value <= 1 ? value : refuse(where, `${value} is no share`);
  const { bootEpoch, rates, step, taken, begun, ended } = load;
  if (bootEpoch.length > mostText) refuse('bootEpoch', `${bootEpoch.length} characters`);
  for (const list of lists) {
    const numbers = load[list];
    if (numbers.length > mostNamed) refuse(list, `${numbers.length} requests`);
    for (const number of numbers) count(list, number);
  }
  if (step !== undefined) {
    count('step.tokens', step.tokens);
    rate('step.forS', step.forS);
  }
  if (rates !== undefined) {
    rate('rates.prefillTokensPerS', rates.prefillTokensPerS);
    rate('rates.stepS', rates.stepS);
    rate('rates.prefillStepS', rates.prefillStepS ?? 0);
    share('rates.pacingTrust', rates.pacingTrust ?? 0);
    rate('rates.stepPerRequestS', rates.stepPerRequestS);
    rate('rates.freedBlocksPerS', rates.freedBlocksPerS);
    let tiers = 0;
    for (const tier in rates.loadBlocksPerS) {
      if (++tiers > mostTiers) refuse('rates.loadBlocksPerS', 'too many tiers');
      if (tier.length > mostTierName) refuse('rates.loadBlocksPerS', `a tier's name of ${tier.length} characters`);
      rate('rates.loadBlocksPerS', rates.loadBlocksPerS[tier]!);
    }
  }
  return {
    bootEpoch,
    draining: load.draining,
    waiting: count('waiting', load.waiting),
    running: count('running', load.running),
    tokensAhead: count('tokensAhead', Number(load.tokensAhead)),
    step,
    usedBlocks: count('usedBlocks', Number(load.usedBlocks)),
    totalBlocks: count('totalBlocks', Number(load.totalBlocks)),
    waitingBlocks: count('waitingBlocks', Number(load.waitingBlocks)),
    loadAheadS: rate('loadAheadS', load.loadAheadS),
    rates,
    taken,
    begun,
    ended,
  };
}
