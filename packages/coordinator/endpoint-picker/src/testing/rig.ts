/** An endpoint picker over a scripted Dispatch and reader, and a gateway that asks it, for tests. */
import { setTimeout as sleep } from 'node:timers/promises';
import { type EndpointPickerInput, endpointPickerSchema } from '@kvtier/config';
import type { PodHandOff } from '@kvtier/pod-handoff';
import type { Worker } from '@kvtier/registry';
import { createLogger } from '@kvtier/telemetry';
import { BodySendMode } from '@kvtier/wire/ext-proc';
import { type EndpointPicker, startEndpointPicker } from '../endpoint-picker.ts';
import type { BodyFacts, BodyReader, Deadlines, Outcomes } from '../picker.ts';
import { Gateway } from './gateway.ts';
import { pod, ScriptedDispatch } from './scripted-dispatch.ts';

/** How gateways send bodies of requests and answers. */
export const modes = {
  duplex: { request: BodySendMode.FULL_DUPLEX_STREAMED, response: BodySendMode.FULL_DUPLEX_STREAMED },
  buffered: { request: BodySendMode.BUFFERED, response: BodySendMode.BUFFERED },
  headersOnly: { request: BodySendMode.NONE, response: BodySendMode.NONE },
} as const;

/** Understands every body in the same way. */
export class ScriptedReader implements BodyReader {
  readonly facts: BodyFacts = {
    model: 'm',
    tokens: 3,
    blockTokens: 2,
    maxTokens: 7,
    keys: Int32Array.of(1, 2),
    session: 'of the body',
  };
  readonly asked: { readonly path: string; readonly body: string }[] = [];
  script: () => Promise<BodyFacts> | BodyFacts = () => this.facts;

  async read(path: string, bytes: ArrayBuffer): Promise<BodyFacts> {
    // Made text where a test looks at it: this turn of the event loop is the picker's, and reading is another thread's.
    this.asked.push({
      path,
      get body() {
        return Buffer.from(bytes).toString();
      },
    });
    return this.script();
  }
}

export class PickerRig {
  /** Three pods, and a worker that no gateway reaches. */
  readonly pods: readonly Worker[] = [
    pod(0, 'http://10.0.0.1:8000'),
    pod(1, 'http://10.0.0.2:8000'),
    pod(2, 'http://[fd00::3]:8000'),
    pod(3, 'unix:/run/worker.sock', { record: { ...pod(3, 'unix:/run/worker.sock').record, kind: 'kvtier' } }),
  ];
  workers: readonly (Worker | undefined)[] = [...this.pods, undefined];
  dispatch = new ScriptedDispatch(this.pods);
  readonly reader = new ScriptedReader();
  /** What it was asked of deadlines, and what it says. */
  readonly inTime: { -readonly [K in keyof Deadlines]: Deadlines[K] } = { admit: () => {}, came: () => {} };
  /** Numbers of those of whose answers something came. */
  readonly heard: number[] = [];
  /** What else became of requests at pods, in order: "went 0", "failed 0 WHY". */
  readonly became: string[] = [];
  /** Before `start`: who is told so. */
  outcomes: Outcomes = {
    heard: (number) => void this.heard.push(number),
    went: (number) => void this.became.push(`went ${number}`),
    succeeded: (number) => void this.became.push(`succeeded ${number}`),
    failed: (number, why) => void this.became.push(`failed ${number} ${why}`),
    doubted: (number) => void this.became.push(`doubted ${number}`),
  };
  /** Before `start`: prefill and decode apart. */
  handOff: PodHandOff | undefined;
  /** Before `start`. */
  ttftMs: number | undefined;
  picker!: EndpointPicker;
  gateway!: Gateway;

  async start(input: EndpointPickerInput = {}): Promise<void> {
    this.picker = await startEndpointPicker({
      config: endpointPickerSchema.parse({ port: 0, health: null, ...input }),
      dispatch: this.dispatch,
      reader: this.reader,
      workers: () => this.workers,
      outcomes: this.outcomes,
      pods: this.handOff,
      inTime: this.inTime,
      ttftMs: this.ttftMs,
      isReady: () => true,
      logger: createLogger('test', 'silent'),
    });
    this.gateway = new Gateway(this.picker.address);
  }

  async close(): Promise<void> {
    this.gateway.close();
    await this.picker.close(0);
  }

  /** Of the line that begins so; 0: there is none. */
  async metric(line: string): Promise<number> {
    const value = new RegExp(`^${line.replace(/[{}]/g, '\\$&')} (\\d+)$`, 'm');
    return Number(value.exec(await this.picker.metrics())?.[1] ?? 0);
  }

  /** No request holds a share of a worker's load, and no stream is open. */
  async idle(): Promise<void> {
    while (this.dispatch.running > 0 || (await this.metric('kvtier_picker_streams')) > 0) await sleep(1);
  }
}
