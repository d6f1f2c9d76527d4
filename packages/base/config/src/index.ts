/**
 * Configuration: validated at start, unknown keys refused. A service reads it from `--config FILE` (JSON) or, under
 * the supervisor, from the environment variable KVTIER_CONFIG (the same JSON).
 */
import { readFileSync } from 'node:fs';
import { KvError } from '@kvtier/errors';
import * as z from 'zod';
import { bytes, logLevel } from './cache-node.ts';
import { usableCores } from './cores.ts';
import { groupSchema } from './group.ts';
import { parseJson } from './json.ts';
import { kvEventsSchema } from './kv-events.ts';
import { isGrpcAddress } from './listener.ts';
import { workerMembershipSchema } from './membership.ts';
import { parseConfig } from './parse.ts';
import { workerTlsSchema } from './worker-access.ts';
import { checkWorker } from './worker-rules.ts';

export { type CacheNodeConfig, type CacheNodeInput, cacheNodeSchema } from './cache-node.ts';
export {
  type CoordinatorConfig,
  type CoordinatorInput,
  coordinatorSchema,
  coordinatorServiceSchema,
  routingPolicyNames,
} from './coordinator.ts';
export { usableCores } from './cores.ts';
export {
  type DiscoveryConfig,
  discoverySchema,
  type KubernetesDiscoveryConfig,
  kubernetesDiscoverySchema,
  maxMembers,
  type RedisDiscoveryConfig,
  type StaticDiscoveryConfig,
} from './discovery.ts';
export { type EndpointPickerConfig, type EndpointPickerInput, endpointPickerSchema } from './endpoint-picker.ts';
export { type CurveClientKeys, type EventAccess, type EventAccessConfig, readEventAccess } from './event-access.ts';
export { groupSchema, readGroup } from './group.ts';
export { parseJson } from './json.ts';
export { type KvEventsConfig, kvEventsSchema, readKvEventsCurve } from './kv-events.ts';
export { checkSocketFolder, isLoopback, originAt, type ServerTlsConfig } from './listener.ts';
export {
  curveKey,
  type EventSource,
  eventSourceSchema,
  type Membership,
  type NodeMembership,
  type NodeRecord,
  nodeRecordSchema,
  rankSources,
  type WorkerMembership,
  type WorkerRecord,
  workerRecordSchema,
} from './membership.ts';
export type { OperationsConfig } from './operations.ts';
export { type ConfigProblem, configProblem, parseConfig } from './parse.ts';
export { readPeerCredentials } from './peer.ts';
export { type PlannerConfig, plannerSchema, type ScalerConfig } from './planner.ts';
export { type PodHandOffConfig, podHandOffSchema } from './pod-handoff.ts';
export { type MemberServers, memberServersSchema } from './redis.ts';
export { keyPaths } from './schema-keys.ts';
export { WorkerAccess, type WorkerAccessConfig, type WorkerTlsConfig, workerAccessSchema } from './worker-access.ts';

const maxThreads = 1024;

