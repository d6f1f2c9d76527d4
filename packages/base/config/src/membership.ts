/**
 * What members of a cluster say of themselves, whichever way they are discovered: one form in configuration (static), in Redis and,
 * made of labels and ports, from Kubernetes. Everything in it comes from outside: it is parsed before it is used.
 */
import * as z from 'zod';
import { isCurveKey } from './curve-keys.ts';
import { memberServersSchema } from './redis.ts';

/** A DNS-like name: it goes into metrics, headers and keys. */
const name = z
  .string()
  .regex(/^[A-Za-z0-9]([A-Za-z0-9._-]{0,251}[A-Za-z0-9])?$/, 'a name of letters, digits, ".", "_" and "-"');
const endpoint = z.string().min(1).max(512);

/** Of CURVE (ZeroMQ): a key in Z85. */
export const curveKey = z.string().refine(isCurveKey, 'a CURVE key: 40 characters of Z85');

/** Where a member publishes its KV events (ZeroMQ). */
export const eventSourceSchema = z.strictObject({
  /** "tcp://HOST:PORT" or "ipc:///PATH", to be connected to. */
  endpoint,
  /** Where lost batches are asked for; null: nowhere. */
  replayEndpoint: endpoint.nullable().default(null),
  topic: z.string().max(255).default(''),
  /** Its public CURVE key; absent: that of the reader's configuration, beyond loopback. */
  serverKey: curveKey.optional(),
});
export type EventSource = z.infer<typeof eventSourceSchema>;

/**
 * Where each of so many data-parallel ranks publishes, the first one at `source`: the others at the ports after it, as vLLM and SGLang number
 * them. undefined: it has no ports, or not so many.
 */
export function rankSources(source: EventSource, ranks: number): EventSource[] | undefined {
  const [events, replay] = [source.endpoint, source.replayEndpoint].map((endpoint) => {
    const [, host, port] = (endpoint ?? '').match(/^(tcp:\/\/.+):(\d{1,5})$/) ?? [];
    return port !== undefined && Number(port) + ranks - 1 <= 65_535 ? { host, port: Number(port) } : undefined;
  });
  if (events === undefined || (source.replayEndpoint !== null && replay === undefined)) return undefined;
  return Array.from({ length: ranks }, (_, rank) => ({
    ...source,
    endpoint: `${events.host}:${events.port + rank}`,
    replayEndpoint: replay === undefined ? null : `${replay.host}:${replay.port + rank}`,
  }));
}

/** Of an engine; several data-parallel ones behind one address publish each for itself. */
const engineEventsSchema = eventSourceSchema
  .extend({
    /** Of a pod: how many, at ports one after the other. Absent: as many as its metrics tell of. */
    ranks: z.number().int().min(1).max(64).optional(),
  })
  .refine((events) => (events.ranks ?? 1) === 1 || rankSources(events, events.ranks!) !== undefined, {
    error: 'ranks: each publishes at the next port; give endpoints as tcp://HOST:PORT, with so many ports to 65535',
  });

/** An engine that takes requests. */
export const workerRecordSchema = z.strictObject({
  /** Unique among the workers; two workers of one name are refused. */
  name,
  /** kvtier: our worker, gRPC (`proto/kvtier/v1/engine.proto`). openai: any pod with OpenAI's API (vLLM, SGLang), HTTP. */
  kind: z.enum(['kvtier', 'openai']).default('kvtier'),
  /** kvtier: "unix:/path" or "HOST:PORT". openai: "http://HOST:PORT" or "https://HOST:PORT". */
  address: endpoint,
  role: z.enum(['both', 'prefill', 'decode']).default('both'),
  /** It ends what it has, and gets nothing new. */
  draining: z.boolean().default(false),
  /** Name of the cache node beside it (`nodeRecordSchema`); null: none. */
  node: name.nullable().default(null),
  events: engineEventsSchema.nullable().default(null),
  /** Of a roll-out: prefill and decode of one request are of one revision. */
  revision: z.string().max(253).default(''),
});
export type WorkerRecord = z.infer<typeof workerRecordSchema>;

