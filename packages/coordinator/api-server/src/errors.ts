/**
 * What a client is told when something fails: OpenAI's shape `{error: {message, type, param, code}}` with the HTTP
 * status that OpenAI's clients act on (they try again after 429 and 5xx, and heed retry-after).
 */
import { Saturated } from '@kvtier/dispatch';
import { KvError, type KvErrorCode } from '@kvtier/errors';
import { PodRefusal } from './pod-refusal.ts';

export interface ErrorBody {
  readonly error: {
    readonly message: string;
    readonly type: string;
    readonly param: string | null;
    readonly code: string | null;
  };
}

export interface HttpErrorOptions {
  readonly param?: string | undefined;
  readonly code?: string;
  readonly type?: string;
  /** Told as retry-after. */
  readonly retryAfterSeconds?: number;
}

export class HttpError extends Error {
  override readonly name = 'HttpError';
  readonly status: number;
  readonly body: ErrorBody;
  readonly retryAfterSeconds: number | undefined;

  constructor(status: number, message: string, options: HttpErrorOptions = {}) {
    super(message);
    this.status = status;
    this.retryAfterSeconds = options.retryAfterSeconds;
    const type = options.type ?? (status >= 500 ? 'server_error' : 'invalid_request_error');
    this.body = { error: { message, type, param: options.param ?? null, code: options.code ?? null } };
  }
}

export const badParameter = (param: string | undefined, message: string, code = 'invalid_value'): HttpError =>
  new HttpError(400, message, { param, code });

const kinds: Readonly<Partial<Record<KvErrorCode, { status: number } & HttpErrorOptions>>> = {
  REQUEST: { status: 400, code: 'invalid_value' },
  TOO_LONG: { status: 400, code: 'context_length_exceeded' },
  CANCELLED: { status: 499, code: 'cancelled' },
  BUSY: { status: 429, code: 'queue_full', type: 'rate_limit_error', retryAfterSeconds: 1 },
  CAPACITY: { status: 503, code: 'capacity', retryAfterSeconds: 1 },
  DEADLINE: { status: 504, code: 'deadline_exceeded' },
  DISCONNECTED: { status: 503, code: 'engine_unavailable', retryAfterSeconds: 1 },
};

interface FastifyFailure {
  readonly statusCode?: number;
  readonly code?: string;
  readonly message: string;
}

const fastifyKinds: Readonly<Record<string, readonly [status: number, code: string, message?: string]>> = {
  FST_ERR_CTP_EMPTY_JSON_BODY: [400, 'invalid_json', 'The body is empty; send a JSON object.'],
  FST_ERR_CTP_INVALID_JSON_BODY: [400, 'invalid_json'],
  FST_ERR_CTP_INVALID_CONTENT_LENGTH: [400, 'invalid_body'],
  FST_ERR_CTP_INVALID_MEDIA_TYPE: [415, 'unsupported_media_type', 'Send the body as content-type: application/json.'],
  FST_ERR_CTP_BODY_TOO_LARGE: [413, 'request_too_large'],
};

/** Any thrown value as what the client is told. A defect of ours is a 500 without its inner details. */
export function toHttpError(thrown: unknown, prefix = ''): HttpError {
  if (thrown instanceof HttpError) return thrown;
  if (thrown instanceof KvError) {
    const { status, ...options } = kinds[thrown.code] ?? { status: 500, code: thrown.code.toLowerCase() };
    const retryAfterSeconds =
      thrown instanceof Saturated || thrown instanceof PodRefusal ? thrown.retryAfterS : undefined;
    return new HttpError(status, prefix + thrown.message, {
      ...options,
      ...(retryAfterSeconds !== undefined && { retryAfterSeconds }),
    });
  }
  const { statusCode, code, message } = thrown as FastifyFailure;
  const known = code === undefined ? undefined : fastifyKinds[code];
  if (known) return new HttpError(known[0], known[2] ?? message, { code: known[1] });
  if (statusCode !== undefined && statusCode >= 400 && statusCode < 500) {
    return new HttpError(statusCode, message, { code: 'invalid_request' });
  }
  return new HttpError(500, 'The server failed on this request; its log says why.', { code: 'internal_error' });
}
