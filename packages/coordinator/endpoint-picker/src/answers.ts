/** What we answer a gateway, message by message. Bodies go on as they came: in full duplex by sending them back, else untouched. */
import { AppendAction, type CommonResponse, type HeaderMutation, type ProcessingResponse } from '@kvtier/wire/ext-proc';
import { destinationKey, lbNamespace } from './asked.ts';
import type { Refusal } from './refusal.ts';

/** As llm-d's endpoint picker names the prefill pod to the sidecar of the decode pod. */
const prefillerHeader = 'x-prefiller-host-port';
/** By these a sidecar calls whatever host they name: no client is to say it. */
const sidecarHeaders: readonly string[] = [
  ...[prefillerHeader, 'x-encoder-hosts-ports', 'x-data-parallel-host-port', 'x-kv-cache-source-host-port'],
];

/** Envoy takes 64 KiB of one message in full duplex. */
export const maxPieceBytes = 62_000;

const empty = Buffer.alloc(0);
const common = (more: Partial<CommonResponse> = {}): CommonResponse => ({
  status: 0,
  headerMutation: undefined,
  bodyMutation: undefined,
  clearRouteCache: false,
  ...more,
});

/** In place of what a client may have sent under these names. */
const headers = (values: Readonly<Record<string, string>>, removed: readonly string[] = []): HeaderMutation => ({
  setHeaders: Object.entries(values).map(([key, value]) => ({
    header: { key, value: '', rawValue: Buffer.from(value) },
    appendAction: AppendAction.OVERWRITE_IF_EXISTS_OR_ADD,
  })),
  removeHeaders: removed.filter((name) => !Object.hasOwn(values, name)),
});

type Kind = NonNullable<ProcessingResponse['response']>['$case'];
/** Which message of the request is answered. */
export type RequestPart = Extract<Kind, 'requestHeaders' | 'requestBody' | 'requestTrailers'>;
type BodyPart = Extract<Kind, 'requestBody' | 'responseBody'>;

/** Goes on as it is. */
export function goesOn(part: Exclude<Kind, 'immediateResponse'>): ProcessingResponse {
  if (part === 'requestTrailers' || part === 'responseTrailers') {
    return { response: { $case: part, value: { headerMutation: undefined } }, dynamicMetadata: undefined };
  }
  return { response: { $case: part, value: { response: common() } }, dynamicMetadata: undefined };
}

/**
 * The request's headers go on, without what is not the client's to say; the answer to a later part names the endpoint. Where that part is the
 * trailers it can set no header any more: what the client named there would stand.
 */
export function headersGoOn(): ProcessingResponse {
  const response = common({ headerMutation: headers({}, [destinationKey, ...sidecarHeaders]) });
  return { response: { $case: 'requestHeaders', value: { response } }, dynamicMetadata: undefined };
}

/** `endpoints`: "IP:PORT", or several with commas between them, in the order in which they are tried. `prefiller`: as `Picked` has it. */
export function picked(part: RequestPart, endpoints: string, prefiller?: string): ProcessingResponse {
  const dynamicMetadata = { [lbNamespace]: { [destinationKey]: endpoints } };
  if (part === 'requestTrailers') return { ...goesOn(part), dynamicMetadata };
  const told = { [destinationKey]: endpoints, ...(prefiller === undefined ? {} : { [prefillerHeader]: prefiller }) };
  const headerMutation = headers(told, sidecarHeaders);
  const response = common({ headerMutation, clearRouteCache: true });
  return { response: { $case: part, value: { response } }, dynamicMetadata };
}

/** A piece of a body in full duplex, in as many messages as it needs. */
export function* sentBack(part: BodyPart, body: Buffer, endOfStream: boolean): Generator<ProcessingResponse> {
  let from = 0;
  do {
    const to = Math.min(from + maxPieceBytes, body.length);
    const piece = { body: body.subarray(from, to), endOfStream: endOfStream && to === body.length };
    const bodyMutation = { mutation: { $case: 'streamedResponse', value: piece } } as const;
    yield { response: { $case: part, value: { response: common({ bodyMutation }) } }, dynamicMetadata: undefined };
    from = to;
  } while (from < body.length);
}

/** The client's answer is this, and no endpoint is asked. */
export function refused(refusal: Refusal): ProcessingResponse {
  const { status, outcome, retryAfterS, body } = refusal;
  const told = {
    'content-type': 'application/json',
    'x-llm-d-request-dropped-reason': outcome,
    ...(retryAfterS === undefined ? {} : { 'retry-after': String(retryAfterS) }),
  };
  const value = {
    status: { code: status },
    headers: headers(told),
    body: body === '' ? empty : Buffer.from(body),
    details: `kvtier_${outcome}`,
  };
  return { response: { $case: 'immediateResponse', value }, dynamicMetadata: undefined };
}
