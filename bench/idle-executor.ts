/** A model that computes nothing and says one token, always the same: what is left of a step is the engine's own work. */
import { KvError } from '@kvtier/errors';
import type { Executor, KvLayout, Step, StepResult } from '@kvtier/executor';
import type { ModelShape } from '@kvtier/model';

export class IdleExecutor implements Executor {
  readonly backend = 'cpu';
  readonly model: ModelShape;
  readonly kv: KvLayout;
  readonly blockCount: number;
  readonly maxStepTokens = 2 ** 20;
  readonly modelDigest = new Uint8Array(32);
  /** Called between steps. */
  onStep: () => void = () => {};

  constructor({ blockCount, blockTokens }: { blockCount: number; blockTokens: number }) {
    this.blockCount = blockCount;
    const one = { layers: 1, kvHeads: 1, headDim: 1 };
    const sizes = { vocabSize: 128_000, hiddenSize: 1, intermediateSize: 1, maxModelTokens: 8192, parameters: 1 };
    this.model = { family: 'llama', heads: 1, ...one, ...sizes };
    this.kv = { ...one, dtype: 'f32', blockTokens, blockBytes: 8 * blockTokens, order: 'layer,kv,head,token,dim' };
  }

  execute({ queryTokens }: Step): Promise<StepResult> {
    this.onStep();
    return Promise.resolve({ tokenIds: new Int32Array(queryTokens.length).fill(7), logits: null, elapsedUs: 0 });
  }

  attachArena(): number {
    throw new KvError('SETUP', 'idle executor: there is no arena');
  }
  async detachArena(): Promise<void> {}
  exportBlocks(): Promise<BigUint64Array> {
    throw new KvError('SETUP', 'idle executor: there is no arena');
  }
  importBlocks(): Promise<Uint8Array> {
    throw new KvError('SETUP', 'idle executor: there is no arena');
  }
  async close(): Promise<void> {}
}
