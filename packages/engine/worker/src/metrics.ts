/**
 * The worker's metrics, `kvtier_engine_*`, `kvtier_connector_*` and, as the cache node tells them, `kvtier_tier_*`.
 * Counters that others keep (scheduler, connector, node) are read when somebody asks, so that counting costs nothing.
 */

import type { KvEventPublisher } from '@kvtier/events';
import type { Executor } from '@kvtier/executor';
import type { CacheUse, EngineStats } from '@kvtier/scheduler';
import {
  Counter,
  Gauge,
  Histogram,
  pauseBuckets,
  processMetrics,
  Registry,
  secondsBuckets,
} from '@kvtier/telemetry/metrics';
import { nodeMetricsText } from '@kvtier/telemetry/node-metrics';
import type { WorkerConnector } from './open-connector.ts';

export interface MetricsSources {
  readonly engine: () => EngineStats;
  /** null: no tier. */
  readonly connector: WorkerConnector | null;
  /** null: none are published. */
  readonly events?: Pick<KvEventPublisher, 'stats'> | null;
  readonly executor?: Pick<Executor, 'backend' | 'maxStepTokens' | 'arenaPins' | 'describe'>;
}

/** A fraction of a scrape's usual patience: a node that is slow costs its own figures only. */
const statsDeadlineMs = 200;

type EngineFigures = Omit<EngineStats, 'handOffEnds'>;

const figuresOf = ({ handOffEnds: _, ...figures }: EngineStats): EngineFigures => figures;

/** Figures of the scheduler that go up and down; all others are counters. */
const engineGauges: Partial<Record<keyof EngineFigures, string>> = {
  waiting: 'Requests that wait',
  running: 'Requests in the running batch',
  loading: 'Requests that wait for blocks from the tier',
  awaiting: 'Of these, requests that wait for what another worker computes',
  blockCount: 'KV blocks of the pool',
  freeBlocks: 'KV blocks that nobody holds',
  cachedBlocks: 'KV blocks that can be hit',
  exportBlocks: 'KV blocks held by copies to the tier',
};

