/**
 * What the API server's tests share: a scripted engine on a Unix socket, the API server before it and OpenAI's own client, fresh
 * for every test; nothing is left behind.
 */
import { mkdtempSync, rmSync } from 'node:fs';
import { connect } from 'node:net';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { ScriptedEngine } from '@kvtier/registry/testing';
import { createLogger } from '@kvtier/telemetry';
import OpenAI, { APIError } from 'openai';
import { afterEach, beforeEach, expect } from 'vitest';
import { type ApiServer, type ApiServerOptions, startApiServer } from '../api-server.ts';
import { type LoadedText, TextPool } from '../text-pool.ts';
import { loadTokenizer } from '../tokenizer.ts';
import type { TextModel } from '../understand.ts';

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

export class Harness {
  dir!: string;
  engine!: ScriptedEngine;
  server!: ApiServer;
  client!: OpenAI;

  /** Registers the hooks. */
  constructor() {
    beforeEach(async () => {
      this.dir = mkdtempSync(join(tmpdir(), 'kvtier-api-server-'));
      this.engine = new ScriptedEngine(`unix:${this.dir}/engine.sock`, modelDir);
      await this.engine.start();
      await this.open();
    });
    afterEach(async () => {
      await this.server.close();
      await this.engine.stop();
      rmSync(this.dir, { recursive: true, force: true });
    });
  }

  /** Closes the API server and opens one with these options. */
  async open(options: Partial<ApiServerOptions> = {}): Promise<void> {
    await this.server?.close();
    const engine = `unix:${this.dir}/engine.sock`;
    this.server = await startApiServer({ host: '127.0.0.1', port: 0, engine, logger: silent, text, ...options });
    this.client = new OpenAI({ baseURL: `${this.server.url}/v1`, apiKey: 'none', maxRetries: 0 });
  }

  post(path: string, body: unknown, init: RequestInit = {}): Promise<Response> {
    return fetch(this.server.url + path, {
      method: 'POST',
      headers: { 'content-type': 'application/json' },
      body: typeof body === 'string' ? body : JSON.stringify(body),
      ...init,
    });
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
