/** One engine worker in virtual time: what it is, what it has to do, and the cache node beside it. */
import { factsOf, recordOf } from '@kvtier/dispatch/testing';
import type { HandOffEngines } from '@kvtier/handoff';
import { PeerChoice } from '@kvtier/node/testing';
import type { Worker, WorkerState } from '@kvtier/registry';
import type { GenerateRequest } from '@kvtier/wire/grpc';
import type { CallAt } from './virtual-call.ts';

export const blockTokens = 16;
/** Of a step: most prompt tokens, seconds at least, and seconds that each stream adds. */
export interface StepFigures {
  readonly stepTokens: number;
  readonly stepS: number;
  readonly stepPerRequestS: number;
}
const usualSteps: StepFigures = { stepTokens: 128, stepS: 0.005, stepPerRequestS: 0.001 };
/** As engines keep to their streams' target: see pacing.ts of engine/scheduler. */
const [trust, leastShare] = [0.9, 1 / 4];

export type Share = Parameters<HandOffEngines['sent']>[1];
export type VirtualCall = CallAt<VirtualWorker>;

export class VirtualWorker implements Worker {
  readonly number: number;
  readonly record: Worker['record'];
  readonly facts: Worker['facts'];
  readonly why = undefined;
  state: WorkerState = 'ready';
  isStopped = false;
  /** Prompt tokens a second; what it says of it may be another. */
  readonly tokensPerS: number;
  readonly lie: number;
  /** Of its node, from any other one. */
  readonly linkBlocksPerS: number;
  readonly steps: StepFigures;
  readonly calls: VirtualCall[] = [];
  /** Sent, and not there yet. */
  readonly sent = new Set<Share>();
  /** Sent, and not ended. */
  readonly open = new Set<Share>();
  /** Leading blocks of each prompt, by its first token: the engine's own, and its node's. */
  readonly own = new Map<number, number>();
  readonly node = new Map<number, number>();
  /** Its node is dead; its node reaches no other one, nor is it reached. */
  isNodeDown = false;
  isLinkCut = false;
  /** Names of the nodes that its node fetches from; undefined: all others. */
  peers: readonly string[] | undefined;
  /** When its node's link is free again. */
  linkFreeMs = 0;
  isStepping = false;
  life = 0;

  constructor(
    number: number,
    role: 'prefill' | 'decode' | 'both',
    totalBlocks: number,
    tokensPerS: number,
    lie: number,
    steps: StepFigures = usualSteps,
    linkBlocksPerS = 500,
  ) {
    const { stepTokens } = steps;
    this.steps = steps;
    this.number = number;
    this.record = recordOf(`w${number}`, { role, node: `n${number}` });
    this.facts = factsOf({ totalBlocks, maxRunning: 32, maxStepTokens: stepTokens, bootEpoch: String(number) });
    this.tokensPerS = tokensPerS;
    this.lie = lie;
    this.linkBlocksPerS = linkBlocksPerS;
  }

  get usedBlocks(): number {
    let sum = 0;
    for (const call of this.calls) if (call.hasRoom) sum += needsOf(call.request);
    return sum;
  }

  get load(): Worker['load'] {
    const running = this.calls.filter(({ hasToken }) => hasToken).length;
    let [tokensAhead, waitingBlocks] = [0, 0];
    const { stepS, stepPerRequestS } = this.steps;
    for (const call of this.calls) {
      tokensAhead += aheadOf(call);
      if (!call.hasRoom) waitingBlocks += needsOf(call.request);
    }
    for (const share of this.sent) {
      tokensAhead += share.tokensAhead;
      waitingBlocks += share.blocks;
    }
    return {
      ...{ waiting: this.calls.length - running + this.sent.size, running, tokensAhead, usedBlocks: this.usedBlocks },
      ...{ stepTokens: 0, stepBegunAtMs: 0, waitingBlocks, freedBlocksPerS: 50, loadAheadS: 0 },
      prefillTokensPerS: this.tokensPerS * this.lie,
      ...{
        prefillStepS: stepS,
        pacingTrust: trust,
        stepS,
        stepPerRequestS,
        loadBlocksPerS: [0, 0, 0, this.linkBlocksPerS, 0, 0],
        toldAtMs: 1,
      },
    };
  }

  /** Its node can fetch what that worker's node has. */
  reaches(other: VirtualWorker): boolean {
    if (this.isNodeDown || other.isNodeDown) return false;
    return this === other || (this.isPeerOf(other) && !(this.isLinkCut || other.isLinkCut));
  }

  /** As nodes choose them. */
  choosePeers(all: readonly VirtualWorker[], most: number): void {
    const others = all.filter((other) => other !== this).map(({ record }) => ({ name: record.node! }));
    if (others.length <= most) return;
    const records = all.map(({ record }) => record);
    const chosen = new PeerChoice(this.record.node!).order(others, records).slice(0, most);
    this.peers = chosen.map(({ name }) => name);
  }

  isPeerOf(other: VirtualWorker): boolean {
    return this === other || (this.peers?.includes(other.record.node!) ?? true);
  }

  /** Prompt tokens of a step beside these streams. */
  chunkBeside(streams: readonly VirtualCall[]): number {
    const { stepTokens, stepS, stepPerRequestS } = this.steps;
    const targetS = Math.min(...streams.map(({ request }) => request.betweenMs ?? Number.POSITIVE_INFINITY)) / 1000;
    const leftS = targetS - stepS - streams.length * stepPerRequestS;
    if (!Number.isFinite(targetS) || leftS <= 0) return stepTokens;
    const inTime = Math.floor(trust * Math.max(leftS, targetS * leastShare) * this.tokensPerS);
    return Math.min(Math.max(inTime, blockTokens), stepTokens);
  }
}

/** What another worker computes for it is nothing that it has to do. */
function aheadOf({ request, tokensLeft, hasRoom, awaited, blocks }: VirtualCall): number {
  const elsewhere = hasRoom ? (awaited ?? blocks) - blocks : (request.handOff?.blocks ?? 0);
  return Math.max(tokensLeft - elsewhere * blockTokens, 0);
}

export const needsOf = (request: GenerateRequest): number => {
  const { promptTokenIds, maxTokens, prefillOnly } = request;
  const tokens = prefillOnly === undefined ? promptTokenIds.length + maxTokens : tokensOf(request);
  return Math.ceil(tokens / blockTokens);
};

export const tokensOf = ({ promptTokenIds, prefillOnly }: GenerateRequest): number =>
  prefillOnly === undefined || prefillOnly.draws ? promptTokenIds.length : prefillOnly.blocks * blockTokens;
