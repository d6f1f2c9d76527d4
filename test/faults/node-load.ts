/**
 * Engines that store and load chains at whole nodes for as long as a fault test wants. Every byte that arrives is checked
 * (`NodeClient.load` throws for a wrong one), so "0 failed requests, 0 wrong blocks" is: `stop` does not throw.
 */
import type { StatsResult } from '@kvtier/wire';
import { until } from '../../infra/redis/servers.ts';
import type { NodeClient, NodeRig } from './node-rig.ts';

const blocks = 8;
const deadlineMs = 3_000;
/** A request may take its deadline; the rest is for a machine that does many other things. */
const hangMs = 10 * deadlineMs;

export class NodeLoad {
  /** Blocks served, by tier. */
  readonly served = new Map<string, number>();
  requests = 0;
  readonly #chains: number;
  readonly #runs: Promise<void>[] = [];
  #failure: unknown;
  #running = true;

  /** `chains` x 8 blocks x 100 kB are asked for, over and over, by all engines. */
  constructor(engines: readonly NodeClient[], chains: number) {
    this.#chains = chains;
    for (const [number, engine] of engines.entries()) this.#runs.push(this.#run(engine, number));
  }

  /** Resolves after so many further requests, of all engines together. */
  async more(requests: number): Promise<void> {
    const end = this.requests + requests;
    await this.until(() => this.requests >= end, `${requests} more requests`);
  }

  /** Blocks of the tier are served again, from now on. */
  async servedFrom(tier: string): Promise<void> {
    const before = this.served.get(tier) ?? 0;
    await this.until(() => (this.served.get(tier) ?? 0) > before, `blocks from ${tier}`);
  }

  async until(isSo: () => boolean | Promise<boolean>, what: string): Promise<void> {
    await until(() => this.#failure !== undefined || isSo(), what, 90_000);
    if (this.#failure !== undefined) throw this.#failure;
  }

  async stop(): Promise<void> {
    this.#running = false;
    await Promise.all(this.#runs);
    if (this.#failure !== undefined) throw this.#failure;
  }

  async #run(engine: NodeClient, number: number): Promise<void> {
    try {
      for (let turn = number * 7; this.#running; turn += 1 + (turn % 5)) {
        const name = `c${turn % this.#chains}`;
        const startMs = performance.now();
        const { loaded, tiers } = await engine.load(name, blocks, deadlineMs);
        for (const tier of tiers) this.served.set(tier, (this.served.get(tier) ?? 0) + 1);
        if (loaded < blocks) await engine.put(name, blocks - loaded, loaded);
        const tookMs = performance.now() - startMs;
        if (tookMs > hangMs) throw new Error(`${name}: a request took ${tookMs} ms`);
        this.requests++;
        await new Promise((resolve) => setImmediate(resolve));
      }
    } catch (error) {
      this.#failure ??= error;
    }
  }
}

export type TierReport = StatsResult['tiers'][number];

export async function tierOf(engine: NodeClient, name: string): Promise<TierReport> {
  const found = (await engine.stats()).tiers.find(({ tier }) => tier === name);
  if (found === undefined) throw new Error(`the node has no tier ${name}`);
  return found;
}

/** Two nodes, with engines of their own for the load and one each for questions. */
export class Pair {
  readonly a: NodeRig;
  readonly b: NodeRig;
  askA: NodeClient | undefined;
  askB: NodeClient | undefined;
  readonly #engines: NodeClient[] = [];

  constructor(a: NodeRig, b: NodeRig) {
    this.a = a;
    this.b = b;
  }

  /** Two engines at each node. */
  async engines(): Promise<NodeClient[]> {
    this.askA = await this.a.attach();
    this.askB = await this.b.attach();
    const engines = [await this.a.attach(), await this.b.attach(), await this.a.attach(), await this.b.attach()];
    this.#engines.push(this.askA, this.askB, ...engines);
    return engines;
  }

  async dispose(): Promise<void> {
    for (const engine of this.#engines.splice(0)) await engine.end();
    await this.a.dispose();
    await this.b.dispose();
  }
}