/** A cache node: what it holds is at hand for all workers beside it, and can be fetched by others. */
export const nodeRecordSchema = z.strictObject({
  name,
  /** Where other nodes fetch from it; null: it only fetches. */
  peer: z
    .strictObject({ host: z.string().min(1).max(253), port: z.number().int().min(1).max(65535) })
    .nullable()
    .default(null),
  events: eventSourceSchema.nullable().default(null),
  /** Names of the nodes that it fetches from; absent: it does not say, and may fetch from any. */
  peers: z.array(name).max(64).optional(),
  /** Of the engines beside it; absent: it does not say, and theirs may be in the list. */
  role: workerRecordSchema.shape.role.unwrap().optional(),
});
export type NodeRecord = z.infer<typeof nodeRecordSchema>;

/** All members, as one way of discovery knows them at one moment. */
export interface Membership {
  readonly workers: readonly WorkerRecord[];
  readonly nodes: readonly NodeRecord[];
}

/** Of a member that keeps its own record in Redis. */
const announced = {
  redis: memberServersSchema,
  name,
  /**
   * So long after its last renewal (three a lease) a member counts as gone; one that was killed is out of the list by then and a
   * look of its readers.
   */
  leaseMs: z.number().int().min(300).max(10_000).default(1_500),
};

/** An engine worker in Redis; null: it is not announced. */
export const workerMembershipSchema = z
  .strictObject({
    ...announced,
    /** Where coordinators reach it; absent: where it listens. */
    address: endpoint.optional(),
    role: workerRecordSchema.shape.role,
    node: workerRecordSchema.shape.node,
    revision: workerRecordSchema.shape.revision,
    /** Where coordinators reach its KV events; absent: as `kvEvents` has it. */
    events: eventSourceSchema.nullable().optional(),
  })
  .nullable()
  .default(null);
export type WorkerMembership = NonNullable<z.infer<typeof workerMembershipSchema>>;

/** A cache node in Redis; null: it is not announced. */
export const nodeMembershipSchema = z
  .strictObject({
    ...announced,
    /** Where other nodes reach it; absent: where `peers` listens. */
    peer: nodeRecordSchema.shape.peer.unwrap().optional(),
    events: eventSourceSchema.nullable().optional(),
    /** Where `peers` is configured: fetch from the other nodes of the list, too, as they come and go. */
    followPeers: z.boolean().default(true),
    /** Of the engines beside it, where these are not in the list themselves, as pods are not. */
    role: nodeRecordSchema.shape.role,
  })
  .nullable()
  .default(null);
export type NodeMembership = NonNullable<z.infer<typeof nodeMembershipSchema>>;

type PublishedAt = Pick<EventSource, 'endpoint' | 'replayEndpoint'> | null;
export interface Announcing {
  readonly kvEvents: PublishedAt;
  readonly membership: { readonly events?: PublishedAt | undefined };
}

/** A member that would name a place that nobody can connect to: where it listens on all addresses, it has to say by which it is reached. */
export function checkAnnounced(
  { kvEvents, membership }: Announcing,
  key: 'address' | 'peer',
  place: string | null,
  context: z.RefinementCtx,
): void {
  const events = membership.events === undefined ? kvEvents : membership.events;
  const places = { [key]: [place], events: [events?.endpoint, events?.replayEndpoint] };
  for (const [at, all] of Object.entries(places)) {
    const open = all.find((each) => each != null && /^(tcp:\/\/)?(\*|0\.0\.0\.0|\[::\]):/.test(each));
    if (open == null) continue;
    const message = `${open} is no address to connect to; give one that others reach`;
    context.addIssue({ code: 'custom', path: ['membership', at], message });
  }
}
