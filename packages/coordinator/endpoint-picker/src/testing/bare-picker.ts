/** A picker without a gateway over made-up pods and a real Dispatch, for tests of what becomes of their loads. */
import type { PodHandOffConfig } from '@kvtier/config';
import { Dispatcher } from '@kvtier/dispatch';
import { FakeHoldings, type FakeWorker, FakeWorkers, recordOf } from '@kvtier/dispatch/testing';
import { PodHandOff } from '@kvtier/pod-handoff';
import type { Worker } from '@kvtier/registry';
import { createLogger } from '@kvtier/telemetry';
import { askedOf } from '../asked.ts';
import { PickerMetrics } from '../metrics.ts';
import { type Picked, Picker } from '../picker.ts';
import { ScriptedReader } from './rig.ts';

export class BarePicker {
  readonly workers = new FakeWorkers();
  readonly dispatch = new Dispatcher({ workers: this.workers, holdings: new FakeHoldings() });
  readonly #picker: Picker;

  constructor(config: Partial<PodHandOffConfig> = {}) {
    const { dispatch } = this;
    const workers = () => this.workers.workers();
    const forward = () => Promise.reject(new Error('not ours to send'));
    const reader = new ScriptedReader();
    let prompts = 0;
    reader.script = () => {
      const keys = new Int32Array(250).fill(++prompts);
      return { ...reader.facts, model: 'demo', tokens: 2_000, blockTokens: 16, keys };
    };
    this.#picker = new Picker({
      ...{ dispatch, workers, reader, pods: new PodHandOff({ dispatch, pods: { workers, forward }, config }) },
      outcomes: { went: () => {}, heard: () => {}, succeeded: () => {}, failed: () => {}, doubted: () => {} },
      ...{ inTime: { admit: () => {}, came: () => {} }, ttftMs: undefined, metrics: new PickerMetrics() },
      ...{ logger: createLogger('bare-picker', 'silent'), fallbacks: 0 },
    });
  }

  /** A pod at 10.0.0.NUMBER:8000. */
  add(name: string, role: Worker['record']['role'] = 'both'): FakeWorker {
    const worker = this.workers.add(name, { totalBlocks: 50_000 });
    worker.record = recordOf(name, { kind: 'openai', address: `http://10.0.0.${worker.number}:8000`, role });
    this.workers.changed();
    return worker;
  }

  /** A prompt of 2,000 tokens, another one each time. */
  pick(): Promise<Picked> {
    const headers = [
      { key: ':method', value: 'POST', rawValue: Buffer.alloc(0) },
      { key: ':path', value: '/v1/completions', rawValue: Buffer.alloc(0) },
    ];
    const asked = askedOf({ headers: { headers }, endOfStream: false }, undefined);
    return this.#picker.pick(asked, [Buffer.from('{}')], 2, new AbortController().signal);
  }
}
