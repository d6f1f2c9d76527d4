/** A cache node and real vLLM engines beside it, and the comparison of what they answer. */
import { appendFileSync, existsSync, mkdtempSync, rmSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { expect } from 'vitest';
import { Service } from '../faults/engine-rig.ts';
import { type EngineOptions, type Run, VllmEngine } from './engine.ts';
import { wholeTokens } from './prompts.ts';

/** Where it is told what is held, not how fast: a machine that does other things beside takes its time. */
export const patient = {
  lookup_deadline_ms: 5_000,
  load_deadline_ms: 20_000,
  plan_loads: false,
};

/** A figure of this run, for whoever runs it by hand; into the file that KVTIER_VLLM_FIGURES names, too. */
export function tell(line: string): void {
  process.stdout.write(`${line}\n`);
  if (process.env.KVTIER_VLLM_FIGURES) appendFileSync(process.env.KVTIER_VLLM_FIGURES, `${line}\n`);
}

/** What the connector counted, for the line of a figure. */
export const counted = (run: Run): string =>
  Object.entries(run)
    .filter(([name, value]) => name.startsWith('kvtier_') && Number(value) > 0)
    .map(([name, value]) => `${name.slice('kvtier_'.length)} ${value}`)
    .join(', ');

/** Of the tokens in whole blocks of all prompts, those that were not computed. */
export function cachedShare(run: Run, prompts: readonly (readonly number[])[]): number {
  const sum = (values: readonly number[]): number => values.reduce((a, b) => a + b, 0);
  return sum(run.results.map((result) => result!.cached)) / sum(prompts.map(wholeTokens));
}

export class VllmRig {
  readonly folder = mkdtempSync(join(tmpdir(), 'kvtier-vllm-'));
  readonly socket = join(this.folder, 'n/s');
  readonly node: Service;
  readonly #engines: VllmEngine[] = [];

  /** `config`: what the cache node has besides, or instead. `prefix`: as of `Service`. */
  constructor(config: object = {}, prefix: readonly string[] = []) {
    const whole = {
      socketPath: this.socket,
      dataDir: join(this.folder, 'data'),
      arena: { bytes: 192 << 20 },
      disk: { bytes: 512 << 20 },
      logLevel: 'warn',
      ...config,
    };
    this.node = new Service('cache-node', whole, {}, prefix);
  }

  async engine(options: Omit<EngineOptions, 'socket'> & { readonly socket?: string | null }): Promise<VllmEngine> {
    const engine = await VllmEngine.start({ socket: this.socket, ...options });
    this.#engines.push(engine);
    return engine;
  }

  /** vLLM's native offloading with the node beneath it: an engine's `transfer`. */
  offloading(extra: object = {}): object {
    return {
      kv_connector: 'KvtierOffloadingConnector',
      kv_connector_module_path: 'kvtier.vllm.offloading',
      kv_role: 'kv_both',
      kv_connector_extra_config: { socket: this.socket, ...extra },
    };
  }

  /** The arena that the node has now. */
  arena(): string {
    const path = String(this.node.ready.at(-1)!.arenaPath);
    if (!existsSync(path)) throw new Error(`${path}: the node's arena is gone`);
    return path;
  }

  async close(): Promise<void> {
    for (const engine of this.#engines) await engine.kill();
    await this.node.signal('SIGCONT');
    await this.node.signal('SIGTERM');
    rmSync(this.folder, { recursive: true, force: true });
  }
}

/**
 * Every request of `run` ended well with the tokens of `right`, and log-probabilities within `within` of them (floating
 * point sums depend on who shares a step).
 */
export function expectEqual(run: Run, right: Run, within = 2e-3): void {
  expect(run.results.map((result) => result?.reason)).toEqual(right.results.map(() => 'length'));
  const differs = run.results.flatMap((result, at) =>
    result!.tokens.join() === right.results[at]!.tokens.join() ? [] : [at],
  );
  expect(differs).toEqual([]);
  const distances = run.results.flatMap((result, at) =>
    result!.logprobs.map((value, token) => Math.abs(value - right.results[at]!.logprobs[token]!)),
  );
  expect(Math.max(...distances)).toBeLessThan(within);
}
