/**
 * A real vLLM engine as a process: `engine.py` in the Python that KVTIER_VLLM_PYTHON names. Nothing here knows of vLLM's
 * inside; what crosses is token ids, counts and log-probabilities as JSON lines.
 */
import { type ChildProcess, execFileSync, spawn } from 'node:child_process';
import { once } from 'node:events';
import { existsSync, mkdirSync } from 'node:fs';
import { join } from 'node:path';
import { createInterface } from 'node:readline';
import type { Readable, Writable } from 'node:stream';
import { fileURLToPath } from 'node:url';

const root = fileURLToPath(new URL('../..', import.meta.url));
const here = (name: string): string => join(root, 'test/vllm', name);

/** How Python is called: a command and its first arguments, split at spaces. */
export const python = (process.env.KVTIER_VLLM_PYTHON ?? 'python3').split(' ');

/** Why there is no vLLM to test in, in one line; null when there is one. */
export function vllmMissing(): string | null {
  try {
    execFileSync(
      python[0]!,
      [...python.slice(1), '-c', 'import importlib.util as u, sys; sys.exit(u.find_spec("vllm") is None)'],
      {
        stdio: 'ignore',
        timeout: 60_000,
      },
    );
    return null;
  } catch {
    return `${python.join(' ')} has no vLLM; install it, or name a Python that has it in KVTIER_VLLM_PYTHON`;
  }
}

/**
 * Full attention; windows alone; full attention and windows (two shapes of KV groups); full attention, 8 KiB and
 * 4 KiB of KV a token, for long prompts.
 */
export type ModelKind = 'llama' | 'mistral-sw' | 'gemma3' | 'llama-8k' | 'llama-long';

/** A small random model of this kind, made at its first use. */
export function model(kind: ModelKind): string {
  const folder = join(root, 'build/vllm', kind);
  if (!existsSync(join(folder, 'config.json'))) {
    mkdirSync(folder, { recursive: true });
    execFileSync(python[0]!, [...python.slice(1), here('models.py'), kind, folder], {
      stdio: 'ignore',
      timeout: 120_000,
    });
  }
  return folder;
}

/** What one request gave. */
export interface Result {
  readonly tokens: readonly number[];
  readonly reason: string;
  /** Prompt tokens that were not computed: vLLM's own hits and the connector's. */
  readonly cached: number;
  readonly logprobs: readonly number[];
}

export interface Run {
  readonly seconds: number;
  /** Of the engine's process, all its threads. */
  readonly cpu_s: number;
  readonly results: readonly (Result | null)[];
  /** Tokens that the connector was asked for and brought. */
  readonly external_queries: number;
  readonly external_hits: number;
  readonly preemptions: number;
  /** Seconds to the first token of each request. */
  readonly first_s: readonly (number | null)[];
}

/** Sent to a process when so many requests have finished, and so many steps were made. */
export interface Blow {
  readonly after_finished?: number;
  readonly after_steps?: number;
  readonly signal: number;
  readonly pid: number;
}

export interface EngineOptions {
  readonly model: ModelKind;
  /** The node's socket; null: without the connector. */
  readonly socket: string | null;
  /** `kv_connector_extra_config` besides the socket. */
  readonly extra?: object;
  readonly ranks?: number;
  /** Of the longest prompt and its answer. */
  readonly tokens?: number;
  /** Of a step, at most. */
  readonly stepTokens?: number;
  /** KV blocks of 16 tokens. */
  readonly blocks?: number;
  /** Another connector than ours: vLLM's own, as the other side of a comparison. */
  readonly transfer?: object;
}

const startMs = 400_000;
const outputTokens = 12;
const maxRunning = 16;

/** Steps that a run of so many prompts takes at least, whatever is loaded. */
export const leastSteps = (prompts: number): number =>
  Math.max(outputTokens, Math.ceil((outputTokens * prompts) / maxRunning));

export class VllmEngine {
  readonly #child: ChildProcess;
  readonly #answers: AsyncIterator<string>;
  #said = '';

