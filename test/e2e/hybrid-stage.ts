/**
 * A model of several attention groups in this process: a real cache node, the CPU executor, the connector with a session
 * per group, the engine. What goes to the connector is written down, and a load may be told to find blocks damaged.
 */
import { mkdtempSync, rmSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { fileURLToPath } from 'node:url';
import { createExecutor, type Executor } from '@kvtier/executor';
import { ChainHasher, keysAndValues, layoutFingerprint, namespaceOf } from '@kvtier/identity';
import { type CacheNode, openCacheNode } from '@kvtier/node';
import { systemClock } from '@kvtier/runtime';
import {
  type CacheUse,
  type Connector,
  Engine,
  type EngineLimits,
  type GenerateRequest,
  type HandOffState,
  noConnector,
} from '@kvtier/scheduler';
import { createConnector, type NodeConnector } from '@kvtier/session-client';

const golden = fileURLToPath(new URL('../numerics/golden', import.meta.url));
const silent = { debug: () => {}, info: () => {}, warn: () => {}, error: () => {} };

/** Row-major [group][block] from block `first` of a chain on; 0: not moved. */
export interface Moved {
  readonly first: number;
  readonly rows: number[][];
}

export interface StageOptions {
  readonly model: string;
  readonly blockTokens: number;
  readonly blockCount?: number;
  readonly limits?: Partial<EngineLimits>;
  /** undefined: no tier. */
  readonly node?: { readonly socketPath: string };
}

export class TestNode {
  readonly folder = mkdtempSync(join(tmpdir(), 'kvtier-hybrid-'));
  readonly socketPath = join(this.folder, 's');
  node: CacheNode | undefined;

  async open(): Promise<this> {
    this.node = await openCacheNode({
      socketPath: this.socketPath,
      dataDir: join(this.folder, 'data'),
      arena: { bytes: 16 << 20, dir: '/dev/shm' },
      disk: null,
      clock: systemClock,
      log: silent,
    });
    return this;
  }

  /** Blocks in the arena, of all groups. */
  get blocks(): number {
    return this.node!.store.stats().tiers[0]!.blocks;
  }

  async close(): Promise<void> {
    await this.node?.close();
    rmSync(this.folder, { recursive: true, force: true });
  }
}

export class Stage {
  readonly executor: Executor;
  readonly engine: Engine;
  readonly windows: readonly number[];
  readonly stores: Moved[] = [];
  readonly loads: Moved[] = [];
  /** Asked for each block that is imported, by [group, place in the chain]: true spoils it. */
  damaged: (group: number, block: number) => boolean = () => false;
  /** Puts the blocks of a window where others belong: what a wrong import would do. */
  swapped = false;
  readonly #connector: NodeConnector | undefined;
  readonly #places = new Map<number, [number, number]>();
  #requests = 0;

  static async open(options: StageOptions): Promise<Stage> {
    const { model, blockTokens, blockCount = 400, limits } = options;
    const executor = await createExecutor({
      modelDir: join(golden, model),
      blockTokens,
      blockCount,
      threads: 1,
      maxStepTokens: limits?.maxStepTokens ?? 32,
      maxStepSequences: 8,
    });
    const stage = new Stage(executor, options);
    if (options.node) await stage.attached();
    return stage;
  }

  constructor(executor: Executor, { blockTokens, limits, node }: StageOptions) {
    this.executor = executor;
    const groups = executor.kv.groups!;
    this.windows = groups.map(({ windowTokens }) => windowTokens);
    const hasher = new ChainHasher({ algorithm: 'sha256_cbor', blockTokens });
    const fields = {
      modelDigest: executor.modelDigest,
      kvDtype: executor.kv.dtype,
      blockTokens,
      algorithm: hasher.algorithm,
      root: hasher.root,
      layoutFingerprint: layoutFingerprint(keysAndValues(executor.kv)),
    };
    this.#connector = node
      ? createConnector({
          socketPath: node.socketPath,
          executor: this.#spoiling(executor),
          namespace: groups.map((_, group) => namespaceOf({ ...fields, group }).digest),
          hashBytes: hasher.hashBytes,
          loadDeadlineMs: 20_000,
          lookupDeadlineMs: 20_000,
          logger: silent,
          onWake: () => this.engine.wake(),
        })
      : undefined;
    this.engine = new Engine({
      executor,
      connector: this.#recording(this.#connector ?? noConnector),
      hasher,
      eosTokenIds: [],
      limits: { maxStepTokens: 32, maxSequences: 8, maxWaiting: 100, matchDeadlineMs: 20_000, ...limits },
    });
  }

  get counters(): NodeConnector['counters'] {
    return this.#connector!.counters;
  }

  generate(
    prompt: readonly number[],
    maxTokens: number,
    more: Partial<GenerateRequest> = {},
    onHandOff: (state: HandOffState) => void = () => {},
  ): Promise<{ tokens: number[]; cache: CacheUse }> {
    return new Promise((resolve, reject) => {
      const tokens: number[] = [];
      let cache: CacheUse | undefined;
      const plain = { promptTokenIds: Int32Array.from(prompt), maxTokens, temperature: 0, topK: 0, topP: 1 };
      const request = { ...plain, ...more };
      this.engine.submit({ ...request, requestId: `r${this.#requests++}` }, (output) => {
        tokens.push(...output.tokenIds);
        cache ??= output.cache;
        if (output.handOff) onHandOff(output.handOff);
        if (output.error) reject(output.error);
        else if (output.finishReason !== '') resolve({ tokens, cache: cache! });
      });
    });
  }

  /** Every block that was offered is in the node, or was there. */
  async stored(): Promise<void> {
    while (this.engine.stats().exportBlocks > 0 || this.#connector!.storingBlocks > 0)
      await new Promise((resolve) => setTimeout(resolve, 2));
  }

  /** A session per group. */
  attached = async (): Promise<void> => {
    while (!this.#connector!.attached) await new Promise((resolve) => setTimeout(resolve, 2));
  };

  /** Blocks that a tier of the node holds, of all groups; 0 while the node does not say. */
  async blocksIn(tier: string): Promise<number> {
    const stats = await this.#connector!.stats(2_000);
    return Number(stats?.tiers.find((one) => one.tier === tier)?.blocks ?? 0);
  }

  async close(): Promise<void> {
    await this.engine.close();
    this.engine.checkIntegrity();
    await this.#connector?.close();
    await this.executor.close();
  }

  #rows(first: number, blockIds: Int32Array): Moved {
    const columns = blockIds.length / this.windows.length;
    return {
      first,
      rows: this.windows.map((_, group) => [...blockIds.subarray(group * columns, (group + 1) * columns)]),
    };
  }

  #recording(connector: Connector): Connector {
    const { stores, loads } = this;
    const rows = this.#rows.bind(this);
    const places = this.#places;
    return {
      get attached() {
        return connector.attached;
      },
      get storingBlocks() {
        return connector.storingBlocks;
      },
      match: (...args) => connector.match(...args),
      load: (id, hashes, first, blockIds, onDone, _onArrived, awaited) => {
        const moved = rows(first, blockIds);
        loads.push(moved);
        for (const [group, row] of moved.rows.entries())
          for (const [i, block] of row.entries()) places.set(block, [group, first + i]);
        connector.load(id, hashes, first, blockIds, onDone, undefined, awaited);
      },
      endLoad: (id, blocks) => connector.endLoad(id, blocks),
      store: (hashes, first, blockIds, ...told) => {
        stores.push(rows(first, blockIds));
        connector.store(hashes, first, blockIds, ...told);
      },
      prefetch: (...args) => connector.prefetch(...args),
      forget: (id) => connector.forget(id),
      observePrefill: () => {}, // the planner knows no rate: everything is loaded, whatever the machine does
      close: () => connector.close(),
    };
  }

  #spoiling(executor: Executor): Executor {
    return Object.assign(Object.create(executor) as Executor, {
      attachArena: executor.attachArena.bind(executor),
      detachArena: executor.detachArena.bind(executor),
      exportBlocks: executor.exportBlocks.bind(executor),
      kv: executor.kv,
      importBlocks: async (arena: number, ids: Int32Array, offsets: Float64Array, sums: BigUint64Array) => {
        const target = this.swapped && this.windows[this.#places.get(ids[0]!)![0]]! > 0 ? ids.slice().reverse() : ids;
        const flags = await executor.importBlocks(arena, target, offsets, sums);
        return flags.map((flag, i) => (this.damaged(...this.#places.get(ids[i]!)!) ? 0 : flag));
      },
    });
  }
}