export class WorkerMetrics {
  readonly #registry = new Registry();
  readonly #registers = [this.#registry];
  readonly #sources: MetricsSources;
  readonly #tokens = new Counter({
    name: 'kvtier_engine_tokens_total',
    help: 'Tokens of prompts and answers',
    labelNames: ['kind'] as const,
    registers: this.#registers,
  });
  readonly #cachedTokens = new Counter({
    name: 'kvtier_engine_cached_tokens_total',
    help: 'Tokens of prompts that were not computed, by the tier they came from ("engine": its own block pool)',
    labelNames: ['tier'] as const,
    registers: this.#registers,
  });
  readonly #finished = new Counter({
    name: 'kvtier_engine_requests_total',
    help: 'Requests that ended, by how: stop, length, or the code of the error',
    labelNames: ['outcome'] as const,
    registers: this.#registers,
  });
  readonly #firstToken = new Histogram({
    name: 'kvtier_engine_time_to_first_token_seconds',
    help: 'From the arrival of a request to its first token',
    buckets: secondsBuckets,
    registers: this.#registers,
  });
  readonly #pause = new Histogram({
    name: 'kvtier_engine_time_between_tokens_seconds',
    help: 'From a token of an answer to its next one',
    buckets: pauseBuckets,
    registers: this.#registers,
  });
  readonly #queue = this.#phase('queue', 'waiting to be scheduled');
  readonly #load = this.#phase('load', 'loading blocks from the tier');
  readonly #prefill = this.#phase('prefill', 'computing the prompt');
  readonly #handOff = this.#phase('hand_off', 'waiting for what another worker computed');
  readonly #tail = this.#phase('tail', 'computing what was left after a hand-off');
  readonly #step = new Histogram({
    name: 'kvtier_engine_step_seconds',
    help: 'One forward pass over the running batch',
    buckets: secondsBuckets,
    registers: this.#registers,
  });

  constructor(sources: MetricsSources) {
    this.#sources = sources;
    processMetrics('engine', this.#registry);
    for (const [field, help] of Object.entries(engineGauges)) {
      const name = `engine_${field.replace(/[A-Z]/g, (letter) => `_${letter.toLowerCase()}`)}`;
      this.#gauge(name, help, () => sources.engine()[field as keyof EngineFigures]);
    }
    this.#labelled('engine_events_total', 'What the scheduler counts, by name', 'event', () =>
      Object.entries(figuresOf(sources.engine())).filter(([field]) => !Object.hasOwn(engineGauges, field)),
    );
    this.#labelled(
      'engine_hand_offs_total',
      'Waits for what another worker computes, by how they ended',
      'outcome',
      () => Object.entries(sources.engine().handOffEnds),
    );
    const { connector, events, executor } = sources;
    if (executor)
      this.#gauge('engine_step_tokens', 'Tokens that a step computes at most', () => executor.maxStepTokens);
    if (executor?.backend === 'cuda') this.#gpu(executor);
    if (events) {
      this.#gauge('kv_events_buffered_bytes', 'KV events kept for replay', () => events.stats().bufferedBytes);
      this.#labelled('kv_events_total', 'What the publisher of KV events counts, by name', 'count', () => {
        const { queuedBatches, bufferedBatches, bufferedBytes, ...counts } = events.stats();
        return Object.entries(counts);
      });
    }
    if (connector === null) return;
    this.#gauge('connector_attached', '1 while a cache node is attached and answers', () => Number(connector.attached));
    this.#gauge('connector_suspended', '1 while a silent cache node is left alone', () => Number(connector.suspended));
    this.#gauge('connector_storing_blocks', 'Blocks on their way to the node', () => connector.storingBlocks);
    this.#labelled('connector_events_total', 'What the connector counts, by name', 'event', () =>
      Object.entries(connector.counters).filter((entry): entry is [string, number] => typeof entry[1] === 'number'),
    );
    this.#labelled('connector_reasons_total', 'Lookups, loads and stores that fell short, by reason', 'reason', () =>
      Object.entries(connector.counters.reasons),
    );
  }

  observeStep(elapsedUs: number): void {
    this.#step.observe(elapsedUs / 1e6);
  }

  observePause(elapsedMs: number): void {
    this.#pause.observe(elapsedMs / 1e3);
  }

  observeFirstToken(elapsedUs: number, use: CacheUse): void {
    this.#firstToken.observe(elapsedUs / 1e6);
    this.#queue.observe(use.queueUs / 1e6);
    if (use.loadUs > 0) this.#load.observe(use.loadUs / 1e6);
    this.#prefill.observe(use.prefillUs / 1e6);
    if (use.handOffUs) {
      this.#handOff.observe(use.handOffUs / 1e6);
      this.#tail.observe((use.tailUs ?? 0) / 1e6);
    }
    this.#tokens.inc({ kind: 'prompt' }, use.promptTokens);
    for (const [tier, tokens] of Object.entries(use.tokensByTier)) this.#cachedTokens.inc({ tier }, tokens);
  }

  observeTokens(count: number): void {
    this.#tokens.inc({ kind: 'answer' }, count);
  }

  observeEnd(outcome: string): void {
    this.#finished.inc({ outcome });
  }

  /** Prometheus' text form. Never waits longer than a fraction of a second for the cache node. */
  async text(): Promise<string> {
    const [own, stats] = await Promise.all([this.#registry.metrics(), this.#sources.connector?.stats(statsDeadlineMs)]);
    return stats ? `${own.trimEnd()}\n\n${nodeMetricsText(stats)}` : own;
  }

  /** What runs the model there, and whether the arenas are pinned: what is not is copied at the speed of the CPU. */
  #gpu(executor: NonNullable<MetricsSources['executor']>): void {
    const { device = '', gemm = '', stepTimes } = executor.describe?.() ?? {};
    const info = new Gauge({
      name: 'kvtier_engine_gpu_info',
      help: '1; what runs the model: the device, and what computes matrix products',
      labelNames: ['device', 'gemm'] as const,
      registers: this.#registers,
    });
    info.set({ device: String(device), gemm: String(gemm) }, 1);
    this.#stepTimes(stepTimes);
    new Gauge({
      name: 'kvtier_engine_arena_bytes',
      help: 'Bytes of cache nodes’ arenas that are attached, by whether they are pinned for the GPU',
      labelNames: ['pinned'] as const,
      registers: this.#registers,
      collect() {
        for (const pinned of [true, false]) {
          const arenas = (executor.arenaPins ?? []).filter((pin) => pin.pinned === pinned);
          this.set(
            { pinned: pinned ? 'yes' : 'no' },
            arenas.reduce((sum, { bytes }) => sum + bytes, 0),
          );
        }
      },
    });
    this.#gauge('engine_arena_pin_seconds', 'What pinning the arenas that are attached took', () =>
      (executor.arenaPins ?? []).reduce((sum, { seconds }) => sum + seconds, 0),
    );
  }

  /** What the size of steps was chosen by, where it was. */
  #stepTimes(measured: unknown): void {
    if (!Array.isArray(measured)) return;
    const family = new Gauge({
      name: 'kvtier_engine_measured_step_seconds',
      help: 'Longest step of so many tokens, as it was measured to choose the size of steps',
      labelNames: ['tokens'] as const,
      registers: this.#registers,
    });
    for (const { tokens, longestUs } of measured as readonly { tokens: number; longestUs: number }[])
      family.set({ tokens: String(tokens) }, longestUs / 1e6);
  }

  #phase(name: string, what: string): Histogram {
    return new Histogram({
      name: `kvtier_engine_${name}_seconds`,
      help: `Part of the time to first token that was spent ${what}`,
      buckets: secondsBuckets,
      registers: this.#registers,
    });
  }

  #gauge(name: string, help: string, read: () => number): void {
    new Gauge({
      name: `kvtier_${name}`,
      help,
      registers: this.#registers,
      collect() {
        this.set(read());
      },
    });
  }

  /** A family of counters that somebody else keeps. */
  #labelled(name: string, help: string, label: string, read: () => [string, number][]): void {
    new Counter({
      name: `kvtier_${name}`,
      help,
      labelNames: [label],
      registers: this.#registers,
      collect() {
        this.reset();
        for (const [value, count] of read()) this.inc({ [label]: value }, count);
      },
    });
  }
}
