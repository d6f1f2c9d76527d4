/** What is read of pods and EndpointSlices, and nothing else of them. They come from outside: these schemas are the only way in. */
import { KvError } from '@kvtier/errors';
import * as z from 'zod';

const word = z.string().max(1_024);
const labels = z.record(word, z.string().max(262_144)).nullish();
const meta = z.object({
  name: z.string().min(1).max(253),
  resourceVersion: z.string().min(1).max(64),
  deletionTimestamp: word.nullish(),
  labels,
  annotations: labels,
});

const address = z.union([z.ipv4(), z.ipv6()]);
const podSchema = z.object({
  metadata: meta,
  spec: z.object({ nodeName: word.nullish() }).nullish(),
  status: z
    .object({
      phase: word.nullish(),
      podIP: address.nullish(),
      podIPs: z
        .array(z.object({ ip: address }))
        .max(16)
        .nullish(),
      conditions: z
        .array(z.object({ type: word, status: word }))
        .max(100)
        .nullish(),
    })
    .nullish(),
});
const flag = z.boolean().nullish();
const sliceSchema = z.object({
  metadata: meta,
  endpoints: z
    .array(
      z.object({
        addresses: z.array(z.string().min(1).max(253)).min(1).max(100),
        conditions: z.object({ ready: flag, serving: flag, terminating: flag }).nullish(),
        targetRef: z.object({ kind: word.nullish(), name: word.nullish() }).nullish(),
      }),
    )
    .max(1_000)
    .nullish(),
  ports: z
    .array(z.object({ port: z.number().int().min(1).max(65_535).nullish(), protocol: word.nullish() }))
    .max(100)
    .nullish(),
});

export interface Pod {
  readonly name: string;
  readonly ip: string | undefined;
  /** All of its addresses, of both families; `ip` is one of them. */
  readonly ips: readonly string[];
  /** The host that it runs on, as Kubernetes names it. */
  readonly hostName: string | undefined;
  /** It runs; neither waiting for its first container nor ended. */
  readonly isRunning: boolean;
  readonly isReady: boolean;
  readonly isTerminating: boolean;
  readonly labels: Readonly<Record<string, string>>;
  readonly annotations: Readonly<Record<string, string>>;
}

export interface Endpoint {
  readonly host: string;
  /** Name of the pod behind it, where there is one. */
  readonly pod: string | undefined;
  /** It takes new requests. */
  readonly isReady: boolean;
}

export interface EndpointSlice {
  readonly name: string;
  readonly ports: readonly number[];
  readonly endpoints: readonly Endpoint[];
}

/** Labels and annotations that say something here (members.ts). */
const isOurs = (key: string): boolean =>
  /^(llm-d\.ai|kvtier\.io|disaggregatedset\.x-k8s\.io|leaderworkerset\.sigs\.k8s\.io)\//.test(key);
const ours = (all: Readonly<Record<string, string>> | null | undefined): Record<string, string> =>
  Object.fromEntries(Object.entries(all ?? {}).filter(([key]) => isOurs(key)));

/** @throws KvError PROTOCOL: it is none */
export function parsePod(value: unknown): Pod {
  const { metadata, spec, status } = parse(podSchema, value);
  return {
    name: metadata.name,
    ip: status?.podIP ?? undefined,
    ips: [...(status?.podIP == null ? [] : [status.podIP]), ...(status?.podIPs ?? []).map(({ ip }) => ip)],
    hostName: spec?.nodeName ?? undefined,
    isRunning: status?.phase === 'Running',
    isReady: status?.conditions?.some(({ type, status }) => type === 'Ready' && status === 'True') ?? false,
    isTerminating: metadata.deletionTimestamp != null,
    labels: ours(metadata.labels),
    annotations: ours(metadata.annotations),
  };
}

/** @throws KvError PROTOCOL: it is none */
export function parseSlice(value: unknown): EndpointSlice {
  const { metadata, endpoints, ports } = parse(sliceSchema, value);
  return {
    name: metadata.name,
    ports: (ports ?? []).flatMap(({ port, protocol }) => (port == null || (protocol ?? 'TCP') !== 'TCP' ? [] : [port])),
    endpoints: (endpoints ?? []).map(({ addresses, conditions, targetRef }) => ({
      // More than one are of the same endpoint.
      host: addresses[0]!,
      pod: targetRef?.kind === 'Pod' ? (targetRef.name ?? undefined) : undefined,
      // Nothing said is ready: the API's own rule.
      isReady: (conditions?.ready ?? true) && !(conditions?.terminating ?? false),
    })),
  };
}

const named = z.object({ metadata: meta.pick({ name: true, resourceVersion: true }) });
const page = z.object({
  metadata: z.object({ resourceVersion: z.string().min(1).max(64), continue: z.string().max(65_536).nullish() }),
  items: z.array(z.unknown()).max(10_000).nullish(),
});
const event = z.object({ type: word, object: z.unknown() });
const bookmark = z.object({ metadata: meta.pick({ resourceVersion: true }) });
const failure = z.object({ code: z.number().int().nullish(), message: z.string().nullish() });

export const parseNamed = (value: unknown) => parse(named, value).metadata;
export const parseBookmark = (value: unknown) => parse(bookmark, value).metadata.resourceVersion;
export const parseEvent = (value: unknown) => parse(event, value);
export const parseFailure = (value: unknown) => parse(failure, value);

export function parsePage(value: unknown): { version: string; next: string; items: readonly unknown[] } {
  const { metadata, items } = parse(page, value);
  return { version: metadata.resourceVersion, next: metadata.continue ?? '', items: items ?? [] };
}

function parse<T>(schema: z.ZodType<T>, value: unknown): T {
  const result = schema.safeParse(value);
  if (result.success) return result.data;
  const issue = result.error.issues[0]!;
  throw new KvError('PROTOCOL', `${issue.path.join('.') || 'the object'}: ${issue.message}`);
}
