/**
 * Discovery: how a coordinator learns who may be asked (docs/cluster.md). Three ways: the configuration itself, a list in Redis that
 * members keep up themselves, or Kubernetes. What only the sources can tell is refused or told of when discovery runs.
 */
import * as z from 'zod';
import { isGrpcAddress, originAt } from './listener.ts';
import { nodeRecordSchema, type WorkerRecord, workerRecordSchema } from './membership.ts';
import { memberServersSchema } from './redis.ts';

/** Of workers and nodes together, whichever way they are found. */
export const maxMembers = 1024;

const port = z.number().int().min(1).max(65_535);
const labelSelector = z.string().max(1024);

export const staticDiscoverySchema = z
  .strictObject({
    kind: z.literal('static'),
    workers: z.array(workerRecordSchema).max(maxMembers).default([]),
    nodes: z.array(nodeRecordSchema).max(maxMembers).default([]),
  })
  .superRefine(({ workers, nodes }, context) => {
    for (const [path, records] of [
      ['workers', workers],
      ['nodes', nodes],
    ] as const) {
      const seen = new Set<string>();
      for (const [index, { name }] of records.entries()) {
        const message = `${name} is there twice; give each a name of its own`;
        if (seen.has(name)) context.addIssue({ code: 'custom', path: [path, index, 'name'], message });
        seen.add(name);
      }
    }
    for (const [index, worker] of workers.entries()) {
      const message = addressProblem(worker);
      if (message !== undefined) context.addIssue({ code: 'custom', path: ['workers', index, 'address'], message });
    }
  });

/** Of what somebody wrote: such a worker could never be asked. What members say of themselves is told of when they are looked for. */
function addressProblem({ kind, address }: WorkerRecord): string | undefined {
  if (kind === 'openai') return originAt(address) ? undefined : 'write http://HOST:PORT or https://HOST:PORT';
  return isGrpcAddress(address) ? undefined : 'write unix:/PATH or HOST:PORT';
}

export const redisDiscoverySchema = z.strictObject({
  kind: z.literal('redis'),
  redis: memberServersSchema,
  /** How often the list is looked at; most looks cost one short answer. */
  pollMs: z.number().int().min(20).max(5_000).default(200),
});

export const kubernetesDiscoverySchema = z.strictObject({
  kind: z.literal('kubernetes'),
  /** Absent: the service account of this pod. */
  kubeconfig: z.string().min(1).optional(),
  /** Absent: the file's current context. Read with kubeconfig only. */
  context: z.string().min(1).optional(),
  /** Absent: this pod's, or the context's. */
  namespace: z.string().min(1).max(63).optional(),
  /** Which pods. */
  pods: labelSelector.default('llm-d.ai/inference-serving=true'),
  /**
   * Which EndpointSlices; null: none are asked for, and a pod's own condition says whether it is ready. Else pods count only where a
   * slice names them, and the slice says whether they are ready.
   */
  endpointSlices: labelSelector.nullable().default(null),
  /** Each is one worker of a pod (data-parallel ranks), as in InferencePool.spec.targetPorts. A pod may say otherwise. */
  ports: z.array(port).min(1).max(8).default([8000]),
  /** Of an `openai` pod's API. */
  scheme: z.enum(['http', 'https']).default('http'),
  /** Where `openai` pods publish KV events; rank N at port + N. null: they do not. A pod may say otherwise. */
  eventsPort: port.nullable().default(5557),
  replayPort: port.nullable().default(null),
  eventsTopic: z.string().max(255).default(''),
  /** Of one request and its answer; a watch has its own. */
  timeLimitMs: z.number().int().min(100).max(60_000).default(5_000),
  /** A watch is asked anew so often: one whose connection is dead is noticed by then. */
  watchSeconds: z.number().int().min(1).max(3_600).default(30),
});

export const discoverySchema = z.discriminatedUnion('kind', [
  staticDiscoverySchema,
  redisDiscoverySchema,
  kubernetesDiscoverySchema,
]);
export type DiscoveryConfig = z.infer<typeof discoverySchema>;
export type StaticDiscoveryConfig = z.infer<typeof staticDiscoverySchema>;
export type RedisDiscoveryConfig = z.infer<typeof redisDiscoverySchema>;
export type KubernetesDiscoveryConfig = z.infer<typeof kubernetesDiscoverySchema>;
