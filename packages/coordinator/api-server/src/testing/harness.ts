/**
 * What the API server's tests share: scripted engines on Unix sockets, the fleet, the dispatcher and the API server before them and
 * OpenAI's own client, fresh for every test; nothing is left behind.
 */
import { mkdtempSync, rmSync } from 'node:fs';
import { connect } from 'node:net';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { Dispatcher, type DispatcherOptions } from '@kvtier/dispatch';
import { FakeHoldings } from '@kvtier/dispatch/testing';
import { type HandOffLimits, HandOffs } from '@kvtier/handoff';
import { Fleet, tierMedia } from '@kvtier/registry';
import { ScriptedEngine, SpokenDiscovery } from '@kvtier/registry/testing';
import { createLogger } from '@kvtier/telemetry';
import OpenAI, { APIError } from 'openai';
import { afterEach, beforeEach, expect, vi } from 'vitest';
import { type ApiServer, type ApiServerOptions, startApiServer } from '../api-server.ts';
import type { TextModel } from '../text-model.ts';
import { type LoadedText, TextPool } from '../text-pool.ts';
import { loadTokenizer } from '../tokenizer.ts';

export const modelDir = join(import.meta.dirname, '../../../../../models/demo/model');
const tokenizer = loadTokenizer(modelDir);
export const ids = (text: string): number[] => tokenizer.encode(text, { addSpecialTokens: false });
export const eos = 2;

/** Loads each model once. */
class PatientPool extends TextPool {
  readonly #loaded = new Map<string, LoadedText>();

  override async load(model: TextModel): Promise<LoadedText> {
    const key = JSON.stringify(model);
    const loaded = this.#loaded.get(key) ?? (await super.load(model));
    this.#loaded.set(key, loaded);
    return loaded;
  }
}

/** For all tests of a process: starting threads and loading tokenizers takes longer than most tests. */
export const text: TextPool = new PatientPool();
export const silent = createLogger('api-server-test', 'silent');

/** A worker, as discovery names it. */
type Named = Parameters<SpokenDiscovery['say']>[number];

export class Harness {
  dir!: string;
  /** The first one, `a`. */
  engine!: ScriptedEngine;
  readonly engines: ScriptedEngine[] = [];
  discovery!: SpokenDiscovery;
  fleet!: Fleet;
  holdings!: FakeHoldings;
  dispatcher!: Dispatcher;
  handOffs!: HandOffs;
  server!: ApiServer;
  client!: OpenAI;

  /** Registers the hooks. */
  constructor() {
    beforeEach(async () => {
      this.dir = mkdtempSync(join(tmpdir(), 'kvtier-api-server-'));
      this.engine = await this.start('a');
      await this.open();
    });
    afterEach(async () => {
      await this.close();
      for (const engine of this.engines.splice(0)) await engine.stop();
      rmSync(this.dir, { recursive: true, force: true });
    });
  }

  /** A scripted engine of this name, which nobody knows of yet. */
  async start(name: string): Promise<ScriptedEngine> {
    const engine = new ScriptedEngine(`unix:${this.dir}/${name}`, modelDir);
    await engine.start();
    this.engines.push(engine);
    return engine;
  }

  /** As discovery names the engine of this name. */
  named = (name: string): Named => ({ name, address: `unix:${this.dir}/${name}` });

  /** These are the workers, and they are all ready. */
  async workers(...named: Named[]): Promise<void> {
    this.discovery.say(...named);
    const areReady = (): boolean => {
      const ready = this.fleet.workers().filter((worker) => worker?.state === 'ready');
      return ready.length === named.length && this.fleet.workers().filter((worker) => worker).length === named.length;
    };
    await vi.waitUntil(areReady, { timeout: 20_000 });
  }

  /** Closes the API server and opens one with these options, before the first engine alone. */
  async open(
    options: Partial<Omit<ApiServerOptions, 'handOffs'>> & {
      readonly routing?: Partial<DispatcherOptions>;
      readonly handOffs?: Partial<HandOffLimits>;
    } = {},
  ): Promise<void> {
    await this.close();
    this.discovery = new SpokenDiscovery();
    this.fleet = new Fleet({ logger: silent });
    this.holdings = new FakeHoldings();
    const { routing, handOffs: limits = {}, limits: serverLimits, ...more } = options;
    this.dispatcher = new Dispatcher({ workers: this.fleet, holdings: this.holdings, ...routing });
    const { fleet, holdings } = this;
    this.handOffs = new HandOffs({ engines: fleet, holdings, limits, logger: silent });
    await this.fleet.start(this.discovery);
    this.discovery.say(this.named('a'));
    this.server = await startApiServer({
      host: '127.0.0.1',
      port: 0,
      engines: this.fleet,
      dispatch: this.dispatcher,
      handOffs: this.handOffs,
      media: tierMedia,
      logger: silent,
      text,
      limits: { absentMs: 0, ...serverLimits },
      ...more,
    });
    this.client = new OpenAI({ baseURL: `${this.server.url}/v1`, apiKey: 'none', maxRetries: 0 });
  }

  async close(): Promise<void> {
    await this.server?.close();
    this.dispatcher?.close();
    await this.fleet?.close();
  }

  post(path: string, body: unknown, init: RequestInit = {}): Promise<Response> {
    return fetch(this.server.url + path, {
      method: 'POST',
      headers: { 'content-type': 'application/json' },
      body: typeof body === 'string' ? body : JSON.stringify(body),
      ...init,
    });
  }

  /** From now on: tokens of the answers that choices were told of at their end. */
  watchAnswers(): (number | undefined)[] {
    const told: (number | undefined)[] = [];
    const choose = this.dispatcher.choose.bind(this.dispatcher);
    vi.spyOn(this.dispatcher, 'choose').mockImplementation(async (...asked) => {
      const choice = await choose(...asked);
      const ended = choice.ended.bind(choice);
      return Object.assign(choice, {
        ended: (answerTokens?: number) => {
          told.push(answerTokens);
          ended(answerTokens);
        },
      });
    });
    return told;
  }

  async metricsText(): Promise<string> {
    return (await fetch(`${this.server.url}/metrics`)).text();
  }

  /** The whole answer to bytes written as they are. */
  rawRequest(text: string): Promise<string> {
    return new Promise((resolve, reject) => {
      const socket = connect(Number(new URL(this.server.url).port), '127.0.0.1', () => socket.end(text));
      let answer = '';
      socket.on('data', (bytes) => (answer += bytes));
      socket.on('end', () => resolve(answer));
      socket.on('error', reject);
    });
  }
}

export async function caught(promise: Promise<unknown>): Promise<APIError> {
  const thrown = await promise.then(
    () => undefined,
    (error: unknown) => error,
  );
  expect(thrown).toBeInstanceOf(APIError);
  return thrown as APIError;
}

export const jsonOf = async (response: Response) =>
  (await response.json()) as { done?: boolean; error: { code: string } };

/** The JSON of each event of a stream; [DONE] as it stands. */
export const eventsOf = async (response: Response): Promise<unknown[]> =>
  (await response.text())
    .split('\n\n')
    .filter((line) => line !== '')
    .map((line) => (line === 'data: [DONE]' ? '[DONE]' : JSON.parse(line.slice('data: '.length))));
