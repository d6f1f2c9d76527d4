/** A real vLLM behind its own OpenAI server, as in a pod: the demo's model, the connector, one process group. */
import { type ChildProcess, spawn } from 'node:child_process';
import { once } from 'node:events';
import { createServer } from 'node:net';
import { join } from 'node:path';
import { setTimeout as sleep } from 'node:timers/promises';
import { fileURLToPath } from 'node:url';
import { python } from './engine.ts';

const root = fileURLToPath(new URL('../..', import.meta.url));
const startMs = 400_000;

/** A port of this machine that is free now. */
export async function freePort(): Promise<number> {
  const server = createServer().listen(0, '127.0.0.1');
  await once(server, 'listening');
  const { port } = server.address() as { port: number };
  server.close();
  await once(server, 'close');
  return port;
}

/** What of its metrics tests look at. */
export interface PodCounts {
  /** Prompt tokens that the connector brought. */
  readonly external: number;
  /** Prompt tokens that it was given. */
  readonly prompt: number;
  /** Requests that another pod's pins were ended for. */
  readonly pinsEnded: number;
}

export class VllmPod {
  readonly #child: ChildProcess;
  readonly address: string;
  said = '';

  private constructor(port: number, socket: string | null, extra: object) {
    this.address = `http://127.0.0.1:${port}`;
    const transfer = {
      kv_connector: 'KvtierConnector',
      kv_connector_module_path: 'kvtier.vllm.connector',
      kv_role: 'kv_both',
      kv_connector_extra_config: { socket, ...extra },
    };
    const args = [
      ...[join(root, 'test/vllm/server.py'), '--model', join(root, 'models/demo/model')],
      ...['--served-model-name', 'demo', '--host', '127.0.0.1', '--port', String(port), '--enforce-eager'],
      ...['--dtype', 'float32', '--block-size', '16', '--max-model-len', '2048', '--max-num-seqs', '16'],
      ...(socket === null ? [] : ['--kv-transfer-config', JSON.stringify(transfer)]),
    ];
    this.#child = spawn(python[0]!, [...python.slice(1), ...args], {
      stdio: ['ignore', 'pipe', 'pipe'],
      detached: true,
      env: {
        PYTHONHASHSEED: '0', // as in engine.ts
        ...process.env,
        PYTHONPATH: join(root, 'packages/connector/python/src'),
        VLLM_CPU_KVCACHE_SPACE: '1',
        HF_HUB_OFFLINE: '1',
      },
    });
    for (const stream of [this.#child.stdout!, this.#child.stderr!])
      stream.setEncoding('utf8').on('data', (text: string) => {
        this.said = (this.said + text).slice(-20_000);
      });
  }

  /** Resolves when it serves. @throws Error with the end of what it said */
  static async start(socket: string | null, extra: object = {}): Promise<VllmPod> {
    const pod = new VllmPod(await freePort(), socket, extra);
    const end = performance.now() + startMs;
    for (;;) {
      if (await pod.#serves()) return pod;
      if (pod.#child.exitCode !== null || performance.now() > end) {
        await pod.kill();
        throw new Error(`vLLM did not start\n${pod.said.slice(-4000)}`);
      }
      await sleep(500);
    }
  }

  async #serves(): Promise<boolean> {
    try {
      return (await fetch(`${this.address}/health`, { signal: AbortSignal.timeout(5_000) })).status === 200;
    } catch {
      return false;
    }
  }

  /** Since it started. */
  async counts(): Promise<PodCounts> {
    const text = await (await fetch(`${this.address}/metrics`, { signal: AbortSignal.timeout(20_000) })).text();
    const sum = (name: string): number =>
      [...text.matchAll(new RegExp(`^${name}\\{[^}]*\\} ([0-9.e+]+)$`, 'gm'))].reduce(
        (all, [, n]) => all + Number(n),
        0,
      );
    return {
      external: sum('vllm:external_prefix_cache_hits_total'),
      prompt: sum('vllm:prompt_tokens_total'),
      pinsEnded: sum('vllm:kvtier_pins_ended_total'),
    };
  }

  /** SIGKILL to it and all its children. */
  async kill(): Promise<void> {
    const gone = this.#child.exitCode !== null || this.#child.signalCode !== null;
    const end = gone ? undefined : once(this.#child, 'exit');
    try {
      process.kill(-this.#child.pid!, 'SIGKILL');
    } catch {
      // none is left
    }
    await end;
  }
}
