/**
 * What a gateway tells of a request beside its body, by the names of the Gateway API's endpoint picker protocol (proposal 004) and
 * of llm-d. All of it comes from outside: it is clipped and checked here.
 */
import { randomUUID } from 'node:crypto';
import { sessionHeaders, sessionIn, targetHeaders } from '@kvtier/dispatch';
import type { HttpHeaders, ProcessingRequest } from '@kvtier/wire/ext-proc';

/** Header and metadata key of the endpoint that the gateway is to use. */
export const destinationKey = 'x-gateway-destination-endpoint';
/** Where a gateway's load balancer looks for it, and tells which endpoint served. */
export const lbNamespace = 'envoy.lb';
const servedKey = 'x-gateway-destination-endpoint-served';
const subsetNamespace = 'envoy.lb.subset_hint';
const subsetKey = 'x-gateway-destination-endpoint-subset';
/** Set by a body-based router that stands before us. */
const modelHeader = 'x-gateway-model-name';
const [maxValueChars, maxPathChars, maxSubset] = [512, 8_192, 16_384];
const wanted = new Set<string>([':method', ':path', 'x-request-id', modelHeader, ...sessionHeaders, ...targetHeaders]);

export type Metadata = ProcessingRequest['metadataContext'];

export interface Asked {
  readonly id: string;
  readonly method: string;
  /** Without its query. */
  readonly path: string;
  /** Of the model, as told by a header; undefined: not told. */
  readonly model: string | undefined;
  /** performance.now() */
  readonly arrivedMs: number;
  /** Empty: none. */
  readonly session: string;
  /** The headers that say when its tokens are wanted, as they came. */
  readonly targets: Readonly<Record<string, string>>;
  /** Endpoints, one of which must be chosen; undefined: any. */
  readonly subset: readonly string[] | undefined;
}

export function askedOf(headers: HttpHeaders, metadata: Metadata): Asked {
  const values = headersOf(headers, wanted);
  const id = values.get('x-request-id') ?? '';
  const path = values.get(':path') ?? '';
  const query = path.indexOf('?');
  return {
    id: /^[\w.:-]{1,128}$/.test(id) ? id : randomUUID(),
    method: values.get(':method') ?? '',
    path: query === -1 ? path : path.slice(0, query),
    model: values.get(modelHeader) || undefined,
    arrivedMs: performance.now(),
    session: sessionIn(Object.fromEntries(values)),
    targets: Object.fromEntries(targetHeaders.flatMap((name) => (values.has(name) ? [[name, values.get(name)!]] : []))),
    subset: subsetOf(metadata),
  };
}

/** The first value of each wanted header, clipped. */
export function headersOf({ headers }: HttpHeaders, names: ReadonlySet<string>): ReadonlyMap<string, string> {
  const values = new Map<string, string>();
  for (const { key, value, rawValue } of headers?.headers ?? []) {
    if (!names.has(key) || values.has(key)) continue;
    const limit = key === ':path' ? maxPathChars : maxValueChars;
    values.set(key, (rawValue.length > 0 ? rawValue.toString('utf8', 0, limit) : value).slice(0, limit));
  }
  return values;
}

/** A list of texts, or one text with commas. What is neither names no endpoint at all. */
function subsetOf(metadata: Metadata): readonly string[] | undefined {
  const told = own(metadata?.filterMetadata, subsetNamespace);
  if (told === undefined || !Object.hasOwn(told, subsetKey)) return undefined;
  const value: unknown = told[subsetKey];
  const list = typeof value === 'string' ? value.split(',', maxSubset) : Array.isArray(value) ? value : [];
  return list
    .slice(0, maxSubset)
    .filter((item): item is string => typeof item === 'string')
    .map((item) => item.trim().toLowerCase())
    .filter((item) => item !== '');
}

/** The endpoint that answered, as the gateway's load balancer tells it. */
export function servedOf(metadata: Metadata): string | undefined {
  const value: unknown = own(own(metadata?.filterMetadata, lbNamespace), servedKey);
  return typeof value === 'string' && value !== '' ? value.slice(0, maxValueChars).toLowerCase() : undefined;
}

function own<T>(map: { readonly [key: string]: T } | undefined, key: string): T | undefined {
  return map !== undefined && Object.hasOwn(map, key) ? map[key] : undefined;
}