const workerFields = z.strictObject({
  modelDir: z.string().min(1),
  servedName: z.string().min(1),
  /** gRPC address, "unix:/path" or "host:port"; beyond loopback only with `tls`. */
  listen: z.string().refine(isGrpcAddress, 'write unix:/PATH or HOST:PORT'),
  tls: workerTlsSchema.nullable().default(null),
  /** Unix socket of the cache node; null: no tier. */
  cacheNodeSocket: z.string().min(1).nullable(),
  /** The cache node may be of another user, if its socket's folder is of this group, by name or number. */
  group: groupSchema,
  /** Where this process sees the folder of the cache node's arena; absent: where the node sees it. */
  arenaDir: z.string().min(1).optional(),
  blockTokens: z.number().int().min(1).max(256).default(16),
  /** Bytes of the engine's own KV block pool; absent: 256 MiB on the CPU, the share `gpu.memoryUtilization` on a GPU. */
  kvBytes: bytes.optional(),
  /** What runs the model; auto: a GPU where there is one, else the CPU. `cuda-emulated` is for tests. */
  backend: z.enum(['auto', 'cpu', 'cuda', 'cuda-emulated']).default('auto'),
  /** Read by backend cuda only. */
  gpu: z
    .strictObject({
      device: z.number().int().min(0).default(0),
      /** Share of the GPU's memory for weights, steps and KV blocks. */
      memoryUtilization: z.number().gt(0).max(1).default(0.9),
      /** Of weights and activations; absent: bf16. */
      computeDtype: z.enum(['f32', 'f16', 'bf16']).optional(),
      /** Of keys and values; absent: as computeDtype. e4m3 (FP8): half the bytes of bf16, less exact. */
      kvDtype: z.enum(['e4m3']).optional(),
      /** Decode steps as CUDA graphs. */
      graphs: z.boolean().default(true),
      /** In these, a kernel begins before the one before it has ended; on Hopper and newer. */
      dependentLaunches: z.boolean().default(true),
      /** All of them at start instead of each at its first use: a longer start, no slow first step of a size; absent: on a GPU. */
      captureAtStart: z.boolean().optional(),
      /** Path of cuBLASLt; absent: where the system has it; "off": matrix products by kernels of ours only. */
      cublaslt: z.string().min(1).optional(),
      /** A row has the same bits however many others are in its step, up to 64, and in every process: a little slower. */
      equalBits: z.boolean().default(false),
      /** Where the size of steps is chosen by measurement: no step takes longer, since decodes beside it wait for it. */
      longestStepMs: z.number().int().min(1).max(60_000).default(200),
      /** A step that takes longer means that the GPU hangs: the worker ends, and is started again. */
      stepDeadlineMs: z.number().int().min(100).max(600_000).default(60_000),
    })
    .prefault({}),
  /** Tokens that a step computes at most; absent: 512 on the CPU, what was measured to be best on a GPU. */
  maxStepTokens: z
    .number()
    .int()
    .min(16)
    .max(2 ** 20)
    .optional(),
  maxSequences: z.number().int().min(1).max(65_536).default(64),
  /** After SIGTERM: what runs may end within this, nothing new is taken. Below the 8 s in which a process has to end. */
  drainMs: z.number().int().min(0).max(6_000).default(1_000),
  /** Requests that may wait; more are refused with BUSY. */
  maxWaiting: z.number().int().min(1).default(1024),
  /** Absent: as many as this process has cores. */
  threads: z
    .number()
    .int()
    .min(1)
    .max(maxThreads)
    .optional()
    .transform((threads) => threads ?? Math.min(usableCores(), maxThreads)),
  /** The structure of the engine's own cache: hashed blocks (vLLM), or a radix tree of tokens (SGLang). */
  prefixCache: z.enum(['blocks', 'radix']).default('blocks'),
  /** Which leaf of the radix tree goes first. */
  radixPolicy: z.enum(['lru', 'lfu', 'fifo', 'mru', 'filo', 'priority']).default('lru'),
  /** Which of the hashed blocks goes first (`blockPolicyNames` of packages/base/eviction); absent: the one freed longest ago. */
  evictionPolicy: z.enum(['lru', 'lfu', 'fifo', 's3-fifo', 'cost-aware']).optional(),
  /** A hashed block that fills up with what is cached already gives way to the cached one. */
  dedupBlocks: z.boolean().default(false),
  /** Most hashed blocks that pinned prefixes hold together; requests never get these. 0: nothing can be pinned. */
  maxPinnedBlocks: z.number().int().min(0).default(0),
  /**
   * What goes down to the cache node. through: each block when it is full. ahead: the blocks that the engine's pool is about to
   * reuse, and those that were hit twice.
   */
  writeDown: z.enum(['through', 'ahead']).default('through'),
  /** With writeDown ahead: how many blocks in the order of eviction go down before they are reused. */
  writeDownAheadBlocks: z.number().int().min(1).default(256),
  hashAlgorithm: z.enum(['sha256', 'sha256_cbor', 'xxhash', 'xxhash_cbor']).default('sha256_cbor'),
  /** Root of the chains, as vLLM's PYTHONHASHSEED; fixed by default so that two processes always agree. */
  hashSeed: z.string().default('vllm-none-hash'),
  /** A cache node ends any load after 60 s: more is taken as that. */
  loadDeadlineMs: z
    .number()
    .int()
    .min(1)
    .max(600_000)
    .overwrite((ms) => Math.min(ms, 60_000))
    .default(5000),
  /**
   * always: what the cache node holds is loaded, also where computing it would be faster. For measuring. halves: an engine that does nothing
   * else computes the first half of a hit while the rest is brought, whatever is faster. For tests.
   */
  loads: z.enum(['planned', 'always', 'halves']).default('planned'),
  /** Who pays for this engine's blocks at the cache node (its `quotas`). */
  tenant: z.string().max(200).default(''),
  /** This engine's blocks are removed from all tiers so long after they were committed; absent: never. */
  ttlSeconds: z
    .number()
    .int()
    .min(1)
    .max(10 * 365 * 86_400)
    .optional(),
  /** null: no KV events are published. */
  kvEvents: kvEventsSchema.nullable().default(null),
  /** Its place in the list of members in Redis; null: it is not announced. */
  membership: workerMembershipSchema,
  logLevel,
  /** A log line (info) for each request. */
  logRequests: z.boolean().default(false),
});
export const engineWorkerSchema = workerFields.superRefine(checkWorker);
export type EngineWorkerConfig = z.infer<typeof engineWorkerSchema>;
/** As it is written: what has a default may be left out. */
export type EngineWorkerInput = z.input<typeof engineWorkerSchema>;

/** Configuration of a service process, see the head of this file. `file`: of its option --config. */
export function readServiceConfig<T>(schema: z.ZodType<T>, file: string | undefined, env = process.env): T {
  if (file !== undefined) {
    let text: string;
    try {
      text = readFileSync(file, 'utf8');
    } catch (error) {
      throw new KvError('CONFIG', `${file}: cannot be read (${(error as Error).message}); name a readable JSON file`);
    }
    return parseConfig(schema, parseJson(text, file), file);
  }
  if (env.KVTIER_CONFIG) return parseConfig(schema, parseJson(env.KVTIER_CONFIG, 'KVTIER_CONFIG'), 'KVTIER_CONFIG');
  throw new KvError('CONFIG', 'command line: no configuration; give --config FILE (JSON)', { isFinal: true });
}
