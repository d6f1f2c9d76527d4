/** Workers and holdings that say what a test tells them, and count what was sent and has not ended. */
import { type Keys, maxMedia } from '@kvtier/kv-index';
import type { Sent, Worker, WorkerFacts, WorkerLoad } from '@kvtier/registry';
import type { Held, Holdings, Share, Workers } from '../ports.ts';

type Writable<T> = { -readonly [K in keyof T]: T[K] };
export interface FakeWorker extends Omit<Writable<Worker>, 'load'> {
  load: Writable<WorkerLoad>;
}

export const recordOf = (name: string, part: Partial<Worker['record']> = {}): Worker['record'] => ({
  name,
  kind: 'kvtier',
  address: `unix:/nowhere/${name}`,
  role: 'both',
  draining: false,
  node: null,
  events: null,
  revision: '',
  ...part,
});

export const factsOf = (part: Partial<WorkerFacts> = {}): WorkerFacts => ({
  model: 'demo',
  modelDigest: '',
  modelDir: '',
  maxModelTokens: 4_096,
  vocabSize: 3_520,
  stopTokenIds: [2],
  blockTokens: 16,
  hashAlgorithm: 'sha256_cbor',
  hashSeed: 'vllm-none-hash',
  totalBlocks: 1_000,
  blockBytes: 1_024,
  maxRunning: undefined,
  namespaces: undefined,
  bootEpoch: '1',
  ...part,
});

export class FakeWorkers implements Workers {
  readonly all: (FakeWorker | undefined)[] = [];
  /** Requests that were sent and have not ended, by number. */
  readonly open: number[] = [];
  readonly shares: Share[] = [];
  readonly #onChange = new Set<{ readonly tell: () => void }>();
  readonly #onLoad = new Set<{ readonly tell: () => void }>();

  add(name: string, facts: Partial<WorkerFacts> = {}, load: Partial<WorkerLoad> = {}): FakeWorker {
    const worker: FakeWorker = {
      number: this.all.length,
      record: recordOf(name),
      state: 'ready',
      why: undefined,
      facts: factsOf(facts),
      load: {
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
        stepPerRequestS: 0.0001,
        loadBlocksPerS: new Array<number>(maxMedia).fill(0),
        toldAtMs: 1,
        ...load,
      },
    };
    this.all.push(worker);
    this.open.push(0);
    this.changed();
    return worker;
  }

  /** A worker is another one, or another state. What is sent and ends tells nobody. */
  changed(): void {
    for (const { tell } of this.#onChange) tell();
  }

  /** A worker told its load. */
  told(): void {
    for (const { tell } of this.#onLoad) tell();
  }

  workers(): readonly (Worker | undefined)[] {
    return this.all;
  }

  onChange(listener: () => void): () => void {
    return listening(this.#onChange, listener);
  }

  onLoad(listener: () => void): () => void {
    return listening(this.#onLoad, listener);
  }

  sent(number: number, share: Share): Sent {
    const { load } = this.all[number]!;
    this.open[number]!++;
    this.shares.push(share);
    load.waiting++;
    load.tokensAhead += share.tokensAhead;
    let waits = true;
    const begun = (): void => {
      if (!waits) return;
      waits = false;
      load.waiting--;
      load.tokensAhead -= share.tokensAhead;
    };
    return {
      firstToken: () => {
        begun();
        load.running++;
      },
      ended: () => {
        if (waits) begun();
        else load.running--;
        this.open[number]!--;
      },
    };
  }
}

function listening(all: Set<{ readonly tell: () => void }>, listener: () => void): () => void {
  const entry = { tell: listener };
  all.add(entry);
  return () => all.delete(entry);
}

/** Holds so many leading blocks of every prompt, by the worker's number. */
export class FakeHoldings implements Holdings {
  readonly blocks: number[] = [];
  readonly sentTo: number[] = [];
  remote: Pick<Held, 'remoteBlocks' | 'remoteMedium'> = {};
  asked = 0;

  match(_model: string, _keys: Keys, numbers: readonly number[]): Held[] {
    this.asked++;
    return numbers.map((number) => {
      const byMedium = new Int32Array(maxMedia);
      byMedium[0] = this.blocks[number] ?? 0;
      return { blocks: byMedium[0], byMedium, ...this.remote };
    });
  }

  sent(_model: string, number: number): void {
    this.sentTo.push(number);
  }
}
