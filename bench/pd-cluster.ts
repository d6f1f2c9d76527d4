/**
 * Four workers on four hosts, each beside a node of its own, for the suite that measures what prefill and decode apart are worth: a
 * prefill and a decode worker (`apart`), and two that do both (`combined`). Coordinators are on no host: they reach workers by Unix
 * sockets, so that the way between the hosts carries blocks and nothing else.
 */
import { type ChildProcess, spawn } from 'node:child_process';
import { once } from 'node:events';
import { mkdtempSync, rmSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { program, waitUntil } from '@kvtier/cli';
import type { CoordinatorInput } from '@kvtier/config';
import { KvError } from '@kvtier/errors';
import { type Hosts, hosts } from '../infra/hosts/hosts.ts';
import { allowedProcessors } from './pinning.ts';
import { SharingHosts } from './sharing-hosts.ts';

const names = ['p', 'd', 'x', 'y'] as const;
type Host = (typeof names)[number];
/** Whose turn it is has two hosts: the n-th processor is for each. */
const places: Readonly<Record<Host, number>> = { p: 0, d: 1, x: 0, y: 1 };
const arenaBytes = 512 << 20;

/** predicted, always, never: of the prefill and the decode worker, by how requests are split. */
export type Way = 'predicted' | 'always' | 'never' | 'combined';

export class PdCluster {
  readonly #folder = mkdtempSync(join(tmpdir(), 'kvp-'));
  readonly #children: ChildProcess[] = [];
  readonly #coordinators = new Map<Way, ChildProcess>();
  readonly #urls = new Map<Way, string>();
  #hosts: Hosts<Host> | undefined;
  #sharing: SharingHosts<Host> | undefined;
  #apart: CoordinatorInput['discovery'];

  constructor() {
    process.once('exit', this.#leave);
  }

  /** All workers, with steps of so many prompt tokens if that is said, and the coordinator of the two combined ones. */
  static async start(modelDir: string, stepTokens?: number): Promise<PdCluster> {
    const cluster = new PdCluster();
    try {
      await cluster.#start(modelDir, stepTokens);
      return cluster;
    } catch (error) {
      await cluster.close();
      throw error;
    }
  }

  url = (way: Way): string => this.#urls.get(way)!;

  /** Of hand-offs so far: blocks that came to the decode worker, and of these those that came before all were computed. */
  async blocks(way: Way): Promise<{ come: number; hidden: number }> {
    const text = await (await fetch(`${this.url(way)}/metrics`)).text();
    const of = (what: string): number =>
      Number(new RegExp(`^kvtier_handoff_blocks_total\\{what="${what}"\\} (\\d+)`, 'm').exec(text)?.[1] ?? 0);
    return { come: of('come'), hidden: of('hidden') };
  }

  /** Of each host's link, each way. */
  rate = (gbit: number): Promise<void> => this.#hosts!.rate(gbit);

  /**
   * This process ends, by a signal or an error. What the hosts run is killed here, and waited for: arenas are removed once nobody holds
   * them any more.
   */
  readonly #leave = (): void => {
    for (const child of this.#children) child.kill('SIGKILL');
    this.#hosts?.end();
    this.#sharing?.sweep();
    rmSync(this.#folder, { recursive: true, force: true });
  };

  async close(): Promise<void> {
    for (const child of this.#children) {
      if (child.exitCode !== null || child.signalCode !== null) continue;
      child.kill('SIGKILL');
      await once(child, 'exit');
    }
    await this.#hosts?.close();
    this.#sharing?.sweep();
    rmSync(this.#folder, { recursive: true, force: true });
    process.off('exit', this.#leave);
  }

  async #start(modelDir: string, stepTokens?: number): Promise<void> {
    this.#hosts = await hosts(names);
    const processors = allowedProcessors();
    // What one host does takes no time from the other one, and its caches stay its own: as between machines.
    const sharing = new SharingHosts(this.#hosts, this.#folder, (host) => processors[places[host] % processors.length]);
    this.#sharing = sharing;
    const events = (name: string) => ({
      endpoint: `ipc://${join(this.#folder, `${name}.events`)}`,
      replayEndpoint: `ipc://${join(this.#folder, `${name}.replay`)}`,
    });
    const steps = stepTokens === undefined ? {} : { maxStepTokens: stepTokens };
    const address = (host: Host): string => `unix:${join(this.#folder, `w-${host}`)}`;
    const pair = async (one: Host, other: Host): Promise<void> => {
      for (const [host, peer] of [
        [one, other],
        [other, one],
      ] as const) {
        const node = await sharing.node(host, [peer], arenaBytes, { kvEvents: events(`n-${host}`) });
        const more = { listen: address(host), kvEvents: events(`w-${host}`), threads: 1, ...steps };
        await sharing.worker(host, modelDir, node, more);
      }
    };
    await pair('p', 'd');
    await pair('x', 'y');
    const discovery = (pairOf: readonly (readonly [Host, 'prefill' | 'decode' | 'both'])[]) => ({
      kind: 'static' as const,
      workers: pairOf.map(([host, role]) => ({
        ...{ name: `${role}-${host}`, role, address: address(host), node: `node-${host}`, events: events(`w-${host}`) },
      })),
      nodes: pairOf.map(([host]) => ({
        name: `node-${host}`,
        peer: { host: this.#hosts!.address(host), port: 7400 },
        events: events(`n-${host}`),
      })),
    });
    this.#apart = discovery([
      ['p', 'prefill'],
      ['d', 'decode'],
    ]);
    const combined = discovery([
      ['x', 'both'],
      ['y', 'both'],
    ]);
    await this.#coordinator('combined', { port: 0, discovery: combined, handoff: { split: 'never' } });
  }

  /**
   * These coordinators of the prefill and the decode worker, and no others: one that is asked nothing reads their events all the same,
   * a twentieth of what a prompt takes. Targets in milliseconds: to the first token, between two tokens.
   */
  async coordinate(
    targets: { ttftMs: number; itlMs: number },
    ways: readonly Exclude<Way, 'combined'>[],
  ): Promise<void> {
    for (const way of ['predicted', 'always', 'never'] as const) {
      const running = this.#coordinators.get(way);
      if (running !== undefined && !ways.includes(way)) {
        this.#coordinators.delete(way);
        running.kill('SIGKILL');
        await once(running, 'exit');
      }
      if (running === undefined && ways.includes(way))
        await this.#coordinator(way, { port: 0, discovery: this.#apart!, handoff: { split: way, ...targets } });
    }
  }

  async #coordinator(way: Way, config: CoordinatorInput): Promise<void> {
    const child = spawn(process.execPath, program('coordinator'), {
      stdio: ['ignore', 'inherit', 'inherit', 'ipc'],
      env: { ...process.env, KVTIER_CONFIG: JSON.stringify({ host: '127.0.0.1', logLevel: 'warn', ...config }) },
    });
    this.#children.push(child);
    this.#coordinators.set(way, child);
    const said = await Promise.race([once(child, 'message'), once(child, 'exit').then(() => undefined)]);
    if (said === undefined) throw new KvError('SETUP', 'coordinator: did not start; see the lines above');
    const [{ ready }] = said as [{ ready: { url: string } }];
    this.#urls.set(way, ready.url);
    await waitUntil('two workers ready', 30_000, async () => {
      const { workers = [] } = (await (await fetch(`${ready.url}/health`)).json()) as { workers?: { state: string }[] };
      return workers.filter(({ state }) => state === 'ready').length === 2;
    });
  }
}
