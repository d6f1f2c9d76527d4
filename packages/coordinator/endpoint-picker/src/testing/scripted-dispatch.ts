/** A Dispatch that does what a test says, and counts who holds what: whatever happens on the wire, its counts return to zero. */
import type { Choice, Dispatch, DispatchRequest } from '@kvtier/dispatch';
import type { Worker } from '@kvtier/registry';

export class ScriptedDispatch implements Dispatch {
  readonly workers: readonly Worker[];
  readonly asked: DispatchRequest[] = [];
  /** What happened, in order: "choose ID", "first NAME", "ended NAME". */
  readonly told: string[] = [];
  /** Tokens of whole answers, as they were told. */
  readonly answerTokens: number[] = [];
  /** Requests that hold a share of a worker's load now. */
  running = 0;
  /** Predicted of every choice. */
  firstTokenS = 0;
  /** Requests whose script has not ended. */
  choosing = 0;
  /** Which worker, or a throw; may wait. Default: the first that is allowed. */
  script: (request: DispatchRequest, signal: AbortSignal) => Promise<Worker> | Worker;

  constructor(workers: readonly Worker[]) {
    this.workers = workers;
    this.script = ({ among }) => this.workers.find(({ record }) => among === undefined || among.has(record.name))!;
  }

  async choose(request: DispatchRequest, signal: AbortSignal): Promise<Choice> {
    this.asked.push(request);
    this.told.push(`choose ${request.id}`);
    this.choosing++;
    const worker = await Promise.resolve()
      .then(() => this.script(request, signal))
      .finally(() => this.choosing--);
    const { name } = worker.record;
    this.running++;
    let ended = false;
    return {
      worker,
      policy: 'scripted',
      why: '',
      firstTokenS: this.firstTokenS,
      match: { blocks: 0, byMedium: new Int32Array(5) },
      isGuessed: false,
      share: { requestId: request.id, tokensAhead: 0, blocks: 0, loadS: 0 },
      firstToken: () => {
        if (ended) throw new Error(`first token of ${request.id} after its end`);
        this.told.push(`first ${name}`);
      },
      ended: (answerTokens) => {
        if (ended) throw new Error(`${request.id} ended twice`);
        ended = true;
        if (answerTokens !== undefined) this.answerTokens.push(answerTokens);
        this.running--;
        this.told.push(`ended ${name}`);
      },
    };
  }
}

/** A pod with OpenAI's API, ready to serve `model`. */
export function pod(number: number, address: string, more: Partial<Worker> = {}, model = 'm'): Worker {
  const load = {
    waiting: 0,
    running: 0,
    tokensAhead: 0,
    stepTokens: 0,
    stepBegunAtMs: 0,
    usedBlocks: 0,
    waitingBlocks: 0,
    freedBlocksPerS: 0,
    loadAheadS: 0,
    prefillTokensPerS: 10_000,
    stepS: 0.01,
    stepPerRequestS: 0.001,
    loadBlocksPerS: [],
    toldAtMs: 0,
  };
  const facts = {
    model,
    modelDigest: '',
    modelDir: '',
    maxModelTokens: 4_096,
    vocabSize: 1_000,
    stopTokenIds: [],
    blockTokens: 32,
    hashAlgorithm: 'sha256_cbor',
    hashSeed: '',
    totalBlocks: 1_000,
    blockBytes: 0,
    maxRunning: undefined,
    namespaces: undefined,
    bootEpoch: '',
  };
  const record = {
    name: `pod-${number}`,
    kind: 'openai' as const,
    address,
    role: 'both' as const,
    draining: false,
    node: null,
    events: null,
    revision: '',
  };
  return { number, record, state: 'ready', why: undefined, facts, load, ...more };
}
