/** A connector between a fake executor and a fake node, in a folder of its own. */
import { mkdtempSync, rmSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import type { ArrivedLoad, AwaitedLoad, LoadResult, Match, StoreOptions } from '@kvtier/scheduler';
import { type ConnectorOptions, createConnector, type NodeConnector } from '../node-connector.ts';
import type { Timers } from '../timers.ts';
import { FakeExecutor } from './fake-executor.ts';
import { FakeNode } from './fake-node.ts';
import type { ManualTimers } from './manual-timers.ts';
import { chainOf, contentOf, hashBytes, hashOf } from './memory.ts';

/** Real time, `speed` times as fast: deadlines of seconds pass in a test of milliseconds. */
export const fastTimers = (speed: number): Timers => ({
  nowMs: () => performance.now() * speed,
  after: (ms, run) => {
    const timer = setTimeout(run, ms / speed);
    return () => clearTimeout(timer);
  },
});

/** Poll until `condition` holds; throws after twenty seconds, as a machine may be busy with others, or `limitMs`. */
export async function until(condition: () => boolean, what: string, limitMs = 20_000): Promise<void> {
  const deadline = performance.now() + limitMs;
  while (!condition()) {
    if (performance.now() > deadline) throw new Error(`still waiting: ${what}`);
    await new Promise((resolve) => setTimeout(resolve, 1));
  }
}

export class ConnectorRig {
  readonly folder = mkdtempSync(join(tmpdir(), 'kvtier-connector-'));
  readonly node = new FakeNode(join(this.folder, 's'));
  readonly executor = new FakeExecutor(256);
  readonly connector: NodeConnector;
  readonly warnings: string[] = [];
  wakes = 0;
  /** The connector is being called: it may not call back. */
  #inside = false;
  /** What was rather computed. */
  readonly passed: { readonly byTier: Readonly<Record<string, number>>; readonly us: number }[] = [];

  constructor(options: Partial<ConnectorOptions> = {}) {
    this.connector = createConnector({
      socketPath: join(this.folder, 's'),
      executor: this.executor,
      namespace: new Uint8Array(32).fill(7),
      hashBytes,
      loadDeadlineMs: 5_000,
      logger: { info: () => {}, warn: (_, message) => this.warnings.push(message) },
      onWake: () => this.wakes++,
      onPassed: (byTier, us) => this.passed.push({ byTier, us }),
      ...options,
    });
  }

  /** Start the node and wait for the session. */
  async attach(): Promise<void> {
    await this.node.start();
    await this.attached();
  }

  /** The same where the clock, its own, goes as the test says. */
  async attachByHand(timers: ManualTimers): Promise<void> {
    await this.node.start();
    while (!this.connector.attached) {
      await timers.pass(20); // between its attempts
      await new Promise((resolve) => setTimeout(resolve, 1));
    }
  }

  attached = (): Promise<void> => until(() => this.connector.attached, 'a session');

  async matched(id: string, hashes: Buffer, localBlocks: number): Promise<number> {
    let match: Match = this.connector.match(id, hashes, localBlocks);
    await until(() => {
      match = this.connector.match(id, hashes, localBlocks);
      return match.state === 'known';
    }, 'a match');
    return (match as { blocks: number }).blocks;
  }

  load(
    id: string,
    chain: number,
    first: number,
    blockIds: number[],
    onArrived?: (load: ArrivedLoad) => boolean,
    awaited?: AwaitedLoad,
    hasHead?: () => boolean,
  ): Promise<LoadResult> {
    return new Promise((resolve) => {
      const hashes = chainOf(chain, first + blockIds.length);
      const onDone = this.#once(resolve);
      const ids = Int32Array.from(blockIds);
      this.#within(() => this.connector.load(id, hashes, first, ids, onDone, onArrived, awaited, hasHead));
    });
  }

  endLoad(id: string, blocks: number): void {
    this.#within(() => this.connector.endLoad(id, blocks));
  }

  /** Fill the blocks with what is right for the chain and store them. */
  store(chain: number, first: number, blockIds: number[], options?: StoreOptions): Promise<void> {
    for (const [i, id] of blockIds.entries()) this.executor.blocks[id]!.set(contentOf(hashOf(chain, first + i)));
    return new Promise((resolve) => {
      const onReleased = this.#once<void>(resolve);
      const hashes = chainOf(chain, first + blockIds.length);
      this.#within(() => this.connector.store(hashes, first, Int32Array.from(blockIds), onReleased, options));
    });
  }

  #within(call: () => void): void {
    this.#inside = true;
    try {
      call();
    } finally {
      this.#inside = false;
    }
  }

  /** Called back once, and from inside no call. */
  #once<T>(resolve: (value: T) => void): (value: T) => void {
    let called = false;
    return (value) => {
      if (this.#inside) throw new Error('called back from inside a call');
      if (called) throw new Error('called back twice');
      called = true;
      resolve(value);
    };
  }

  /** The block holds what belongs to block `index` of the chain. */
  holds(block: number, chain: number, index: number): boolean {
    return Buffer.compare(this.executor.blocks[block]!, contentOf(hashOf(chain, index))) === 0;
  }

  async close(): Promise<void> {
    await this.connector.close();
    await this.node.kill();
    rmSync(this.folder, { recursive: true, force: true });
  }
}
