/** The workers as the decision sees them: loads as told, what the KV index says of the prompt, and without the request's own share. */
import type { Held, Holdings, Share } from '@kvtier/dispatch';
import { type Keys, maxMedia } from '@kvtier/kv-index';
import type { Worker } from '@kvtier/registry';
import type { Side } from './question.ts';

const nothing: Held = { blocks: 0, byMedium: new Int32Array(maxMedia) };
/** Of a worker that does not say it. */
const usualStepTokens = 512;
/** About as engines begin beside a few streams: see pacing.ts of engine/scheduler. */
const usualPacingTrust = 0.7;
const noShare: Share = { requestId: '', tokensAhead: 0, blocks: 0, loadS: 0 };

/** Workers of the decode side's model with it, itself the first. */
export function sidesOf(
  decode: Worker,
  share: Share,
  workers: readonly (Worker | undefined)[],
  keys: Keys,
  holdings: Holdings,
  legsOf: (number: number) => number,
  awaitingOf: (number: number) => number,
): [Side, ...Side[]] {
  const model = decode.facts?.model ?? '';
  const all = [decode];
  for (const worker of workers) {
    if (worker === undefined || worker.number === decode.number || worker.record.kind !== 'kvtier') continue;
    // One of both roles that leans to decode now gets no prompts of others; what it has, it ends.
    const isApart = worker.record.role === 'decode' || (worker.record.role === 'both' && worker.leaning === 'decode');
    if (worker.facts?.model === model && !isApart) all.push(worker);
  }
  const held =
    keys.length === 0
      ? []
      : holdings.match(
          model,
          keys,
          all.map(({ number }) => number),
        );
  const [first, ...rest] = all.map((worker, at) =>
    sideOf(worker, at === 0 ? share : undefined, held[at] ?? nothing, legsOf(worker.number), awaitingOf(worker.number)),
  );
  return [first!, ...rest];
}

/**
 * `own`: what of its load is the request's own. One plain literal: with a spread in it each property is added to the object for itself, which
 * took 60 µs a worker.
 */
export function sideOf(worker: Worker, own: Share | undefined, match: Held, legs: number, awaiting = 0): Side {
  const { number, record, state, facts, load } = worker;
  const share = own ?? noShare;
  return {
    number,
    name: record.name,
    role: record.role,
    revision: record.revision,
    node: record.node,
    legs,
    awaiting,
    isReady: state === 'ready' && !record.draining,
    identity: identityOf(facts),
    waiting: Math.max(load.waiting - (own === undefined ? 0 : 1), 0),
    running: load.running,
    tokensAhead: Math.max(load.tokensAhead - share.tokensAhead, 0),
    usedBlocks: load.usedBlocks,
    totalBlocks: facts?.totalBlocks ?? 0,
    waitingBlocks: Math.max(load.waitingBlocks - share.blocks, 0),
    freedBlocksPerS: load.freedBlocksPerS,
    maxRunning: facts?.maxRunning,
    maxStepTokens: facts?.maxStepTokens ?? usualStepTokens,
    maxTotalTokens: facts?.maxTotalTokens,
    loadAheadS: Math.max(load.loadAheadS - share.loadS, 0),
    prefillTokensPerS: load.prefillTokensPerS,
    prefillStepS: load.prefillStepS ?? 0,
    pacingTrust: load.pacingTrust || usualPacingTrust,
    stepS: load.stepS,
    stepPerRequestS: load.stepPerRequestS,
    loadBlocksPerS: load.loadBlocksPerS,
    match,
    remoteBlocks: match.remoteBlocks ?? 0,
    remoteMedium: match.remoteMedium ?? 0,
  };
}

/** Of facts, which do not change: they are written out once. */
const identities = new WeakMap<object, string>();

/** What is not said agrees with nothing but what is not said either. */
function identityOf(facts: Worker['facts']): string {
  if (facts === undefined) return '';
  const known = identities.get(facts);
  if (known !== undefined) return known;
  const { modelDigest, blockTokens, hashAlgorithm, hashSeed, namespaces } = facts;
  const identity = JSON.stringify([modelDigest, blockTokens, hashAlgorithm, hashSeed, namespaces ?? []]);
  identities.set(facts, identity);
  return identity;
}
