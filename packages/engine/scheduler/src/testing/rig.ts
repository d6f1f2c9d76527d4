/** An engine in a simulated world, and what its requests have put out so far. */
import { ChainHasher } from '@kvtier/identity';
import type { BlockPolicyName, KvCacheEvent, PackedEvents, PrefixCacheKind, RadixPolicy } from '@kvtier/prefix-cache';
import { Engine } from '../engine.ts';
import type { EngineLimits, GenerateRequest, Output } from '../types.ts';
import { ContentExecutor, nextToken } from './content-executor.ts';
import { type Faults, FaultyConnector, type SharedTier } from './faulty-connector.ts';
import { EngineWorld } from './world.ts';

export interface RigOptions {
  readonly seed?: number;
  /** One that several engines live in; default: its own, of `seed`. */
  readonly world?: EngineWorld;
  readonly tier?: SharedTier;
  readonly blockTokens?: number;
  readonly blockCount?: number;
  readonly maxModelTokens?: number;
  readonly limits?: Partial<EngineLimits>;
  readonly faults?: Faults;
  readonly stepFailure?: () => Error | undefined;
  readonly spoilsDraw?: () => boolean;
  readonly importsByLayer?: boolean | undefined;
  readonly eosTokenIds?: readonly number[];
  readonly attached?: boolean;
  /** Attention groups by their windows in tokens, 0 = all. */
  readonly windows?: readonly number[];
  readonly prefixCache?: PrefixCacheKind;
  readonly radixPolicy?: RadixPolicy;
  readonly evictionPolicy?: BlockPolicyName | undefined;
  readonly dedupBlocks?: boolean;
  readonly maxPinnedBlocks?: number;
  readonly writeDownAheadBlocks?: number | undefined;
  readonly hasher?: ChainHasher;
  readonly onEvents?: (events: readonly KvCacheEvent[]) => void;
  readonly onPackedEvents?: (events: PackedEvents) => void;
  readonly packedHashBytes?: 8 | 32;
  readonly onLoad?: () => void;
}

export class SchedulerRig {
  readonly world: EngineWorld;
  readonly executor: ContentExecutor;
  readonly connector: FaultyConnector;
  readonly hasher: ChainHasher;
  readonly engine: Engine;
  readonly outputs = new Map<string, Output[]>();
  readonly defects: Error[] = [];

  constructor(options: RigOptions = {}) {
    const { blockTokens = 4, blockCount = 32, maxModelTokens = 200, faults, stepFailure } = options;
    this.world = options.world ?? new EngineWorld(options.seed ?? 1);
    const later = (call: () => void): void => this.world.later(call);
    this.executor = new ContentExecutor({
      blockTokens,
      blockCount,
      maxModelTokens,
      later,
      importsByLayer: options.importsByLayer,
      spoils: options.spoilsDraw,
      ...(stepFailure ? { failure: stepFailure } : {}),
      ...(options.windows ? { windows: options.windows } : {}),
    });
    this.hasher = options.hasher ?? new ChainHasher({ algorithm: 'xxhash_cbor', blockTokens });
    this.connector = new FaultyConnector({
      executor: this.executor,
      hashBytes: this.hasher.hashBytes,
      later,
      wake: () => this.engine.wake(),
      clock: this.world.clock,
      ...(faults ? { faults } : {}),
      ...(options.tier ? { tier: options.tier } : {}),
    });
    this.connector.attached = options.attached ?? true;
    this.engine = new Engine({
      executor: this.executor,
      connector: this.connector,
      hasher: this.hasher,
      eosTokenIds: options.eosTokenIds ?? [],
      limits: { maxStepTokens: 16, maxSequences: 4, maxWaiting: 100, ...options.limits },
      clock: this.world.clock,
      prefixCache: options.prefixCache ?? 'blocks',
      radixPolicy: options.radixPolicy ?? 'lru',
      evictionPolicy: options.evictionPolicy,
      dedupBlocks: options.dedupBlocks ?? false,
      maxPinnedBlocks: options.maxPinnedBlocks ?? 0,
      writeDownAheadBlocks: options.writeDownAheadBlocks,
      ...(options.onEvents && { onEvents: options.onEvents }),
      ...(options.onPackedEvents && { onPackedEvents: options.onPackedEvents }),
      ...(options.packedHashBytes && { packedHashBytes: options.packedHashBytes }),
      ...(options.onLoad && { onLoad: options.onLoad }),
      onDefect: (error) => this.defects.push(error),
    });
  }

  submit(requestId: string, prompt: readonly number[], params: Partial<GenerateRequest> = {}): void {
    const outputs: Output[] = [];
    const request = {
      requestId,
      promptTokenIds: Int32Array.from(prompt),
      maxTokens: 4,
      temperature: 0,
      topK: 0,
      topP: 1,
      ...params,
    };
    this.engine.submit(request, (output) => outputs.push(output));
    this.outputs.set(requestId, outputs);
  }

  /** The last output has a finish reason or an error. */
  ended(requestId: string): boolean {
    const last = this.outputs.get(requestId)?.at(-1);
    return last !== undefined && (last.finishReason !== '' || last.error !== undefined);
  }

  allEnded(): boolean {
    return [...this.outputs.keys()].every((requestId) => this.ended(requestId));
  }

  tokens(requestId: string): number[] {
    return this.outputs.get(requestId)!.flatMap((output) => [...output.tokenIds]);
  }

  last(requestId: string): Output {
    return this.outputs.get(requestId)!.at(-1)!;
  }

  /** Submit, run to the end, return the tokens. */
  async generate(requestId: string, prompt: readonly number[], params?: Partial<GenerateRequest>): Promise<number[]> {
    this.submit(requestId, prompt, params);
    await this.world.until(() => this.ended(requestId));
    return this.tokens(requestId);
  }

  /** Let everything in flight end, held-back loads too. */
  async drain(): Promise<void> {
    await this.world.until(() => {
      for (const arrive of this.connector.late.splice(0)) this.world.later(arrive);
      return this.world.pendingCount === 0 && this.world.timerCount === 0;
    });
  }
}

/** What a model without blocks, batches and caches answers. */
export function naiveAnswer(
  prompt: readonly number[],
  maxTokens: number,
  stop: readonly number[] = [],
  windows?: readonly number[],
): number[] {
  const tokens = [...prompt];
  const answer: number[] = [];
  while (answer.length < maxTokens) {
    const token = nextToken(tokens, 0, 0n, windows);
    tokens.push(token);
    answer.push(token);
    if (stop.includes(token)) break;
  }
  return answer;
}

/** Prompt number `which`: equal for equal numbers, different from its first token on for others. */
export const prompt = (which: number, length: number): number[] =>
  Array.from({ length }, (_, i) => (which * 13 + i * 7 + (i % 3)) % 50);
