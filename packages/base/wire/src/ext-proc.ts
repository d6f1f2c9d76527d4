/**
 * Envoy's `ext_proc` and gRPC's health protocol: the generated messages, and a decoder for what a gateway sends. A message is looked
 * over before it is decoded: only a body may be large, so that no message costs more than its bytes' copy.
 */
import type { ServiceDefinition } from '@grpc/grpc-js';
import { KvError } from '@kvtier/errors';
import {
  type ExternalProcessorServer,
  ExternalProcessorService,
  ProcessingRequest,
} from './generated/envoy/service/ext_proc/v3/external_processor.ts';

export { HeaderValueOption_HeaderAppendAction as AppendAction } from './generated/envoy/config/core/v3/base.ts';
export { ProcessingMode_BodySendMode as BodySendMode } from './generated/envoy/extensions/filters/http/ext_proc/v3/processing_mode.ts';
export {
  type CommonResponse,
  ExternalProcessorClient,
  type ExternalProcessorServer,
  ExternalProcessorService,
  type HeaderMutation,
  type HttpBody,
  type HttpHeaders,
  ProcessingRequest,
  ProcessingResponse,
} from './generated/envoy/service/ext_proc/v3/external_processor.ts';
export {
  HealthCheckRequest,
  HealthCheckResponse,
  HealthCheckResponse_ServingStatus as ServingStatus,
  HealthClient,
  type HealthServer,
  HealthService,
} from './generated/grpc/health/v1/health.ts';

/** Bytes of a message without its body: headers (Envoy takes 60 KiB of them) and metadata. */
export const maxBesideBodyBytes = 128 << 10;
/** Fields that a body's message has, and room for new ones. */
const maxBodyFields = 16;
/** Field numbers of `request_body` and `response_body`. */
const bodyFields = new Set([4, 5]);
const lengthDelimited = 2;

/** The service with messages that are looked over first. */
export const boundedExternalProcessorService: ServiceDefinition<ExternalProcessorServer> = {
  process: { ...ExternalProcessorService.process, requestDeserialize: decodeProcessingRequest },
};

/** @throws KvError PROTOCOL: larger than any gateway's, or no message at all */
export function decodeProcessingRequest(bytes: Buffer): ProcessingRequest {
  if (bytes.length > maxBesideBodyBytes) checkLarge(bytes);
  try {
    return ProcessingRequest.decode(bytes);
  } catch (error) {
    throw new KvError('PROTOCOL', `ext_proc: not a ProcessingRequest (${(error as Error).message}); see the gateway`);
  }
}

/** One walk over the fields of a message and over those of its body. */
function checkLarge(bytes: Buffer): void {
  let beside = bytes.length;
  let bodies = 0;
  walk(bytes, 0, bytes.length, maxBesideBodyBytes, (field, start, end) => {
    if (!bodyFields.has(field)) return;
    if (++bodies > 1) throw tooLarge('several bodies');
    beside -= end - start;
    walk(bytes, start, end, maxBodyFields, () => {});
  });
  if (beside > maxBesideBodyBytes) throw tooLarge(`${beside} bytes beside its body`);
}

function walk(
  bytes: Buffer,
  from: number,
  to: number,
  maxFields: number,
  each: (field: number, start: number, end: number) => void,
): void {
  let at = from;
  const varint = (): number => {
    let value = 0;
    for (let shift = 0; shift < 70; shift += 7) {
      if (at >= to) throw tooLarge('an end in the middle of a field');
      const byte = bytes[at++]!;
      value += (byte & 0x7f) * 2 ** shift;
      if (byte < 0x80) return value;
    }
    throw tooLarge('a number without an end');
  };
  for (let fields = 0; at < to; fields++) {
    if (fields === maxFields) throw tooLarge(`more than ${maxFields} fields`);
    const tag = varint();
    const wire = tag & 7;
    if (wire === 0) varint();
    else if (wire === 1) at += 8;
    else if (wire === 5) at += 4;
    else if (wire === lengthDelimited) {
      const length = varint();
      const start = at;
      at += length;
      if (at > to) throw tooLarge('a field longer than itself');
      each(Math.floor(tag / 8), start, at);
    } else throw tooLarge('a group');
  }
}

const tooLarge = (what: string): KvError =>
  new KvError('PROTOCOL', `ext_proc: a large message with ${what}; see what the gateway sends`);