  private constructor(ranks: number) {
    this.#child = spawn(python[0]!, [...python.slice(1), here('engine.py')], {
      stdio: ['pipe', 'pipe', 'pipe', 'pipe'],
      detached: true, // its own group: a death takes EngineCore and workers with it
      env: {
        // vLLM's hashes begin with it: engines that are to share, and one that starts again, need the same.
        PYTHONHASHSEED: '0',
        ...process.env,
        PYTHONPATH: join(root, 'packages/connector/python/src'),
        VLLM_LOGGING_LEVEL: 'INFO',
        VLLM_CPU_KVCACHE_SPACE: '1',
        // One rank in one process, as in a service's own tests; several have EngineCore and workers of their own.
        VLLM_ENABLE_V1_MULTIPROCESSING: ranks === 1 ? '0' : '1',
        HF_HUB_OFFLINE: '1',
      },
    });
    const hear = (text: string): void => {
      this.#said = (this.#said + text).slice(-40_000);
    };
    this.#child.stdout!.setEncoding('utf8').on('data', hear);
    this.#child.stderr!.setEncoding('utf8').on('data', hear);
    this.#answers = createInterface({ input: this.#child.stdio[3] as Readable })[Symbol.asyncIterator]();
  }

  /** Resolves when it serves. @throws Error with the end of what it said */
  static async start(options: EngineOptions): Promise<VllmEngine> {
    const engine = new VllmEngine(options.ranks ?? 1);
    const ours = options.socket !== null && {
      kv_connector: 'KvtierConnector',
      kv_connector_module_path: 'kvtier.vllm.connector',
      kv_role: 'kv_both',
      kv_connector_extra_config: { socket: options.socket, ...options.extra },
    };
    await engine.#call(
      {
        do: 'start',
        model: model(options.model),
        options: {
          dtype: 'float32',
          block_size: 16,
          max_model_len: options.tokens ?? 2048,
          max_num_batched_tokens: options.stepTokens ?? 512,
          max_num_seqs: maxRunning,
          tensor_parallel_size: options.ranks ?? 1,
          ...(options.blocks !== undefined && { num_gpu_blocks_override: options.blocks }),
        },
        transfer: options.transfer ?? (ours || null),
      },
      startMs,
    );
    return engine;
  }

  get pid(): number {
    return this.#child.pid!;
  }

  /** All that it has printed lately. */
  get said(): string {
    return this.#said;
  }

  async #call(command: object, limitMs: number): Promise<Record<string, unknown>> {
    (this.#child.stdin as Writable).write(`${JSON.stringify(command)}\n`);
    const limit = AbortSignal.timeout(limitMs);
    const late = once(limit, 'abort').then(() => {
      throw new Error(
        `${JSON.stringify(command).slice(0, 80)}: no answer within ${limitMs} ms\n${this.#said.slice(-4000)}`,
      );
    });
    const line = await Promise.race([this.#answers.next(), late]);
    if (line.done) throw new Error(`the engine ended\n${this.#said.slice(-4000)}`);
    const answer = JSON.parse(line.value) as { ok: boolean; error?: string; trace?: string };
    if (!answer.ok) throw new Error(`${answer.error}\n${answer.trace}\n${this.#said.slice(-2000)}`);
    return answer as unknown as Record<string, unknown>;
  }

  /** All prompts together, greedy. */
  async generate(
    prompts: readonly (readonly number[])[],
    more: { events?: readonly Blow[]; waves?: number; tokens?: number } = {},
  ): Promise<Run> {
    return (await this.#call(
      { do: 'generate', prompts, tokens: outputTokens, logprobs: 1, limit_s: 580, ...more },
      600_000,
    )) as unknown as Run;
  }

  /** Until what is being stored is stored. */
  settle = (seconds = 2): Promise<unknown> => this.#call({ do: 'settle', seconds }, 60_000);

  /** Empties vLLM's own prefix cache; what the tier holds stays. */
  async reset(): Promise<void> {
    const { reset } = await this.#call({ do: 'reset' }, 60_000);
    if (reset !== true) throw new Error('vLLM did not empty its prefix cache');
  }

  state = (): Promise<Record<string, unknown>> => this.#call({ do: 'state' }, 30_000);

  /** An orderly end. */
  async stop(): Promise<void> {
    await this.#call({ do: 'stop' }, 60_000).catch(() => {});
    await this.kill();
  }

  /** SIGKILL to it and all its children; resolves when it is gone. */
  async kill(): Promise<void> {
    const gone = this.#child.exitCode !== null || this.#child.signalCode !== null;
    const end = gone ? undefined : once(this.#child, 'exit');
    try {
      process.kill(-this.pid, 'SIGKILL'); // children may outlive it
    } catch {
      // none did
    }
    await end;
  }
}
